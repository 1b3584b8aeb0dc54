"""A generation round by round: the tree, the accepted path, its tokens, and the text so far.

Every round stands on the page; the script shows one at a time. Without it they stand below each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ddtree.decoding.decoding import RoundStats
from ddtree.pictures.pages.acceptance import acceptance_picture, by_depth
from ddtree.pictures.pages.markup import Markup, counted, join, tag
from ddtree.pictures.pages.page import facts, page, section
from ddtree.pictures.pages.tree import tree_picture
from ddtree.pictures.view import TreeView, shown

MOST_NODES = 48
"""Nodes of a round that are drawn: the best ones, which are a tree too, and the accepted path."""


@dataclass(frozen=True)
class Traced:
    """One prompt's generation."""

    prompt: str
    token_ids: Sequence[int]
    """All new tokens: the first came with the prompt, the others with the rounds."""
    rounds: Sequence[RoundStats]
    ended_by: str


@dataclass(frozen=True)
class Texts:
    """Tokens as text."""

    token: Callable[[int], str]
    """One token, special ones shown."""
    whole: Callable[[Sequence[int]], str]
    """Many, special ones shown."""


def trace_page(
    prompts: Sequence[Traced], texts: Texts, about: dict[str, object]
) -> tuple[str, bytes]:
    """The title and the page.

    Args:
        prompts: what was generated.
        texts: the tokenizer's.
        about: what else to tell: the target, the budget, ...
    """
    views = [[round_view(stats, texts.token) for stats in one.rounds] for one in prompts]
    rounds = sum(map(len, views))
    tokens = sum(len(one.token_ids) for one in prompts)
    per_round = (tokens - sum(bool(one.token_ids) for one in prompts)) / rounds if rounds else 0.0
    title = f"{per_round:.2f} tokens a round" if rounds else "No round was needed"
    depths = by_depth(view for own in views for view in own)
    first = "the first of each prompt comes with the prompt, in no round"
    numbers = {**about, "tokens": f"{tokens:,} ({first})", "rounds": f"{rounds:,}"}
    articles = [_prompt(p, one, views[p], texts) for p, one in enumerate(prompts)]
    return title, page(
        title,
        "trace of a generation",
        tag("section", facts(numbers)),
        _walk(prompts) if rounds else None,
        *articles,
        section(
            "Acceptance by depth",
            acceptance_picture(depths),
            note="Of all rounds. Pale: those whose tree had a child of the accepted path at this depth. "
            "Strong: those that accepted one.",
        )
        if depths
        else None,
        script="trace.js",
    )


def round_view(stats: RoundStats, token_text: Callable[[int], str]) -> TreeView:
    """A round's tree and accepted path."""
    tree, count = stats.tree, stats.num_nodes
    token_ids = tree.token_ids[0, :count].tolist()
    return TreeView(
        request=0,
        prefix_len=0,
        q_len=tree.token_ids.shape[1],
        num_nodes=count,
        token_ids=tuple(token_ids),
        parents=tuple(tree.parents[0, :count].tolist()),
        scores=tuple(tree.scores[0, :count].tolist()),
        accepted=tuple(stats.acceptance.nodes[0, : stats.num_accepted].tolist()),
        labels=tuple(shown(token_text(token)) for token in token_ids),
        allowed=None,
    )


def _walk(prompts: Sequence[Traced]) -> Markup:
    """The buttons; the script shows them."""
    choices = [
        tag("option", f"{p}: {' '.join(one.prompt.split())[:60]}", value=p)
        for p, one in enumerate(prompts)
        if one.rounds
    ]
    several = len(choices) > 1
    keys = "Keys: ← and → walk, Home and End" + ("; p and n change the prompt." if several else ".")
    return tag(
        "nav",
        tag("label", "prompt ", tag("select", *choices, id="prompt")) if several else None,
        tag(
            "div",
            tag("button", "← previous", type="button", id="previous"),
            tag("output", "", id="place"),
            tag("button", "next →", type="button", id="next"),
            class_="steps",
        ),
        tag("input", type="range", id="slider", min=0, value=0, aria_label="round"),
        tag("p", keys, class_="note"),
        class_="walk",
        hidden=True,
    )


def _prompt(p: int, one: Traced, views: Sequence[TreeView], texts: Texts) -> Markup:
    """The text with a link to each round, and the rounds."""
    pieces = _pieces(one, texts.whole)
    told = [tag("span", pieces[0], class_="first")]
    told += [
        tag("a", piece or "·", href=f"#p{p}r{r}", data_round=r, title=f"round {r + 1}")
        for r, piece in enumerate(pieces[1:])
    ]
    rounds = [_round(f"p{p}r{r}", r, stats, view, texts.token)
              for r, (stats, view) in enumerate(zip(one.rounds, views, strict=True))]  # fmt: skip
    passes = counted(len(views), "round")
    return tag(
        "article",
        tag(
            "section",
            tag("h2", f"Prompt {p}"),
            tag("p", one.prompt, class_="asked"),
            tag("h3", "The text so far"),
            tag("p", *told, class_="story", tabindex=0),
            tag(
                "p",
                f"{counted(len(one.token_ids), 'token')} in {passes}, ended by {one.ended_by}.",
                class_="note",
            ),
        ),
        *rounds,
        class_="prompt",
        data_prompt=p,
    )


def _pieces(one: Traced, whole: Callable[[Sequence[int]], str]) -> list[str]:
    """The text that came with the prompt and with each round; together they are the text.

    A character whose bytes are cut by the end of a round belongs to the round that completes it.
    """
    counts = [len(stats.new_token_ids) for stats in one.rounds]
    first = len(one.token_ids) - sum(counts)
    ends = list(accumulate(counts, initial=first))
    pieces, done = [], 0
    for end in ends:
        text = whole(one.token_ids[:end])
        certain = text if end == ends[-1] else text.rstrip("�")
        pieces.append(certain[done:])
        done = max(done, len(certain))
    return pieces


def _round(
    id_: str, r: int, stats: RoundStats, view: TreeView, token_text: Callable[[int], str]
) -> Markup:
    drawn, rows = pruned(view)
    drafts, tokens = stats.num_accepted - 1, len(stats.new_token_ids)
    head = f"Round {r + 1}: {counted(drafts, 'draft')} accepted, {counted(tokens, 'token')}"
    size = f"{counted(stats.num_nodes, 'node')} of {counted(view.q_len, 'row')}"
    if len(rows) < stats.num_nodes:
        size += f"; drawn are the {MOST_NODES} best and the accepted path"
    if stats.draft_seconds is None:
        times = f"batch drafted and verified in {_ms(stats.verify_seconds)}"
    else:
        times = (
            f"batch drafted in {_ms(stats.draft_seconds)}, verified in {_ms(stats.verify_seconds)}"
        )
    return tag(
        "section",
        tag("h3", head),
        _path(stats, view, token_text),
        tree_picture(drawn, rows=rows),
        tag("p", f"{size}; {times}.", class_="note"),
        id=id_,
        class_="round",
    )


def _path(stats: RoundStats, view: TreeView, token_text: Callable[[int], str]) -> Markup:
    """The accepted path as tokens: the root, the accepted drafts, the target's own token."""
    accepted = [view.token_ids[row] for row in view.accepted]
    bonus = int(stats.acceptance.bonus[0])
    kept = len(stats.new_token_ids)
    chips = [_chip(token_text(accepted[0]), "root", "the root, from before")] if accepted else []
    for i, token in enumerate([*accepted[1:], bonus]):
        is_bonus = i == len(accepted) - 1
        kind = "bonus" if is_bonus else "draft"
        title = "the target's own token" if is_bonus else "an accepted draft"
        if i >= kept:
            kind, title = f"{kind} cut", f"{title}, past the end of the text"
        chips.append(_chip(token_text(token), kind, title))
    return tag("p", join(chips, " "), class_="path")


def _chip(text: str, kind: str, title: str) -> Markup:
    sign = {"root": "", "draft": "✓ ", "bonus": "+ "}[kind.split(maxsplit=1)[0]]
    return tag("span", tag("span", sign, class_="dim") if sign else None, shown(text, 40) or "''",
               class_=f"chip {kind}", title=title)  # fmt: skip


def pruned(view: TreeView) -> tuple[TreeView, list[int]]:
    """The best nodes of a large tree with the accepted path, and the rows that they had."""
    count = len(view.parents)
    if count <= MOST_NODES:
        return view, list(range(count))
    rows = sorted({*range(MOST_NODES), *view.accepted})
    new = {row: i for i, row in enumerate(rows)}
    return replace(
        view,
        q_len=len(rows),
        num_nodes=len(rows),
        token_ids=tuple(view.token_ids[row] for row in rows),
        parents=tuple(new.get(view.parents[row], -1) for row in rows),
        scores=tuple(view.scores[row] for row in rows),
        accepted=tuple(new[row] for row in view.accepted),
        labels=tuple(view.labels[row] for row in rows),
    ), rows


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
