"""Hold every clean and every spoiled call of the tests to the captured check in parallel processes: for a
GPU.

Kernels are compiled for each set of fields that a call has, so one process after another would take minutes.
Usage: ``python -m tests.impl.replay_faults PROCESSES``; prints a summary as JSON.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial

from ddtree.invariants import Call


def calls() -> dict[str, Callable[[], Call]]:
    """Every clean call, mutant and entry of the catalogue, by name."""
    from ddtree.catalogue import pairs
    from tests.invariants.test_table import CLEAN, MUTANTS

    made = dict(CLEAN) | {f"{m.invariant}: {m.what}": m.call for m in MUTANTS}
    for name, pair in pairs():
        made[f"{name}, sound"] = partial(getattr, pair, "sound")
        made[name] = partial(getattr, pair, "broken")
    return made


def part(job: tuple[int, int]) -> tuple[int, list[str]]:
    """Run every n-th call; return how many ran and what differed."""
    from tests.impl.replayed import differences, has_tensors

    first, step = job
    made = list(calls().items())[first::step]
    wrong: list[str] = []
    count = 0
    for name, make in made:
        try:
            count += has_tensors(make())
            wrong += differences(name, make)
        except Exception as error:  # noqa: BLE001 # all calls are tried, whatever one does
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return count, wrong


def main() -> None:
    """Run all in so many processes."""
    processes = int(sys.argv[1])
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        done = pool.map(part, [(i, processes) for i in range(processes)])
    wrong = [sentence for _, sentences in done for sentence in sentences]
    seconds = round(time.time() - start, 1)
    print(
        json.dumps({"calls": sum(n for n, _ in done), "wrong": wrong, "seconds": seconds}, indent=1)
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
