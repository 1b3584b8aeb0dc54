"""What ends a text: tokens and strings, wherever they come."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.decoding import Stops, TextStream
from ddtree.spec import InputError


def letters(token_ids: Sequence[int]) -> str:
    """Tokens 0 to 25 as letters, a pair of letters from 26 on."""
    return "".join(
        chr(97 + t) if t < 26 else chr(97 + t - 26) + chr(97 + (t - 25) % 26) for t in token_ids
    )


def utf8(token_ids: Sequence[int]) -> str:
    """Tokens as bytes."""
    return bytes(token_ids).decode(errors="replace")


def tokens(text: str) -> list[int]:
    """One token a letter."""
    return [ord(letter) - 97 for letter in text]


def test_a_stop_token_at_depth_2_of_an_accepted_path_of_5() -> None:
    """Nothing after it is kept, and the room does not matter."""
    stops = Stops((9,))
    assert stops.cut([1], [2, 3, 9, 4, 9], 10) == ([2, 3, 9], "stop_token")
    assert stops.cut([1], [2, 3, 9, 4, 9], 3) == ([2, 3, 9], "stop_token")
    assert stops.cut([1], [2, 3, 9, 4, 9], 2) == ([2, 3], "length")
    assert stops.cut([1], [2, 3], 3) == ([2, 3], None)


def test_strings_span_tokens_and_rounds() -> None:
    """The text ends with the token that completes the string, whatever rounds its parts came in."""
    stops = Stops((), ("the end", "cab"), lambda ids: letters(ids).replace("z", " "))
    whole = tokens("onczthezendzofzit")
    for at in range(1, 11):
        assert stops.cut(whole[:at], whole[at:], 99) == (whole[at:11], "stop_string")
    assert stops.text(whole[:11]) == "onc "
    assert stops.cut([], whole[:10], 99) == (whole[:10], None)
    # a token that says more than the string: all of it is kept, the text is cut
    assert stops.cut(tokens("xca"), [26 + 1, 5], 99) == ([27], "stop_string")
    assert stops.text([*tokens("xca"), 27]) == "x"


def test_the_first_of_several_ends_wins() -> None:
    """A string before a stop token, a stop token before a string, the length before both."""
    stops = Stops((25,), ("ab",), letters)
    assert stops.cut([], tokens("xabyz"), 9) == (tokens("xab"), "stop_string")
    assert stops.cut([], tokens("xzaby"), 9) == (tokens("xz"), "stop_token")
    assert stops.cut([], tokens("xyabz"), 2) == (tokens("xy"), "length")
    assert stops.cut([], tokens("xab"), 3) == (tokens("xab"), "stop_string")


def test_strings_that_cannot_be_found_are_refused() -> None:
    """An empty one, one of broken bytes, and any without a way to read tokens."""
    with pytest.raises(InputError, match="is empty"):
        Stops((), ("a", ""), letters)
    with pytest.raises(InputError, match=r"U\+FFFD"):
        Stops((), ("\ufffd",), letters)
    with pytest.raises(InputError, match="decode"):
        Stops((), ("a",))


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=2),
    st.data(),
)
def test_rounds_of_any_length_give_one_text(
    ids: list[int], strings: list[str], data: st.DataObject
) -> None:
    """As token by token; and streamed pieces add up to the text without ever taking one back."""
    stops = Stops((), tuple(strings), letters)
    expected = next(
        (n for n in range(1, len(ids) + 1) if any(s in letters(ids[:n]) for s in strings)), len(ids)
    )
    stream, text, kept, reason = TextStream(stops), "", list[int](), None
    while reason is None:
        size = data.draw(st.integers(1, 5))
        new, reason = stops.cut(kept, ids[len(kept) : len(kept) + size], len(ids) - len(kept))
        kept += new
        text += stream(new, finished=reason is not None)
    assert kept == ids[:expected]
    cuts = [letters(kept).find(s) for s in strings if s in letters(kept)]
    assert text == stops.text(kept) == letters(kept)[: min(cuts, default=None)]


def test_the_stream_waits_for_whole_characters_and_possible_stops() -> None:
    """What may still change or be cut off is held back, no more and no longer."""
    stream = TextStream(Stops((), ("éa!",), utf8))
    e = "é".encode()
    assert stream(e[:1], finished=False) == ""
    assert stream(e[1:], finished=False) == ""  # may begin the stop string
    assert stream(b"b", finished=False) == "éb"
    assert stream(e, finished=False) == ""
    assert stream(b"a", finished=False) == ""
    assert stream(e[:1], finished=True) == "éa\ufffd"
