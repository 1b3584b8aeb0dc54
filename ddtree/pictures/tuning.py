"""What a tuning run found, in one picture: what rounds yield, what they cost, and what that gives."""

import warnings
from io import BytesIO
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree.decoding.tuning_results import Tuning
from ddtree.pictures.plot import GREY, INK, STYLE

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's, told apart by every kind of colour vision."""
MARKERS = ("o", "s", "^", "D", "v", "P")


def render(tuning: Tuning, form: Literal["png", "svg"]) -> bytes:
    """The picture as a file's bytes."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        figure = Figure(figsize=(11, 8.2), dpi=130, facecolor="white", layout="constrained")
        depth, length, cost, rate = figure.subplots(2, 2).flatten()
        _by_depth(depth, tuning)
        _lengths(length, tuning)
        _costs(cost, tuning)
        _rates(rate, tuning)
        for axes in (depth, length, cost, rate):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{tuning.key}\n{tuning}", fontsize=10, color=INK)
        data = BytesIO()
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(data, format=form, metadata={"Date": None} if form == "svg" else None)
    return data.getvalue()


def _by_depth(axes: Axes, tuning: Tuning) -> None:
    """How deep rounds go: of the recommended topk, a curve for each budget."""
    topk = tuning.best_tree.topk
    curves = [each for each in tuning.accepted if each.topk == topk]
    for i, each in enumerate(curves):
        shares = [*each.by_depth, *[0.0] * (tuning.horizon - len(each.by_depth))]
        axes.plot(
            range(1, tuning.horizon + 1), shares, marker=MARKERS[i % len(MARKERS)], markersize=4,
            color=COLOURS[i % len(COLOURS)], label=f"budget {each.budget}",
        )  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, tuning.horizon + 1))
    axes.set(xlabel="drafted tokens", ylabel="share of rounds")
    axes.set_title(f"Rounds that accept at least so many, topk {topk or 'all'}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _lengths(axes: Axes, tuning: Tuning) -> None:
    """Tokens a round, a curve for each topk, and what is needed to be as fast as plain decoding."""
    budgets = [cost.budget for cost in tuning.costs[1:]]
    for i, topk in enumerate(_topks(tuning)):
        lengths = [each.tokens_per_round for each in tuning.accepted if each.topk == topk]
        axes.plot(budgets, lengths, label=f"topk {topk or 'all'}", **_style(i))
    even = [tuning.even_at(budget) for budget in budgets]
    axes.plot(budgets, even, "--", color=GREY, label="even with plain decoding")
    _budget_axis(axes, budgets)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens a round")
    axes.set_title("Acceptance length by budget", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _costs(axes: Axes, tuning: Tuning) -> None:
    """Milliseconds by q_len: verifying with its quartiles, drafting, and a plain pass."""
    widths = [cost.q_len for cost in tuning.costs]
    verify = [cost.verify_ms for cost in tuning.costs]
    is_apart = all(cost.draft_ms for cost in tuning.costs)
    axes.plot(
        widths, [t.median for t in verify], "o-", color=COLOURS[0], markersize=4,
        label="verify" if is_apart else "draft and verify, in one",
    )  # fmt: skip
    axes.fill_between(
        widths, [t.low for t in verify], [t.high for t in verify], color=COLOURS[0], alpha=0.2,
        label="quartiles", linewidth=0,
    )  # fmt: skip
    if is_apart:
        draft = [cost.draft_ms.median for cost in tuning.costs if cost.draft_ms]
        axes.plot(widths, draft, "s-", color=COLOURS[1], markersize=4, label="draft")
    axes.axhline(
        tuning.plain.ms.median, color=GREY, linestyle="--", label="a pass of plain decoding"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="q_len (budget + 1)", ylabel="ms a round")
    axes.set_title("What a round costs", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _rates(axes: Axes, tuning: Tuning) -> None:
    """Tokens a second, a curve for each topk; of the best one the range over the prompts."""
    budgets = [cost.budget for cost in tuning.costs[1:]]
    for i, topk in enumerate(_topks(tuning)):
        rates = [rate for rate in tuning.rates if rate.topk == topk]
        axes.plot(
            budgets,
            [r.tokens_per_second for r in rates],
            label=f"topk {topk or 'all'}",
            **_style(i),
        )
        if topk == tuning.best_tree.topk:
            axes.fill_between(
                budgets, [r.lowest for r in rates], [r.highest for r in rates],
                color=COLOURS[i % len(COLOURS)], alpha=0.15, linewidth=0,
                label=f"topk {topk or 'all'}, by prompt",
            )  # fmt: skip
    plain = tuning.plain.tokens_per_second
    axes.axhline(plain, color=GREY, linestyle="--", label="plain decoding")
    tree = tuning.best_tree
    axes.plot(
        tree.budget, tree.tokens_per_second, "*", color=INK, markersize=13,
        label="the best tree" + ("" if tuning.best.budget else " (plain is faster)"),
    )  # fmt: skip
    _budget_axis(axes, budgets)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s, all requests together")
    axes.set_title("What that gives", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _topks(tuning: Tuning) -> list[int | None]:
    return list(dict.fromkeys(each.topk for each in tuning.accepted))


def _style(i: int) -> dict[str, Any]:
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
    }


def _budget_axis(axes: Axes, budgets: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    axes.set_xlabel("budget")
