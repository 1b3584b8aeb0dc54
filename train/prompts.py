"""The prompt file: what the target is asked to continue or to answer, training apart from evaluation.

A line of ``prompts.jsonl.gz`` is a prompt with the temperatures at which it is continued; a line of
``evaluation.jsonl`` a prompt that never enters training. Written here once, carried to where the
target runs.
"""

import gzip
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ddtree.spec.errors import InputError, require
from train import sources
from train.files import write_bytes
from train.held_out import Prompt, evaluation_prompts, guard

PROMPTS, EVALUATION = "prompts.jsonl.gz", "evaluation.jsonl"
SHARES = {
    "functions": 0.22,
    "lines": 0.10,
    "reasoning": 0.14,
    "documents": 0.16,
    "topics": 0.38,
}
DEV_SHARE = 0.02
"""Prompts that are not trained on either: progress is watched on them."""
SAMPLED = (0.8, 0.8, 1.0)
"""Temperatures of sampled text, drawn with equal chance."""
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Request:
    """A prompt with what becomes of it."""

    prompt: Prompt
    temperatures: tuple[float, ...]
    """One text each; 0 is greedy."""
    stops: int = 1
    """Stop tokens until the text is over: 2 where the target asks its own question first."""
    dev: bool = False


def build(
    folder: Path,
    debian: Path | None,
    *,
    count: int,
    seed: int,
    shares: dict[str, float] | None = None,
    on_prompt: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Write both files.

    Args:
        folder: where they go.
        debian: a folder into which the Debian packages were unpacked.
        count: prompts, the target's own beginnings not counted.
        seed: the same seed on the same sources gives the same file.
        shares: of the sources; None: all of them.
        on_prompt: told how many there are so far.

    Returns:
        What is in the file.

    Raises:
        InputError: something is missing; all of it is told, before anything is done.
    """
    shares = shares or SHARES
    lacks = sources.lacking([*shares], debian)
    try:
        evaluation = evaluation_prompts()
    except InputError as error:
        lacks.append(str(error))
    require(not lacks, "; ".join(lacks))
    held_out = guard(evaluation)
    chance = random.Random(seed)
    kept: dict[Prompt, None] = {}
    refused = 0
    for name, share in shares.items():
        wanted = round(count * share)
        stream = _source(name, random.Random(f"{seed} {name}"), debian)
        taken = 0
        while taken < wanted and (prompt := next(stream, None)):
            if held_out.touches(prompt.text):
                refused += 1
            elif prompt not in kept:
                kept[prompt] = None
                taken += 1
                on_prompt(len(kept))
    requests = [
        Request(p, (0.0, *chance.choices(SAMPLED, k=2)), dev=chance.random() < DEV_SHARE)
        for p in kept
    ]
    for _ in range(len(kept) // 8):
        requests.append(Request(Prompt(END_OF_TEXT, "itself"), (chance.choice(SAMPLED),)))
        requests.append(
            Request(Prompt("", "itself", chat=True), (chance.choice(SAMPLED),), stops=2)
        )
    chance.shuffle(requests)
    write_requests(folder / PROMPTS, requests)
    lines = "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in evaluation)
    write_bytes(folder / EVALUATION, lines.encode())
    return {
        "prompts": len(requests),
        "texts": sum(len(r.temperatures) for r in requests),
        "of": dict(Counter(r.prompt.source for r in requests)),
        "not trained on, to watch progress": sum(r.dev for r in requests),
        "left out, near an evaluation prompt": refused,
        "evaluation prompts": len(evaluation),
    }


def _source(name: str, chance: random.Random, debian: Path | None) -> Iterator[Prompt]:
    match name:
        case "functions":
            return sources.python_functions(chance)
        case "lines":
            return sources.python_lines(chance)
        case "reasoning":
            return sources.reasoning(chance)
        case "documents":
            return sources.documents(chance, debian or Path())
        case "topics":
            return sources.topics(chance, debian or Path())
    raise InputError(f"no source {name!r}; there are {', '.join(SHARES)}")


def write_requests(path: Path, requests: list[Request]) -> None:
    """Write the prompt file."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:  # equal requests, equal bytes
        for request in requests:
            file.write((json.dumps(asdict(request), ensure_ascii=False) + "\n").encode())
    write_bytes(path, buffer.getvalue())


def read_requests(folder: Path) -> list[Request]:
    """Read the prompt file."""
    path = folder / PROMPTS
    require(path.is_file(), f"no {path}: build it with `python -m train prompts`")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Request(
            **{
                **row,
                "prompt": Prompt(**row["prompt"]),
                "temperatures": tuple(row["temperatures"]),
            }
        )
        for row in rows
    ]


def read_evaluation(folder: Path) -> list[Prompt]:
    """Read the evaluation prompts."""
    path = folder / EVALUATION
    require(path.is_file(), f"no {path}: build it with `python -m train prompts`")
    return [Prompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def encode(tokenizer: Any, prompt: Prompt) -> torch.Tensor:
    """A prompt's tokens ``[n]``: a question in the chat template, an empty one up to where it is asked."""
    text = prompt.text
    if prompt.chat:
        turn = [{"role": "user", "content": text or "\0"}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        if not prompt.text:
            text = text[: text.index("\0")]
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
