"""Run every benchmark that this machine can run; say which are left out, and why.

    python bench/all.py [--out FOLDER]

Each subject is a script of its own (``python bench/SUBJECT.py --help``), here run one after another. Their
results and pictures go to a folder; `bench/results` holds recorded ones.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Subject:
    """One script with its arguments, and why it cannot run here (empty: it can)."""

    name: str
    arguments: tuple[str, ...]
    lacking: str = ""


def subjects(out: Path, official: str | None, *, cuda: bool) -> list[Subject]:
    """All subjects; ``out`` is the folder of their results."""
    no_gpu = "" if cuda else "no CUDA device"
    no_official = "" if official else "DDTREE_OFFICIAL names no checkout (bench/official.py --help)"
    return [
        Subject("equality", ("--prompts", "1", "--tokens", "16", "--out", f"{out}/equality.json")),
        Subject(
            "second_pass",
            ("--prompts", "1", "--tokens", "8", "--out", f"{out}/second-pass.json"),
        ),
        Subject(
            "sampling",
            ("--device", "cuda", "--out", f"{out}/sampling.json"),
            no_gpu,
        ),
        Subject("attention", ("grid", "--out", str(out), "--limit", "1200"), no_gpu),
        Subject("round", ("--part", "times", "--out", f"{out}/round.json"), no_gpu),
        Subject("loop", ("--out", f"{out}/loop.json", "--limit", "600"), no_gpu),
        Subject("parts", ("--out", f"{out}/parts.json"), no_gpu),
        Subject("debug", ("--out", f"{out}/debug.json")),
        Subject("debug_overhead", ("--out", f"{out}/debug-overhead.json"), no_gpu),
        Subject("official", ("--out", str(out)), no_gpu or no_official),
    ]


def main() -> None:
    """Run what can run, draw the results, list what was left out; fail if a script failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name in ("equality", "second-pass", "sampling"):
        (out / f"{name}.json").unlink(missing_ok=True)  # these go on where a result ends
    every = subjects(out, os.environ.get("DDTREE_OFFICIAL"), cuda=torch.cuda.is_available())
    failed = []
    for subject in every:
        if not subject.lacking:
            print(f"== {subject.name}", flush=True)
            command = [sys.executable, str(FOLDER / f"{subject.name}.py"), *subject.arguments]
            if subprocess.run(command, check=False).returncode:
                failed.append(subject.name)
    print("==", flush=True)
    pictured = sorted(str(path) for path in out.glob("*.json"))
    if find_spec("matplotlib") is not None:
        subprocess.run([sys.executable, str(FOLDER / "plot.py"), *pictured], check=True)
    for subject in every:
        if subject.lacking:
            print(f"left out: {subject.name}: {subject.lacking}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
