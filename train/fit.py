"""Training: the drafter learns what the target says next, many blocks of many texts a step.

Everything random is a function of the seed and the step, and a checkpoint holds the rest, so a run that was
killed goes on as if nothing had happened: bit for bit on a CPU.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.spec.errors import InputError, require
from train.acceptance import acceptance, total
from train.blocks import LabelLoss, draft_states, head_loss, label_loss
from train.data import Corpus
from train.files import write_bytes, write_tensors
from train.llama import Llama

CHECKPOINT, LOG = "checkpoint.safetensors", "log.jsonl"
LOG_EVERY = 50


@dataclass(frozen=True)
class Settings:
    """What a run is made of, beside its texts and its target."""

    layers: int = 5
    block_size: int = 16
    mask_token_id: int = 16
    """A token of the target that its texts do not hold (the embedded target's ``<empty_output>``)."""
    texts: int = 32
    """Texts of a step."""
    anchors: int = 64
    """Blocks of a text."""
    rate: float = 1e-3
    """Largest learning rate: reached after ``warmup`` steps, then down to zero along a cosine."""
    warmup: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of a gradient."""
    fade: float = 4.0
    """Depth k weighs exp(-(k - 1) / fade)."""
    steps: int | None = None
    minutes: float | None = None
    """Of training, all sittings together. The rate is down at the first of the two limits."""
    seed: int = 0


class Trainer:
    """A run: the draft model, its optimiser, and where it stands."""

    def __init__(
        self,
        folder: Path,
        target: Any,
        corpus: Corpus,
        settings: Settings,
        model: DFlashModel,
        *,
        fingerprint: str = "",
        compile: str = "none",  # noqa: A002 - torch's own word
    ) -> None:
        """Begin a run in ``folder``, or go on with the one that is there.

        Args:
            folder: of checkpoint and log.
            target: the Transformers model, in the dtype that features are computed in.
            corpus: texts to train on, on the target's device.
            settings: of the run.
            model: the draft model as it starts, float32, on the target's device.
            fingerprint: of texts and target: a run goes on with the same only.
            compile: ``"none"``, ``"loss"`` or ``"all"``: what torch.compile makes faster.

        Raises:
            InputError: no limit is set, or the folder holds a run of other settings.
        """
        require(
            settings.steps is not None or settings.minutes is not None,
            "a run needs a limit: steps, minutes or both",
        )
        self.folder, self.settings, self.corpus = folder, settings, corpus
        self.llama = Llama(target)
        self.model = model
        self.step = 0
        self.seconds = 0.0
        self.about = {"settings": asdict(settings), "fingerprint": fingerprint}
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self._states: Callable[..., Tensor] = draft_states
        self._loss: LabelLoss = label_loss
        if compile in {"loss", "all"}:
            self._loss = torch.compile(label_loss, dynamic=False)
        if compile == "all":
            self._states = torch.compile(draft_states, dynamic=False)
        depths = torch.arange(model.config.block_size - 1, device=self.device)
        self._fade = torch.exp(-depths / settings.fade)
        self._sums = torch.zeros(3, len(depths), device=self.device)  # loss, first guesses, rows
        self._epoch: tuple[int, Tensor] = (-1, torch.empty(0))
        self._lengths = corpus.lengths.cpu()  # read every step, without waiting for the device
        self._load()

    @property
    def device(self) -> torch.device:
        """Where all is."""
        return self.llama.device

    @property
    def config(self) -> DFlashConfig:
        """Of the draft model."""
        return self.model.config

    @property
    def progress(self) -> float:
        """How far the run is, 0 to 1: by steps or by minutes, whichever is further."""
        settings = self.settings
        by_steps = self.step / settings.steps if settings.steps else 0.0
        by_time = self.seconds / (60 * settings.minutes) if settings.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    @property
    def is_done(self) -> bool:
        """Whether a limit is reached."""
        return self.progress >= 1.0

    def train_step(self) -> None:
        """One step of the optimiser."""
        begin = time.monotonic()
        settings = self.settings
        rate = settings.rate * min(1.0, (self.step + 1) / settings.warmup)
        rate *= 0.5 * (1 + math.cos(math.pi * self.progress))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        texts, anchors, is_block = self._blocks()
        self._loss_of(texts, anchors, is_block).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        is_logged = self.step % LOG_EVERY == 0 or self.step == 1
        entry = self._entry(rate) if is_logged else None  # waits for the device: the clock is true
        self.seconds += time.monotonic() - begin
        if entry is not None:
            self.log({**entry, "seconds": round(self.seconds, 1)})

    def _blocks(self) -> tuple[Corpus, Tensor, Tensor]:
        """This step's texts, their anchors ``[B, A]``, and which anchors there are."""
        settings, count = self.settings, len(self.corpus)
        rows = self._rows(count, settings.texts)
        texts = self.corpus.select(rows.to(self.device))
        width = min(-(-int(self._lengths[rows].max()) // 64) * 64, texts.token_ids.shape[1])
        chance = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step)
        draws = torch.rand(settings.texts, width, generator=chance).to(self.device)
        places = torch.arange(width, device=self.device)
        # a root is a token of the target's that another one follows
        is_root = (places >= texts.prompt_lens[:, None]) & (places + 1 < texts.lengths[:, None])
        chosen = draws.masked_fill(~is_root, -1.0).topk(min(settings.anchors, width), dim=1)
        token_ids = texts.token_ids[:, :width].long()
        return (
            Corpus(token_ids, texts.prompt_lens, texts.lengths, texts.temperatures),
            chosen.indices,
            chosen.values >= 0,
        )

    def _rows(self, count: int, texts: int) -> Tensor:
        """The step's texts: every text once an epoch, in an order of the epoch's own."""
        places = torch.arange(self.step * texts, (self.step + 1) * texts)
        rows = torch.empty(texts, dtype=torch.int64)
        for epoch in places.div(count, rounding_mode="floor").unique().tolist():
            if self._epoch[0] != epoch:
                chance = torch.Generator().manual_seed(self.settings.seed * 7919 + epoch)
                self._epoch = (epoch, torch.randperm(count, generator=chance))
            within = places.div(count, rounding_mode="floor") == epoch
            rows[within] = self._epoch[1][places[within] % count]
        return rows

    def _loss_of(self, texts: Corpus, anchors: Tensor, is_block: Tensor) -> Tensor:
        config, horizon = self.config, self.config.block_size - 1
        states, features = self.llama.read(texts.token_ids, config.target_layer_ids)
        assert features is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            drafted = self._states(
                self.model, self.llama.embedding, texts.token_ids, features, anchors
            )
        # the token at a place was chosen from the state one place before
        places = anchors[..., None] + torch.arange(1, horizon + 1, device=self.device)  # [B, A, H]
        is_label = is_block[..., None] & (places < texts.lengths[:, None, None])
        places = places.clamp_max(texts.token_ids.shape[1] - 1)
        weight = self._fade * is_label
        row = torch.arange(len(texts), device=self.device)[:, None, None].expand_as(places)
        loss, losses, firsts = head_loss(
            drafted.flatten(0, 2),
            self.llama.head,
            states[row, places - 1].flatten(0, 2),
            texts.temperatures[row].flatten(),
            texts.token_ids[row, places].flatten(),
            (weight / weight.sum()).flatten(),
            self._loss,
        )
        with torch.no_grad():
            each = torch.stack([losses, firsts.float(), torch.ones_like(losses)])
            self._sums += (each.view(3, -1, horizon) * is_label.view(-1, horizon)).sum(1)
        return loss

    def _entry(self, rate: float) -> dict[str, Any]:
        """The means since the last entry."""
        losses, firsts, rows = self._sums.tolist()
        self._sums.zero_()
        fade = self._fade.tolist()
        by_depth = [x / max(n, 1) for x, n in zip(losses, rows, strict=True)]
        return {
            "step": self.step,
            "epoch": round(self.step * self.settings.texts / len(self.corpus), 3),
            "loss": sum(w * x for w, x in zip(fade, by_depth, strict=True)) / sum(fade),
            "rate": rate,
            "first_guess_right": [
                round(x / max(n, 1), 4) for x, n in zip(firsts, rows, strict=True)
            ],
        }

    def watch(self, dev: Corpus, texts: int, budget: int) -> dict[str, dict[str, float]]:
        """Acceptance on some texts that are not trained on; it goes into the log."""
        model = DFlashModel(self.config).to(self.device, self.llama.dtype)
        model.load_state_dict(self.model.state_dict())
        found: dict[str, dict[str, float]] = {}
        for name, is_kind in (("greedy", dev.temperatures == 0), ("sampled", dev.temperatures > 0)):
            part = dev.select(is_kind.nonzero()[:texts, 0])
            if len(part):
                sums = total(acceptance(model, self.llama, part, budgets=(budget,)))
                found[name] = {
                    f"{kind} {size}": round(r.length, 3) for (kind, size), r in sums.items()
                }
        self.log({"step": self.step, "seconds": round(self.seconds, 1), "acceptance": found})
        return found

    def log(self, entry: dict[str, Any]) -> None:
        """Append a line."""
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        for name, weight in self.model.named_parameters():
            for key, value in self.optimizer.state[weight].items():
                tensors[f"optimizer.{key}.{name}"] = value
        tensors["sums"] = self._sums
        where = {**self.about, "step": self.step, "seconds": self.seconds}
        write_tensors(self.folder / CHECKPOINT, tensors, {"run": json.dumps(where)})

    def _load(self) -> None:
        """Go on where the folder's checkpoint stands; without one, begin anew."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / CHECKPOINT
        if path.exists():
            with safe_open(path, "pt", device=str(self.device)) as file:
                run = json.loads(file.metadata()["run"])
                for key, value in json.loads(json.dumps(self.about)).items():
                    if run[key] != value:
                        raise InputError(
                            f"{path} is of another run: its {key} are {run[key]}, not {value}; "
                            "name another folder"
                        )
                self.step, self.seconds = run["step"], run["seconds"]
                self._sums.copy_(file.get_tensor("sums"))
                names = list(file.keys())
                self.model.load_state_dict(
                    {
                        n.removeprefix("model."): file.get_tensor(n)
                        for n in names
                        if n.startswith("model.")
                    }
                )
                for name, weight in self.model.named_parameters():
                    self.optimizer.state[weight] = {
                        key: _where(file.get_tensor(f"optimizer.{key}.{name}"), key, weight)
                        for key in ("step", "exp_avg", "exp_avg_sq")
                        if f"optimizer.{key}.{name}" in names
                    }
        self._cut_log()

    def _cut_log(self) -> None:
        """Drop lines past the checkpoint: those steps are made again."""
        path = self.folder / LOG
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] <= self.step]
            write_bytes(path, "".join(kept if self.step else []).encode())


def _where(value: Tensor, key: str, weight: Tensor) -> Tensor:
    """AdamW counts steps on the CPU, unless it is fused."""
    return value.to(weight.device if key != "step" or weight.is_cuda else "cpu")
