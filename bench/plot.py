"""Draw a result of ``bench/attention.py grid``: each cell's time over its floor, ours and every peer's.

python bench/plot.py bench/results/attention-h200.json bench/results/attention-h200.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

SERIES = (  # name, keys of a cell's times, of which the least counts, marker, color
    ("SGLang Triton", ("sglang",), "s", "tab:red"),
    ("FlashInfer", ("flashinfer",), "^", "tab:orange"),
    ("FlexAttention", ("flex", "flex_general"), "v", "tab:purple"),
    ("SDPA, dense mask", ("sdpa_dense",), "x", "tab:gray"),
    ("ceiling: SDPA, no mask, packed rows", ("unmasked_cudnn", "unmasked_fa2"), "D", "tab:green"),
    ("ddtree", ("ddtree",), "o", "tab:blue"),
)
TITLES = {
    "main": "bf16, head dim 128, page size 1",
    "less": "one row less: q_len 2^k",
    "dim64": "head dim 64",
    "page16": "page size 16",
    "page64": "page size 64",
    "fp8": "fp8 keys and values",
}


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
    """One column for each cell, one mark for each implementation; groups of cells one after another."""
    rows = result["cells"]
    columns, labels, gap, last = [], [], 0.0, None
    figure, axes = plt.subplots(figsize=(max(11, 0.27 * len(rows) + 2), 6.5), layout="constrained")
    for i, row in enumerate(rows):
        if row["group"] != last:
            gap += 1.5 if last else 0.0
            name = TITLES[row["group"]]
            where = axes.get_xaxis_transform()
            axes.text(i + gap - 0.4, 1.01, name, transform=where, fontsize=8, rotation=20)
            last = row["group"]
        columns.append(i + gap)
        names = ("batch", "q_len", "prefix", "kv_heads")
        labels.append(", ".join(str(row[name]) for name in names))
    for name, keys, marker, color in SERIES:
        marks = [
            (column, min(row["us"][key] for key in keys if key in row["us"]) / row["floor_us"])
            for column, row in zip(columns, rows, strict=True)
            if any(key in row["us"] for key in keys)
        ]
        if marks:
            axes.plot(*zip(*marks, strict=True), marker, color=color, label=name, markersize=5)
    axes.set_yscale("log")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("time / floor")
    axes.set_xticks(columns, labels, rotation=75, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_xlim(columns[0] - 1, columns[-1] + 1)
    heads = rows[0]["q_heads"]
    axes.set_xlabel(f"batch, q_len, prefix, KV heads (of {heads} query heads)")
    axes.grid(axis="y", which="both", alpha=0.25)
    machine = result["machine"]
    figure.suptitle(
        f"Tree attention, {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}, "
        f"SGLang {machine['sglang']}, FlashInfer {machine['flashinfer-python']}",
        fontsize=10,
    )
    figure.legend(fontsize=8, ncols=len(SERIES), loc="outside lower center")
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
