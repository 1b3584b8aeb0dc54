"""A generation round by round: the text, the tokens and the acceptance are the generation's own."""

from collections.abc import Sequence

import torch

from ddtree.decoding.decoding import RoundStats
from ddtree.pictures.pages.acceptance import Depth, by_depth
from ddtree.pictures.pages.trace import MOST_NODES, Texts, Traced, pruned, round_view, trace_page
from ddtree.spec.contracts import Acceptance, DraftTree
from tests.pictures.parsed import Element, parsed

WORDS = [
    "<script>hacked()</script>",
    "a&b",
    "\"q'",
    " ",
    "\n",
    "\u202ex",
    "<|end|>",
    "日本",
    "\x00\x1b[31m",
    "é",
]
"""Tokens of a hostile tokenizer."""


def word(token: int) -> str:
    """One token as text."""
    return WORDS[token % len(WORDS)]


TEXTS = Texts(word, lambda tokens: "".join(map(word, tokens)))


def stats(
    parents: Sequence[int], accepted: Sequence[int], new: Sequence[int], padding: int = 0
) -> RoundStats:
    """One round; node i holds token i."""
    count = len(parents)
    rows = count + padding
    depths = [0] * count
    for row, parent in enumerate(parents[1:], 1):
        depths[row] = depths[parent] + 1
    tree = DraftTree(
        token_ids=torch.tensor([[*range(count), *[0] * padding]]),
        parents=torch.tensor([[*parents, *[-1] * padding]], dtype=torch.int32),
        depths=torch.tensor([[*depths, *[0] * padding]], dtype=torch.int32),
        scores=torch.arange(0, -rows, -1).double()[None],
        num_nodes=torch.tensor([count], dtype=torch.int32),
    )
    nodes = torch.full((1, max(len(accepted), max(depths) + 1)), -1, dtype=torch.int32)
    nodes[0, : len(accepted)] = torch.tensor(accepted)
    acceptance = Acceptance(nodes, torch.tensor([len(accepted)]).int(), torch.tensor([9]))
    return RoundStats(tree, acceptance, tuple(new), 0.001, 0.25)


ROUNDS = (
    stats([-1, 0, 0, 1], [0, 1, 3], [1, 3, 9]),
    stats([-1, 0, 1, 2], [0], [9], padding=2),
    stats([-1], [0], [9]),
    stats([-1, 0, 0, 2], [0, 2], [2]),  # its bonus is past the end
)
PROMPT = Traced("<b>say</b>", (0, 1, 3, 9, 9, 9, 2), ROUNDS, "its length")


def page_of(*prompts: Traced) -> Element:
    """The page's elements; its script is its own alone."""
    page = parsed(trace_page(prompts, TEXTS, {"target": "tiny"})[1])
    assert [s.parent.tag for s in page.all("script") if s.parent] == ["body"]
    return page


def test_the_text_is_the_text() -> None:
    """The pieces of the rounds make the whole text, hostile tokens included, each linked to its round."""
    story = page_of(PROMPT).one("p", class_="story")
    expected = TEXTS.whole(PROMPT.token_ids).replace("\x00", "�").replace("\x1b", "�")
    assert story.text == expected
    assert [a.attributes["href"] for a in story.all("a")] == ["#p0r0", "#p0r1", "#p0r2", "#p0r3"]
    assert story.one("span", class_="first").text == WORDS[0]


def test_each_round_has_its_tree_path_and_tokens() -> None:
    """Chips are the root, the accepted drafts and the target's own token; what is past the end is struck."""
    page = page_of(PROMPT)
    rounds = page.all("section", class_="round")
    assert [r.attributes["id"] for r in rounds] == ["p0r0", "p0r1", "p0r2", "p0r3"]
    assert rounds[0].one("h3").text == "Round 1: 2 drafts accepted, 3 tokens"

    def chips(r: Element) -> list[tuple[str, str]]:
        return [(c.attributes["class"][5:], c.text) for c in r.all("span", class_="chip")]

    assert chips(rounds[0]) == [
        ("root", "<script>hacked()</script>"), ("draft", "✓ a&b"), ("draft", "✓ ␣"), ("bonus", "+ é"),
    ]  # fmt: skip
    assert chips(rounds[3])[1:] == [("draft", "✓ \"q'"), ("bonus cut", "+ é")]
    accepted = [int(g.attributes["data-row"]) for g in rounds[0].all("g", class_="accepted")]
    assert accepted == [0, 1, 3]
    assert rounds[1].one(class_="padding").text == "padding: rows 4 to 5"
    assert "4 nodes of 6 rows; batch drafted in 1.0 ms, verified in 250.0 ms" in rounds[1].text
    assert rounds[0].all("text", class_="token")[0].text == "<script>hac…"


def test_a_character_cut_by_a_round_belongs_to_the_next() -> None:
    """Bytes of one character in two rounds: the text is whole, and no replacement sign is in it."""
    data = "aé日b".encode()

    def whole(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    rounds = [stats([-1, 0], [0, 1], part) for part in (data[1:2], data[2:4], data[4:])]
    told = Traced("x", tuple(data), rounds, "its length")
    page = parsed(trace_page([told], Texts(chr, whole), {})[1])
    story = page.one("p", class_="story")
    assert story.text.replace("·", "") == "aé日b"
    assert [a.text for a in story.all("a")] == ["·", "é", "日b"]


def test_acceptance_by_depth_is_counted_along_the_path() -> None:
    """By hand: rounds that reached a depth, whose tree went on there, and that accepted."""
    views = [round_view(one, word) for one in ROUNDS]
    assert by_depth(views) == [Depth(1, 4, 4, 3, 2), Depth(2, 4, 2, 2, 1), Depth(3, 4, 1, 0, 0)]
    page = page_of(PROMPT)
    table = page.section("Acceptance by depth").one("table")
    assert [row[2:] for row in table.table()[1:]] == [
        ["2 of 4 (50%)", "2 of 3 (67%)"],
        ["1 of 4 (25%)", "1 of 2 (50%)"],
        ["0 of 4 (0%)", "never drafted"],
    ]
    widths = [r.attributes["width"] for r in table.all("rect")]
    assert widths == ["75.00%", "50.00%", "50.00%", "25.00%", "0.00%", "0.00%"]


def test_a_large_tree_keeps_its_best_nodes_and_its_path() -> None:
    """Rows keep their numbers; the drawing says that it is a part."""
    parents = [-1, *[0] * 120, 1, 121]
    large = stats(parents, [0, 1, 121, 122], [1, 121, 122, 9])
    view = round_view(large, word)
    kept, rows = pruned(view)
    assert rows == [*range(MOST_NODES), 121, 122]
    assert [kept.token_ids[row] for row in kept.accepted] == [0, 1, 121, 122]
    assert kept.depths[-2:] == (2, 3)
    page = page_of(Traced("x", (0, 1, 121, 122, 9), [large], "a stop token"))
    shown = page.one("section", class_="round")
    drawn = [int(g.attributes["data-row"]) for g in shown.all("g", class_="accepted")]
    assert drawn == [0, 1, 121, 122]
    assert "123 nodes of 123 rows; drawn are the 48 best and the accepted path" in shown.text


def test_several_prompts_each_have_their_rounds() -> None:
    """A prompt that ended with its first token has no round, and no place among the choices."""
    alone = Traced("one", (6,), (), "a stop token")
    page = page_of(PROMPT, alone, PROMPT)
    articles = page.all("article", class_="prompt")
    assert [len(a.all("section", class_="round")) for a in articles] == [4, 0, 4]
    assert [o.attributes["value"] for o in page.all("option")] == ["0", "2"]
    assert page.one("h1").text == "1.50 tokens a round"
    assert "<b>say</b>" in articles[0].one("p", class_="asked").text


def test_no_round_at_all() -> None:
    """A page without rounds has no buttons."""
    page = page_of(Traced("one", (6,), (), "a stop token"))
    assert page.one("h1").text == "No round was needed"
    assert not page.all("nav")
