"""The training texts: the target's own, in shards that are written whole, and what is used of them."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from ddtree.spec.errors import InputError, require
from train.batch import Generator, Texts
from train.files import write_tensors
from train.held_out import HeldOut
from train.prompts import Request, encode

LOOP = 24
"""So many tokens in a row that the text has had before: there a text is cut."""
LEAST_NEW = 16
"""New tokens that a text must have."""
FIELDS = ("token_ids", "prompt_lens", "lengths", "temperatures", "is_dev", "is_near_evaluation")


@dataclass(frozen=True)
class Job:
    """A text to be made."""

    prompt_ids: Tensor
    temperature: float
    stops: int
    is_dev: bool


def jobs_of(
    requests: Sequence[Request], tokenizer: Any, *, longest_prompt: int, seed: int
) -> list[Job]:
    """One job for each temperature of each request, shuffled; prompts that are too long are left out."""
    jobs = []
    for request in requests:
        ids = encode(tokenizer, request.prompt)
        if 1 <= ids.numel() <= longest_prompt:
            jobs += [Job(ids, t, request.stops, request.dev) for t in request.temperatures]
    order = np.random.default_rng(seed).permutation(len(jobs))
    return [jobs[i] for i in order]


def write_shards(
    folder: Path,
    jobs: Sequence[Job],
    generator: Generator,
    tokenizer: Any,
    held_out: HeldOut,
    *,
    seed: int,
    shard_texts: int,
    tokens: int,
    settings: dict[str, Any],
    deadline: float | None = None,
    part: tuple[int, int] = (0, 1),
    on_progress: Callable[[int, int, float], None] = lambda _texts, _new, _rate: None,
) -> int:
    """Write shards until there are ``tokens`` new tokens, no more jobs, or no more time.

    A shard is there whole or not at all; those that are there are not made again.

    Args:
        folder: of the shards.
        jobs: all texts; shard i holds the i-th ``shard_texts`` of them.
        generator: of the target.
        tokenizer: of the target, to look for evaluation prompts in what it wrote.
        held_out: the evaluation prompts.
        seed: of the sampling; shard i has its own.
        shard_texts: texts of a shard.
        tokens: new tokens wanted in all.
        settings: what must be equal for shards to belong together.
        deadline: on ``time.monotonic()``'s clock.
        part: ``(k, n)``: only shards k, k + n, k + 2n, ..., so that n machines or GPUs share the work. A
            shard's texts do not depend on it.
        on_progress: told texts, new tokens and tokens a second so far.

    Returns:
        New tokens in the shards of this part.

    Raises:
        InputError: the folder holds shards of other settings.
    """
    total = texts_so_far = 0
    for shard, start in enumerate(range(0, len(jobs), shard_texts)):
        if shard % part[1] != part[0]:
            continue
        path = folder / f"texts-{shard:04d}.safetensors"
        if path.exists():
            texts = _read_shard(path, settings)
            total += int((texts["lengths"] - texts["prompt_lens"]).sum())
            texts_so_far += len(texts["lengths"])
            on_progress(texts_so_far, total, 0.0)
            continue
        if total >= tokens or (deadline is not None and time.monotonic() > deadline):
            break
        wanted = jobs[start : start + shard_texts]
        begin = time.monotonic()

        def look(
            begun: int, read: int, begin: float = begin, texts: int = texts_so_far, new: int = total
        ) -> None:
            on_progress(texts + begun, new, read / (time.monotonic() - begin))

        made = generator.generate(
            [job.prompt_ids for job in wanted],
            [job.temperature for job in wanted],
            stops=[job.stops for job in wanted],
            seed=seed + shard,
            deadline=deadline,
            on_look=look,
        )
        write_tensors(
            path, _shard(made, wanted, tokenizer, held_out), {"settings": json.dumps(settings)}
        )
        total += made.new_tokens
        texts_so_far += len(wanted)
        on_progress(texts_so_far, total, 0.0)
    return total


def _shard(
    texts: Texts, jobs: Sequence[Job], tokenizer: Any, held_out: HeldOut
) -> dict[str, Tensor]:
    rows = zip(texts.token_ids.tolist(), texts.lengths.tolist(), strict=True)
    written = tokenizer.batch_decode([ids[:length] for ids, length in rows])
    return {
        "token_ids": texts.token_ids.int(),
        "prompt_lens": texts.prompt_lens.int(),
        "lengths": texts.lengths.int(),
        "temperatures": texts.temperatures,
        "is_dev": torch.tensor([job.is_dev for job in jobs]),
        "is_near_evaluation": torch.tensor([held_out.touches(text) for text in written]),
    }


def _read_shard(path: Path, settings: dict[str, Any] | None) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        found = json.loads(file.metadata()["settings"])
        if settings is not None and found != settings:
            raise InputError(
                f"{path} was made with other settings: {found}, not {settings}; name another folder"
            )
        return {name: file.get_tensor(name) for name in FIELDS}


@dataclass(frozen=True)
class Corpus:
    """Texts to learn from; the target's choices are the tokens from ``prompt_lens`` on."""

    token_ids: Tensor  # int32 [texts, length]
    prompt_lens: Tensor  # int64 [texts]
    lengths: Tensor  # int64 [texts]
    temperatures: Tensor  # float32 [texts]

    def __len__(self) -> int:
        """Texts."""
        return len(self.lengths)

    @property
    def new_tokens(self) -> int:
        """The target's choices."""
        return int((self.lengths - self.prompt_lens).sum())

    def select(self, rows: Tensor) -> "Corpus":
        """Some of the texts."""
        return Corpus(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def to(self, device: torch.device) -> "Corpus":
        """The same on another device."""
        return Corpus(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def read_corpora(folder: Path) -> tuple[Corpus, Corpus, dict[str, Any]]:
    """The texts to train on, those to watch, and what was counted.

    Raises:
        InputError: there are no shards, or they were made with different settings.
    """
    paths = sorted(folder.glob("texts-*.safetensors"))
    require(bool(paths), f"no texts in {folder}: make them with `python -m train generate`")
    with safe_open(paths[0], "pt") as file:
        settings = json.loads(file.metadata()["settings"])
    shards = [_read_shard(path, settings) for path in paths]
    whole = {name: torch.cat([shard[name] for shard in shards]) for name in FIELDS}
    prompt_lens, made = whole["prompt_lens"].long(), whole["lengths"].long()
    lengths = cut_loops(whole["token_ids"], prompt_lens, made)
    good = (lengths - prompt_lens >= LEAST_NEW) & ~whole["is_near_evaluation"]
    corpus = Corpus(whole["token_ids"], prompt_lens, lengths, whole["temperatures"])
    train = corpus.select(good & ~whole["is_dev"])
    dev = corpus.select(good & whole["is_dev"])
    sampled = train.select(train.temperatures > 0)
    counted = {
        "texts made": len(made),
        "tokens made": int((made - prompt_lens).sum()),
        "texts near an evaluation prompt, left out": int(whole["is_near_evaluation"].sum()),
        "texts cut before a loop": int((lengths < made).sum()),
        "texts trained on": len(train),
        "tokens trained on": train.new_tokens,
        "sampled among them": sampled.new_tokens,
        "texts to watch": len(dev),
        "settings": settings,
    }
    return train, dev, counted


def cut_loops(token_ids: Tensor, prompt_lens: Tensor, lengths: Tensor) -> Tensor:
    """Where each text should end: after the first ``LOOP`` new tokens in a row that it has had before."""
    tokens = token_ids.numpy().astype(np.uint64)
    rows, length = tokens.shape
    if length <= LOOP:
        return lengths
    base = 0x9E3779B97F4A7C15
    powers = pow(base, LOOP, 2**64)
    prefix = np.zeros((rows, length + 1), np.uint64)
    for i in range(length):  # wraps modulo 2**64
        prefix[:, i + 1] = prefix[:, i] * np.uint64(base) + tokens[:, i] + np.uint64(1)
    hashes = prefix[:, LOOP:] - prefix[:, :-LOOP] * np.uint64(powers)
    starts = np.arange(hashes.shape[1])
    ends = lengths.numpy()[:, None]
    counts = (starts >= prompt_lens.numpy()[:, None]) & (starts + LOOP <= ends)
    return torch.from_numpy(np.minimum(_first_repeats(hashes, counts) + LOOP, ends[:, 0]))


def _first_repeats(hashes: NDArray[np.uint64], counts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """In each row the first place whose value stood before it, among those that count; else far off."""
    far = np.iinfo(np.int32).max
    # what does not count gets a value of its own
    hashes = np.where(counts, hashes, np.arange(hashes.shape[1], dtype=np.uint64))
    order = np.argsort(hashes, axis=1, kind="stable")
    ordered = np.take_along_axis(hashes, order, axis=1)
    repeats = ordered[:, 1:] == ordered[:, :-1]
    first: NDArray[np.int64] = np.where(repeats, order[:, 1:], far).min(axis=1, initial=far)
    return first.astype(np.int64)
