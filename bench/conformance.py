"""Hold every peer that runs here to the reference, and write docs/conformance.md.

    make peers
    python bench/conformance.py [PEER ...] [--seconds 120] [--seed 0] [--jobs 1]

Each run is recorded in ``bench/results/conformance-<device>.json``; the page is made from all records, so a
GPU's results stay when a CPU's are made anew. A peer that does not run is recorded with the reason.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ddtree.invariants.conformance.failure import smallest
from ddtree.invariants.files import written_whole
from ddtree.peers import PEERS
from ddtree.pictures.pages.conformance import by_property

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "bench/results", ROOT / "docs/conformance.md"
TITLE = """# Conformance

Which implementation of tree verification holds which property, as `ddtree conform` finds it: calls of 1 to 3
requests, widths up to 67, prefixes up to 40, four shapes of trees, padded and ragged, pages of 1, 4 and 16.
Each peer is the published package behind a few lines of `ddtree/peers`; none is copied. *Visible set* is
judged by the oracle: queries and keys of zero and powers of two for values, so that the output is the exact
set of entries that a row sees. A number says how many cases ran: those of a slow interpreter are fewer.
Blank: the peer does not offer it, or ran before the property was there.

Made by `make peers && python bench/conformance.py`; do not edit. `ddtree conform PEER` runs one.
"""
REMARKS = {
    ("NVIDIA H200", "transformers-sdpa"): (
        "PyTorch's `scaled_dot_product_attention` does the same there by itself: float32, an additive mask "
        "whose lowest number is finite, 65 or 129 rows and entries; the last row comes out as if it saw "
        "entry 0 alone. With 64 and 72, in half precision, and with `enable_gqa` (another kernel) it was "
        "right."
    ),
    ("NVIDIA H200", "flashinfer"): (
        "its `plan` reads offsets on the host, so a call that holds it cannot be captured. A server plans "
        "before each replay; these properties replay a call as a whole."
    ),
}
"""What is known of a result beyond the run, by device and peer."""
MARKS = {"holds": "holds", "broken": "**broken**", "refused": "refused", "not offered": ""}


def main() -> None:
    """Run, record, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; default: all"
    )
    parser.add_argument("--seconds", type=int, default=120, help="for each peer")
    parser.add_argument("--examples", type=int, default=150, help="most cases of a property")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="peers at once")
    asked = parser.parse_args()
    unknown = sorted(set(asked.peers) - set(PEERS))
    if unknown:
        parser.error(f"no peer is called {', '.join(unknown)}; known are {', '.join(PEERS)}")
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    record = RESULTS / f"conformance-{device.lower().replace(' ', '-')}.json"
    known = json.loads(record.read_text()) if record.is_file() else {"peers": {}}
    known |= {"device": device, "python": platform.python_version()}
    with ThreadPoolExecutor(asked.jobs) as pool:
        runs = {pool.submit(run, name, asked): name for name in asked.peers or PEERS}
        for done in as_completed(runs):
            name = runs[done]
            known["peers"][name] = done.result()
            known["peers"] = {
                peer: known["peers"][peer] for peer in PEERS if peer in known["peers"]
            }
            with written_whole(record) as work:
                work.write_text(json.dumps(known, indent=1) + "\n")
            print(name, flush=True)
    PAGE.parent.mkdir(exist_ok=True)
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("conformance-*.json"))]
    PAGE.write_text(page(records))
    print(f"wrote {record.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")


def run(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One peer in a process of its own: what ``ddtree conform`` says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ddtree", "conform", name, "--json", "--out", folder,
            "--seconds", str(asked.seconds), "--examples", str(asked.examples), "--seed", str(asked.seed),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    versions = {package: _version(package) for package in PEERS[name].packages}
    if not done.stdout:  # refused before anything was tried
        return {"versions": versions, "not_run": done.stderr.strip().splitlines()[0]}
    properties = json.loads(done.stdout)["properties"]
    for each in properties:
        each.pop("file")
    asked_for = {"seconds": asked.seconds, "examples": asked.examples, "seed": asked.seed}
    return {"versions": versions, **asked_for, "properties": properties}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def page(records: list[dict[str, Any]]) -> str:
    """The page of all records."""
    parts = [TITLE]
    for record in records:
        ran = {name: peer for name, peer in record["peers"].items() if "properties" in peer}
        parts.append(f"\n## On {record['device']}\n")
        parts += [
            f"- `{name}`: {PEERS[name].what} ({_versions(peer)})" for name, peer in ran.items()
        ]
        for name, peer in record["peers"].items():
            if name not in ran:
                parts.append(
                    f"- `{name}`: did not run here: {peer['not_run'].removeprefix('error: ')}"
                )
        parts += ["", *_table(ran), *_broken(ran), *_refused(ran), *_remarks(record["device"], ran)]
    return "\n".join(parts) + "\n"


def _versions(peer: dict[str, Any]) -> str:
    return ", ".join(f"{package} {number}" for package, number in peer["versions"].items())


def _table(ran: dict[str, Any]) -> list[str]:
    """Properties down, peers across; a number is how many cases ran."""
    lines = [f"| property | {' | '.join(ran)} |", f"|---|{'---|' * len(ran)}"]
    for name, statement, cells in by_property(ran.values()):
        shown = [f"{MARKS[cell['state']]} {cell['cases'] or ''}".strip() for cell in cells]
        lines.append(f"| {name}: {statement} | {' | '.join(shown)} |")
    return lines


def _broken(ran: dict[str, Any]) -> list[str]:
    """The smallest failing case of each property that is broken."""
    lines = [
        f"- `{name}`, {prop['property']}: {prop['what']}. "
        f"{smallest(was_cut=prop.get('shrinking_was_cut', False)).capitalize()}: {prop['smallest_case']}."
        for name, peer in ran.items()
        for prop in peer["properties"]
        if prop["state"] == "broken"
    ]
    return ["", "Broken:", "", *lines] if lines else ["", "Nothing that ran is broken."]


def _remarks(device: str, ran: dict[str, Any]) -> list[str]:
    """What is known beyond the run."""
    lines = [f"- `{name}`: {REMARKS[device, name]}" for name in ran if (device, name) in REMARKS]
    return ["", "Remarks:", "", *lines] if lines else []


def _refused(ran: dict[str, Any]) -> list[str]:
    """What peers do not take."""
    lines = [
        f"- `{name}`, {prop['property']}: {count} of {count + prop['cases']} cases: {reason}"
        for name, peer in ran.items()
        for prop in peer["properties"]
        for reason, count in prop["refused"].items()
    ]
    return ["", "Refused by an adapter:", "", *lines] if lines else []


if __name__ == "__main__":
    main()
