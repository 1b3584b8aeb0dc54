"""Draw ``bench/attention.py grid``: each cell's time over its floor, with what PyTorch and peers take.

python bench/plot.py bench/results/attention-h200.json bench/results/attention-h200.png
"""

import argparse
import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

SERIES = (  # name, where a cell holds its time, marker, color
    ("ddtree", ("us",), "o", "tab:blue"),
    ("SDPA, no mask, packed rows", ("sdpa_packed_us",), "D", "tab:green"),
    ("SDPA, dense mask", ("sdpa_dense_us",), "x", "tab:gray"),
    ("FlashInfer (recorded)", ("recorded", "flashinfer_us"), "^", "tab:orange"),
    ("SGLang (recorded)", ("recorded", "sglang_us"), "s", "tab:red"),
)


def main() -> None:
    """Read the result, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.result.read_text(encoding="utf-8")), arguments.picture)


def draw(result: dict[str, Any], picture: Path) -> None:
    """One column for each cell, one mark for each implementation."""
    rows = result["cells"]
    figure, axes = plt.subplots(figsize=(11, 5.5), layout="constrained")
    for name, path, marker, color in SERIES:
        ratios = [reduce(getitem, path, row) / row["floor_us"] for row in rows]
        axes.plot(range(len(rows)), ratios, marker, color=color, label=name)
    axes.set_yscale("log")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("time / floor")
    names = ("batch", "q_len", "prefix", "kv_heads")
    labels = [", ".join(str(row[name]) for name in names) for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=8)
    axes.set_xlabel("batch, q_len, prefix, KV heads (of 32 query heads)")
    machine = result["machine"]
    axes.set_title(
        f"Tree attention, bf16, head dim 128, {machine['gpu']}, "
        f"torch {machine['torch']}, Triton {machine['triton']}",
        fontsize=10,
    )
    axes.grid(axis="y", which="both", alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
