"""Draw the benchmarks' results, each beside its JSON file.

    python bench/plot.py                     all that bench/results holds
    python bench/plot.py out/*.json          these

Attention: each cell's time over its floor, ours and every peer's. Official: the stages of the official
round, and ours. Round: our round by budget and batch, with the targets. Loop: tokens a second and acceptance
length by budget. Parts: where a round's time goes, and the speed-up by acceptance length.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).resolve().parent / "results"
SERIES = (  # name, keys of a cell's times, of which the least counts, marker, color
    ("SGLang Triton", ("sglang",), "s", "tab:red"),
    ("FlashInfer", ("flashinfer",), "^", "tab:orange"),
    ("FlexAttention", ("flex", "flex_general"), "v", "tab:purple"),
    ("SDPA, dense mask", ("sdpa_dense",), "x", "dimgray"),
    ("ceiling: SDPA, no mask, packed rows", ("unmasked",), "D", "tab:green"),
    ("ddtree", ("ddtree",), "o", "tab:blue"),
)
PANELS = (  # of an attention result: groups of cells with a title each
    {"main": "q_len = budget + 1: page size 1, bf16, head dim 128"},
    {"less": "one row less, so that tiles are full: page size 1, bf16, head dim 128"},
    {
        "dim64": "head dim 64",
        "page16": "page size 16",
        "page64": "page size 64",
        "fp8": "fp8 keys and values",
    },
)


def main() -> None:
    """Read the results, write a picture beside each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, default=sorted(RESULTS.glob("*.json")))
    for path in parser.parse_args().results:
        result = json.loads(path.read_text(encoding="utf-8"))
        if draw := DRAWN.get(result.get("subject", "round" if "us" in result else "")):
            picture = path.with_suffix(".png")
            draw(result).savefig(picture, dpi=130)
            print(picture)


def draw_attention(result: dict[str, Any]) -> Any:
    """A panel for each list of groups, a column for each cell, a mark for each implementation."""
    figure, panels = plt.subplots(len(PANELS), figsize=(11, 14), layout="constrained", sharey=True)
    for axes, groups in zip(panels, PANELS, strict=True):
        draw_groups(axes, [row for row in result["cells"] if row["group"] in groups], groups)
    panels[-1].set_xlabel("batch, q_len, prefix, KV heads (of 32 query heads)")
    machine = result["machine"]
    figure.suptitle(
        f"Tree attention on one {machine['gpu']}: time over the floor of bytes and operations\n"
        f"torch {machine['torch']}, Triton {machine['triton']}, SGLang {machine['sglang']}, "
        f"FlashInfer {machine['flashinfer-python']}",
        fontsize=11,
    )
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=9, ncols=3, loc="outside lower center")
    return figure


def draw_groups(axes: Axes, rows: list[dict[str, Any]], groups: dict[str, str]) -> None:
    """The cells of some groups, a gap and a title between them."""
    columns: list[float] = []
    for i, row in enumerate(rows):
        if i == 0 or row["group"] != rows[i - 1]["group"]:
            column = columns[-1] + 2 if columns else 0
            title = groups[row["group"]]
            axes.text(column - 0.4, 1.02, title, transform=axes.get_xaxis_transform(), fontsize=9)
        else:
            column = columns[-1] + 1
        columns.append(column)
    for name, keys, marker, color in SERIES:
        marks = [
            (column, min(row["us"][key] for key in keys if key in row["us"]) / row["floor_us"])
            for column, row in zip(columns, rows, strict=True)
            if any(key in row["us"] for key in keys)
        ]
        axes.plot(
            [column for column, _ in marks], [ratio for _, ratio in marks],
            marker, color=color, label=name, markersize=6,
        )  # fmt: skip
    names = ("batch", "q_len", "prefix", "kv_heads")
    labels = [", ".join(str(row[name]) for name in names) for row in rows]
    axes.set_xticks(columns, labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yscale("log")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("time / floor")
    axes.grid(axis="y", which="both", alpha=0.25)


def draw_official(result: dict[str, Any]) -> Any:
    """Official stages stacked, ours beside them, milliseconds on a log scale."""
    rows = result["rows"]
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    series = {
        "official, whole round": [row["official_us"]["whole"] for row in rows],
        **{
            f"official, {name}": [row["official_us"][name] for row in rows]
            for name in ("copy", "heap", "visibility", "compile", "walk", "commit")
        },
        "ddtree, whole round, page size 1": [row["ours_us"]["page 1"]["whole"] for row in rows],
        "ddtree, whole round, page size 16": [row["ours_us"]["page 16"]["whole"] for row in rows],
    }
    colors = ["black", *(f"C{i}" for i in (1, 2, 4, 5, 6, 7)), "tab:blue", "tab:cyan"]
    budgets = [row["budget"] for row in rows]
    for (name, times), color in zip(series.items(), colors, strict=True):
        whole = "whole" in name
        axes.plot(budgets, times, "o-" if whole else ".--", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.set_xlabel("budget")
    axes.set_ylabel("microseconds, wall time on the host")
    axes.set_title(f"The round without the model, {result['machine']['gpu']}", fontsize=11)
    axes.grid(which="both", alpha=0.25)
    figure.legend(fontsize=8, loc="outside right upper")
    return figure


def draw_round(result: dict[str, Any]) -> Any:
    """One line for each batch and kind of draft over the budgets, and a mark for each target."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    batches = sorted({row["batch"] for row in result["us"]})
    for batch, color in zip(batches, mpl.color_sequences["tab10"], strict=False):
        rows = [row for row in result["us"] if row["batch"] == batch]
        budgets = [row["budget"] for row in rows]
        for name, style, of in (
            ("whole1", "o-", "bf16 logits"),
            ("log_probs_whole1", "x--", "float32 log-probs"),
        ):
            times = [row[name] for row in rows]
            axes.plot(budgets, times, style, color=color, label=f"batch {batch}, {of}")
        held = [(row["budget"], row["target_us"]) for row in rows if row["target_us"]]
        if held:
            axes.plot(*zip(*held, strict=True), "v", color=color, label=f"batch {batch}, target")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    budgets = sorted({row["budget"] for row in result["us"]})
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("budget")
    axes.set_ylabel("µs")
    machine = result["machine"]
    axes.set_title(
        "A round without the model, vocabulary 151936, horizon 15, page size 1,\n"
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}",
        fontsize=10,
    )
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def draw_loop(result: dict[str, Any]) -> Any:
    """Tokens a second by budget, a panel for each batch; acceptance length below."""
    rows = result["rows"]
    batches = sorted({row["batch"] for row in rows})
    figure, panels = plt.subplots(
        2, len(batches), figsize=(5.5 * len(batches), 7), layout="constrained", squeeze=False,
        height_ratios=(2, 1),
    )  # fmt: skip
    for column, batch in enumerate(batches):
        speeds, lengths = panels[:, column]
        mine = [row for row in rows if row["batch"] == batch]
        budgets = sorted({row["budget"] for row in mine if row["budget"]})
        for method, marker, color in (("ours", "o-", "tab:blue"), ("official", "s--", "tab:red")):
            found = [row for row in mine if row["method"] == method]
            some = max((len(row.get("which_prompts", ())) for row in found), default=0)
            of = [row["budget"] for row in found]
            name = "ddtree" if method == "ours" else "official"
            name += f", {some} prompts" * bool(some)
            if found:
                speeds.plot(
                    of, [row["tokens_per_second"] for row in found], marker, color=color, label=name
                )
                lengths.plot(of, [row["acceptance_length"] for row in found], marker, color=color)
        for row in mine:
            if row["method"] == "plain":
                speeds.axhline(
                    row["tokens_per_second"], color="black", label="plain, one graph a token"
                )
        speeds.set_title(f"batch {batch}", fontsize=10)
        for axes in (speeds, lengths):
            axes.set_xscale("log", base=2)
            labels = ["" if budget + 1 in budgets else str(budget) for budget in budgets]
            axes.set_xticks(budgets, labels)  # 63 and 64 are one place
            axes.set_ylim(0, 1.08 * axes.dataLim.y1)
            axes.grid(alpha=0.3)
        lengths.set_xlabel("budget")
        speeds.legend(fontsize=8, loc="center left")
    panels[0][0].set_ylabel("tokens a second")
    panels[1][0].set_ylabel("acceptance length")
    machine = result["machine"]
    figure.suptitle(
        f"Decoding, {result['target']} with drafter {Path(result['drafter']).name}, {result['dtype']},\n"
        f"{machine['gpu']}, torch {machine['torch']}, Transformers {machine['transformers']}",
        fontsize=10,
    )
    return figure


def draw_parts(result: dict[str, Any]) -> Any:
    """Milliseconds of each part, stacked, beside the plain step; speed-up by acceptance length."""
    rows = result["rows"]
    figure, (bars, lines) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    names = [f"{row['budget']}, {row['prefix']}" for row in rows]
    bottom = [0.0] * len(rows)
    for part in ("draft", "build", "verify", "context", "accept", "commit"):
        ms = [row["us"].get(part, 0.0) / 1e3 for row in rows]  # older results: no context
        bars.bar(names, ms, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, ms, strict=True)]
    for kind, marker in (("round", "k_"), ("plain", "kx")):
        label = "whole round, one graph" if kind == "round" else "plain step"
        bars.plot(
            names, [row["us"][kind] / 1e3 for row in rows], marker, markersize=14, label=label
        )
    bars.tick_params("x", rotation=90 if len(names) > 8 else 0)
    bars.set_xlabel("budget, prefix")
    bars.set_ylabel("ms")
    bars.legend(fontsize=8, loc="lower right", framealpha=0.9)
    for row, name in zip(rows, names, strict=True):
        even = row["us"]["round"] / row["us"]["plain"]
        lengths = range(1, 17)
        lines.plot(lengths, [n / even for n in lengths], label=name)
    lines.axhline(1.0, color="black", linewidth=0.8)
    lines.set_xlabel("acceptance length")
    lines.set_ylabel("speed-up over plain decoding")
    lines.legend(fontsize=8, title="budget, prefix")
    lines.grid(alpha=0.3)
    machine = result["machine"]
    figure.suptitle(
        f"A round of a model of size {result['size']}, {result['dtype']}, "
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}",
        fontsize=10,
    )
    return figure


DRAWN = {
    "attention": draw_attention,
    "loop": draw_loop,
    "official": draw_official,
    "parts": draw_parts,
    "round": draw_round,
}


if __name__ == "__main__":
    main()
