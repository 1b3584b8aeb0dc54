"""Mutation testing of our own code: change one operator, number or loop at a time; a test must fail.

The mutations are cosmic-ray's. Its own runner starts a Python for each, which with PyTorch takes ten
seconds; here one process imports PyTorch once and forks for each mutant. The child is served the mutated
source of the one file (nothing on disk is changed) and runs the tests of that file until the first failure.

Usage: ``python tools/mutants.py [--every N] [--seconds S] [--out FILE] [spec/index.py ...]``
Without files: those of ``TESTS``. Prints every mutant that lives, with its line before and after, and a
table; exits with 1 if one lives that ``tests/mutants.md`` does not explain.
"""

import argparse
import importlib.util
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = ROOT / "tests" / "mutants.md"

EQUAL, REFUSED = "tests/impl/test_equal.py", "tests/impl/test_bad_input.py"
BLOCKS = "tests/impl/test_blocks.py"
COMPILED, DEBUG = "tests/impl/test_torch_compile.py", "tests/invariants/test_debug.py"
TESTS: dict[str, tuple[str, ...]] = {
    "spec/index.py": ("tests/spec/test_index.py",),
    "spec/tree.py": ("tests/spec/test_tree.py", "tests/spec/test_bad_input.py"),
    "spec/mask.py": ("tests/spec/test_mask.py", "tests/spec/test_bad_input.py"),
    "spec/layout.py": ("tests/spec/test_layout.py", "tests/spec/test_bad_input.py"),
    "spec/accept.py": ("tests/spec/test_accept.py", "tests/spec/test_bad_input.py"),
    "spec/commit.py": ("tests/spec/test_commit.py", "tests/spec/test_bad_input.py"),
    "spec/attention.py": (
        "tests/spec/test_attention.py",
        "tests/spec/test_buffers.py",
        "tests/spec/test_bad_input.py",
    ),
    "spec/buffers.py": ("tests/spec/test_buffers.py", "tests/spec/test_bad_input.py"),
    "spec/round.py": ("tests/spec/test_round.py", "tests/spec/test_bad_input.py"),
    "spec/contracts.py": ("tests/spec/test_contracts.py", DEBUG, "-k", "not variable"),
    "spec/public.py": (DEBUG, COMPILED, "-k", "(test_debug.py and not variable) or debug_mode"),
    "spec/errors.py": ("tests/spec/test_bad_input.py",),
    "spec/dtypes.py": ("tests/spec/test_dtypes.py", "tests/spec/test_bad_input.py"),
    "spec/sampling.py": ("tests/spec/test_sampling.py", "tests/spec/test_bad_input.py"),
    "spec/softmax.py": ("tests/spec/test_softmax.py",),
    "spec/exact.py": ("tests/spec/test_softmax.py", "-k", "exponential or log_1p or steps"),
    "impl/accept.py": (
        EQUAL,
        REFUSED,
        "tests/impl/test_round.py",
        "-k",
        "(spec and accept) or bad_input or a_round",
    ),
    "impl/attention_configs.py": ("tests/impl/test_attention.py", "-k", "which_configuration"),
    "impl/attention.py": (
        "tests/impl/test_attention.py",
        "tests/impl/test_offsets.py",
        REFUSED,
        "-k",
        (
            "(attention.py and not fp8 and not scales and not dtype1 and not packed and not dense)"
            " or every_fp8 or options4-5 or offsets or bad_input"
        ),
    ),
    "impl/buffers.py": ("tests/impl/test_round.py", EQUAL, "-k", "buffers"),
    "impl/check.py": ("tests/impl/test_check_sites.py", "tests/impl/test_check.py"),
    "impl/check_sites.py": (
        "tests/impl/test_check_sites.py",
        "tests/impl/test_check.py",
        "-k",
        "site or page",
    ),
    "impl/commit.py": (
        EQUAL,
        REFUSED,
        BLOCKS,
        "-k",
        "(spec and commit) or bad_input or test_blocks",
    ),
    "impl/layout.py": (EQUAL, REFUSED, BLOCKS, "-k", "(spec and plan) or bad_input or test_blocks"),
    "impl/layers.py": ("tests/impl/test_layers.py", REFUSED),
    "impl/mask.py": (EQUAL, REFUSED, "-k", "(spec and mask) or bad_input"),
    "impl/op.py": (
        "tests/impl/test_devices.py",
        COMPILED,
        "-k",
        "(devices and not next_step) or secret or debug_mode or (promises and verify_attention)",
    ),
    "impl/products.py": ("tests/impl/test_products.py", REFUSED),
    "impl/rank.py": (
        EQUAL,
        "-k",
        "(spec and build_tree) or tiles or large or threshold or no_log_prob or part_of or groups",
    ),
    "impl/record.py": ("tests/impl/test_record.py", REFUSED),
    "impl/round.py": ("tests/impl/test_round.py",),
    "impl/sampling.py": (
        EQUAL,
        REFUSED,
        "-k",
        "uniform or argmax or bad_input or sampled",
    ),
    "impl/tree.py": (
        EQUAL,
        REFUSED,
        "-k",
        "(spec and build_tree) or of_draft or deepest or threshold or bad_input",
    ),
    "invariants/streams.py": ("tests/invariants/test_streams.py",),
}
"""The files that can be mutated, and pytest's arguments for the tests of each."""

SKIPPED = {
    "core/RemoveDecorator",  # @public is debug mode's hook: tests/invariants/test_debug.py, not these tests
}
"""Operators whose mutants the tests above do not speak of."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    operator: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        """The line before and after."""
        where = f"{self.path}:{self.line} {self.operator.split('/')[-1]}"
        return f"{where}\n    - {self.before.strip()}\n    + {self.after.strip()}"


class Served(MetaPathFinder, Loader):
    """Serves one module's source from memory."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the one module."""
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec: ModuleSpec) -> None:
        """Make a module as usual."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the mutated source."""
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)  # noqa: S102

    def get_source(self, _: str) -> str:
        """What tracebacks and ``inspect`` show."""
        return self.source


def mutants(path: str) -> Iterator[Mutant]:
    """Every mutant of a file, each text once."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / path).read_text(encoding="utf-8")
    lines = source.splitlines()
    seen: set[str] = set()
    for name in sorted(set(operator_names()) - SKIPPED):
        if get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        for occurrence in range(10_000):
            changed = mutate_code(source, operator, occurrence)
            if changed is None:
                break
            if changed in seen or changed == source:
                continue
            seen.add(changed)
            found = zip(lines, changed.splitlines(), strict=False)
            at = next((i for i, (a, b) in enumerate(found) if a != b), len(lines) - 1)
            yield Mutant(path, name, at + 1, lines[at], changed.splitlines()[at], changed)


def killed(mutant: Mutant, tests: Sequence[str], seconds: float) -> bool:
    """Run the tests in a fork that is served the mutant; a hang counts as killed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        code = 2
        try:
            code = _tested(mutant, tests)
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _tested(mutant: Mutant, tests: Sequence[str]) -> int:
    import pytest

    name = "ddtree." + mutant.path.removesuffix(".py").replace("/", ".")
    path = ROOT / "ddtree" / mutant.path
    sys.meta_path.insert(0, Served(name, path, mutant.source))
    flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    early = [
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]  # its plugins were imported before it
    return int(pytest.main([*flags, *early, *tests]))


def _warm() -> None:
    """Import what every child needs and no mutant changes."""
    import torch

    os.environ["DDTREE_PROFILE"] = "mutants"  # as "quick", but what fails is not made small
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py, before Triton is imported
    # the last is what torch.use_deterministic_algorithms imports, for seconds
    for name in (
        "jaxtyping",
        "beartype",
        "hypothesis",
        "pytest",
        "transformers",
        "torch._inductor.config",
    ):
        __import__(name)
    torch.set_num_threads(1)


def main(arguments: list[str]) -> int:
    """Mutate and test; return the exit code."""
    parser = argparse.ArgumentParser(description="Mutation testing.")
    parser.add_argument("files", nargs="*", default=list(TESTS))
    parser.add_argument("--every", type=int, default=1, help="take every N-th mutant of a file")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.files) - set(TESTS))
    if unknown:
        print(f"no tests are named for {', '.join(unknown)}; TESTS has {', '.join(TESTS)}")
        return 2
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    explained = EXPLAINED.read_text(encoding="utf-8") if EXPLAINED.exists() else ""
    lines, unexplained = list[str](), 0
    listed = {path: list(mutants(path))[:: given.every] for path in given.files}
    _warm()
    for path, found in listed.items():
        begin = time.monotonic()
        unchanged = Mutant(path, "none", 0, "", "", (ROOT / path).read_text(encoding="utf-8"))
        if killed(unchanged, TESTS[path], given.seconds):
            print(f"{path}: its tests fail, or take over {given.seconds} s, without any mutation")
            return 2

        def judge(mutant: Mutant, tests: Sequence[str] = TESTS[path]) -> bool:
            return killed(mutant, tests, given.seconds)

        with ThreadPool(given.jobs) as pool:
            verdicts = pool.map(judge, found, chunksize=1)
        alive = [m for m, dead in zip(found, verdicts, strict=True) if not dead]
        for mutant in alive:
            told = mutant.after.strip() in explained
            unexplained += not told
            lines.append(f"{mutant}{'    (explained)' if told else ''}")
        by = Counter(verdicts)
        minutes = (time.monotonic() - begin) / 60
        lines.append(
            f"{path}: {len(found)} mutants, {by[True]} killed, {len(alive)} alive, {minutes:.1f} min"
        )
        print("\n".join(lines[-len(alive) - 1 :]), flush=True)
    if given.out:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
