"""The DFlash drafter: loads a published checkpoint and drafts a block a pass (``dflash_model.py``)."""

import json
import shlex
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Float32, Int64
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.embedded import EMBEDDED_DRAFTER
from ddtree.places import is_path
from ddtree.spec.contracts import BlockSize
from ddtree.spec.errors import InputError, require

INDEX = "model.safetensors.index.json"
DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Of weights."""


class TargetModel(Protocol):
    """What a drafter needs of its target: an ``HFTarget`` or a ``PagedTarget``."""

    model: Any
    num_layers: int


class DFlashDrafter:
    """Drafts [root, mask, mask, ...] with the target's embedding table and head.

    Keys and values of the committed entries are kept, so a pass costs the new entries and the
    block alone.
    """

    def __init__(self, model: DFlashModel, target: TargetModel) -> None:
        """Join a draft model to the target that it was trained for.

        It is moved to the target's device and dtype, and is in evaluation mode from then on.

        Raises:
            InputError: the two do not fit (hidden size, layers, mask token), with the numbers.
        """
        config, embedding = model.config, target.model.get_input_embeddings().weight
        head = target.model.get_output_embeddings()
        require(head is not None, "the target has no output head for the drafter to use")
        vocab, width = embedding.shape
        layers = target.num_layers
        require(
            config.hidden_size == width,
            f"the drafter's hidden size is {config.hidden_size}, the target's is {width}",
        )
        require(
            config.num_target_layers == layers,
            f"the drafter was made for {config.num_target_layers} layers, the target has {layers}",
        )
        bad = [i for i in config.target_layer_ids if not 0 <= i < layers]
        require(not bad, f"target_layer_ids {bad} outside the target's {layers} layers")
        require(
            0 <= config.mask_token_id < vocab,
            f"mask_token_id {config.mask_token_id} outside the target's vocabulary of {vocab}",
        )
        self.model = model.to(device=embedding.device, dtype=embedding.dtype).eval()
        self.block_size = BlockSize(config.block_size)
        self.target_layer_ids = config.target_layer_ids
        self.embedding = embedding
        self.head = head
        self.reset()

    @classmethod
    def load(cls, name: str | Path, target: TargetModel) -> "DFlashDrafter":
        """Load a published checkpoint: ``config.json`` and ``*.safetensors``, split or whole.

        Args:
            name: its folder, the hub name of one that is in the local Hugging Face cache, or
                ``"embedded"``: the embedded target's.
            target: the target that it was trained for.

        Raises:
            InputError: no such checkpoint; a file, a config field or a tensor is missing, surplus, not
                finite, or of another type or shape; or it does not fit the target.
        """
        folder = checkpoint_folder(name)
        config = DFlashConfig.from_json(folder / "config.json")
        with torch.device("meta"):
            model = DFlashModel(config)
        model.load_state_dict(_checked(_read_weights(folder), model, folder), assign=True)
        return cls(model, target)

    def reset(self) -> None:
        """Forget the request's context."""
        config = self.model.config
        empty = self.model.fc.weight.new_empty(0, config.num_key_value_heads, config.head_dim)
        self._context = [(empty, empty)] * config.num_hidden_layers

    @torch.inference_mode()
    def draft(
        self,
        token_ids: Int64[Tensor, " length"],
        features: Float[Tensor, "new width"] | None,
    ) -> Float32[Tensor, "1 horizon vocab"]:
        """Log-probs of the block's mask rows; see ``Drafter.draft``.

        Raises:
            InputError: ``features`` do not complete the context up to the root.
        """
        prefix_len = token_ids.numel() - 1
        known = self._context[0][0].shape[0]
        new = 0 if features is None else features.shape[0]
        require(
            features is not None and known + new == prefix_len,
            f"the drafter holds {known} entries and got {new} more; the prefix has {prefix_len}",
        )
        assert features is not None
        device = self.model.fc.weight.device
        config = self.model.config
        entries = torch.arange(known, prefix_len, device=device)
        added = self.model.context(features.to(self.model.fc.weight), entries)
        self._context = [
            (torch.cat([k, new_k]), torch.cat([v, new_v]))
            for (k, v), (new_k, new_v) in zip(self._context, added, strict=True)
        ]
        block = torch.full((self.block_size,), config.mask_token_id, device=device)
        block[0] = int(token_ids[-1])  # the loop hands tokens over on the CPU: nothing waits
        positions = prefix_len + torch.arange(self.block_size, device=device)
        x = self.embed(block)
        hidden = self.model(x, positions, self._context)
        return torch.log_softmax(self.logits(hidden[1:]).float(), dim=-1)[None]

    def embed(self, token_ids: Int64[Tensor, " n"]) -> Float[Tensor, "n hidden"]:
        """The rows of the target's table; its own embedding may scale what it looks up."""
        scale, rows = (
            self.model.config.input_embedding_scale,
            functional.embedding(token_ids, self.embedding),
        )
        return rows if scale == 1 else rows * scale

    def logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """What the target's head makes of the model's hidden states."""
        config = self.model.config
        logits: Tensor = self.head(hidden)
        if config.output_multiplier != 1 or config.final_logit_softcapping:
            logits = logits.float() * config.output_multiplier
        if config.final_logit_softcapping:
            cap = config.final_logit_softcapping
            logits = torch.tanh(logits / cap) * cap
        return logits


def checkpoint_folder(name: str | Path) -> Path:
    """The folder of a checkpoint: of ``"embedded"``, itself, or of a hub name; nothing is downloaded.

    Raises:
        InputError: there is none.
    """
    from huggingface_hub import snapshot_download

    if name == "embedded":
        return EMBEDDED_DRAFTER
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    is_place = isinstance(name, Path) or is_path(name) or folder.exists()
    require(not is_place, f"no drafter folder {folder}")
    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except (OSError, ValueError) as error:
        raise InputError(
            f"drafter {str(name)!r} is neither 'embedded' nor a folder nor a model in the local Hugging Face "
            f"cache (nothing is downloaded here; run: hf download {shlex.quote(str(name))})"
        ) from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            part = load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read the drafter's weights {file}: {error}") from error
        twice = sorted(weights.keys() & part.keys())
        require(not twice, f"{file} holds {', '.join(twice)}, which another file holds too")
        _require_sound(part, file)
        weights |= part
    return weights


def _require_sound(weights: dict[str, Tensor], file: Path) -> None:
    """Refuse numbers that no draft can be made with, before one is: NaN, infinity, integers."""
    for name, tensor in weights.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        require(kind in DTYPES, f"{file}: {name} is of {kind}; expected {', '.join(DTYPES)}")
        count = tensor.numel() - int(tensor.isfinite().sum())
        require(
            count == 0,
            f"{file}: {count} of the {tensor.numel()} numbers of {name} are NaN or infinite",
        )


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index names, or all of them where there is no index."""
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        require(bool(files), f"the drafter folder {folder} holds no .safetensors file")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"cannot read the index of the drafter's weights {index}: {error!r}"
        ) from error
    absent = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
    require(not absent, f"{index} names {', '.join(absent)}; the folder lacks it")
    return [folder / n for n in names]


def _checked(weights: dict[str, Tensor], model: DFlashModel, folder: Path) -> dict[str, Tensor]:
    """The weights, once every name and shape is the model's."""
    expected = model.state_dict()
    faults = [
        f"{what} {', '.join(sorted(names))}"
        for what, names in (
            ("missing:", expected.keys() - weights.keys()),
            ("surplus:", weights.keys() - expected.keys()),
        )
        if names
    ]
    faults += [
        f"{name} has shape {list(weights[name].shape)}, the config makes it {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    require(not faults, f"the drafter in {folder} does not fit its config; {'; '.join(faults)}")
    return weights
