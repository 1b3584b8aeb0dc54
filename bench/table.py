"""Write a result of ``bench/attention.py grid`` as Markdown tables.

python bench/table.py bench/results/attention-h200.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

COLUMNS = {
    "ddtree": ("ddtree",),
    "SGLang": ("sglang",),
    "FlashInfer": ("flashinfer",),
    "Flex": ("flex", "flex_general"),
    "SDPA dense": ("sdpa_dense",),
    "unmasked": ("unmasked",),
}
"""Names of the columns and the times of a cell of which each holds the least."""


def main() -> None:
    """Read the result, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    result = json.loads(parser.parse_args().result.read_text(encoding="utf-8"))
    rows = result["cells"]
    for group in dict.fromkeys(row["group"] for row in rows):
        print(f"\n`{group}`\n")
        print(table([row for row in rows if row["group"] == group]))
    print()
    print(json.dumps(result["summary"], indent=1))
    reasons: dict[str, int] = {}
    for row in rows:
        for name, why in row["not_timed"].items():
            reasons[f"{name}: {why}"] = reasons.get(f"{name}: {why}", 0) + 1
    print(*(f"{count} x not timed: {reason}" for reason, count in reasons.items()), sep="\n")


def table(rows: list[dict[str, Any]]) -> str:
    """One line a cell: floor, ours (over the floor), the others; the fastest but the ceiling in bold."""
    used = {
        name: keys
        for name, keys in COLUMNS.items()
        if any(key in row["us"] for row in rows for key in keys)
    }
    lines = [
        f"| batch, q_len, prefix, heads | floor | {' | '.join(used)} |",
        "|---" * (len(used) + 2) + "|",
    ]
    for row in rows:
        us = {
            name: min(row["us"][key] for key in keys if key in row["us"])
            for name, keys in used.items()
            if any(key in row["us"] for key in keys)
        }
        fastest = min((name for name in us if name != "unmasked"), key=us.__getitem__)
        marks = []
        for name in used:
            mark = f"{us[name]:.{1 if us[name] < 1000 else 0}f}" if name in us else ""
            if name == "ddtree":
                mark += f" ({us[name] / row['floor_us']:.2f})"
            marks.append(f"**{mark}**" if name == fastest else mark)
        shape = (
            f"{row['batch']}, {row['q_len']}, {row['prefix']}, {row['q_heads']}/{row['kv_heads']}"
        )
        lines.append(f"| {shape} | {row['floor_us']:.1f} | {' | '.join(marks)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
