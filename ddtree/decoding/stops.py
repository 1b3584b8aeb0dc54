"""What ends a text: a token, a string, or the number of tokens; and text as it becomes certain."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ddtree.spec.errors import require, require_text

FinishReason = Literal["length", "stop_token", "stop_string"]
Decode = Callable[[Sequence[int]], str]
"""Tokens to text. More tokens only append to it, save that broken bytes (U+FFFD) may become whole."""

BROKEN_BYTES = "\ufffd"


@dataclass(frozen=True)
class Stops:
    """The tokens and the strings that end a text, wherever in an accepted path they come."""

    token_ids: Collection[int] = ()
    strings: tuple[str, ...] = ()
    """Looked for in the new text alone, over the borders of tokens and rounds."""
    decode: Decode | None = None
    """Needed where there are strings."""

    def __post_init__(self) -> None:
        """Refuse strings that cannot be found.

        Raises:
            InputError: as ``require_strings``, or strings without ``decode``.
        """
        require(not self.strings or self.decode is not None, "stop strings need a decode function")
        require_strings(self.strings)

    @classmethod
    def of(cls, stops: "Stops | Collection[int]") -> "Stops":
        """Stops, or those of stop tokens alone."""
        return stops if isinstance(stops, Stops) else cls(stops)

    def cut(
        self, tokens: Sequence[int], new: Sequence[int], room: int
    ) -> tuple[list[int], FinishReason | None]:
        """The new tokens up to and with the one that ends the text.

        Args:
            tokens: the text's tokens before, none of which ended it.
            new: tokens that follow, at least one.
            room: tokens that the text may still have, at least one.

        Returns:
            The tokens kept, and what ended the text; None: nothing yet.
        """
        kept = list(new[:room])
        reason: FinishReason | None = "length" if len(kept) == room else None
        stop = next((i for i, token in enumerate(kept) if token in self.token_ids), None)
        if stop is not None:
            kept, reason = kept[: stop + 1], "stop_token"
        if self._string_at([*tokens, *kept]) is not None:
            first = next(
                count
                for count in range(1, len(kept) + 1)
                if self._string_at([*tokens, *kept[:count]]) is not None
            )
            kept, reason = kept[:first], "stop_string"
        return kept, reason

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as text, cut before the first stop string."""
        assert self.decode is not None
        return self.decode(tokens)[: self._string_at(tokens)]

    def certain_text(self, tokens: Sequence[int]) -> str:
        """The part of the text that no further token can change or cut off."""
        text = self.text(tokens).rstrip(BROKEN_BYTES)
        return text[: len(text) - max((_begun(text, string) for string in self.strings), default=0)]

    def _string_at(self, tokens: Sequence[int]) -> int | None:
        """Where the earliest stop string begins in the text."""
        if not self.strings or self.decode is None:
            return None
        text = self.decode(tokens)
        return min((at for string in self.strings if (at := text.find(string)) >= 0), default=None)


def require_strings(strings: Sequence[str]) -> None:
    """Refuse stop strings that cannot be found.

    Raises:
        InputError: an empty string, one with U+FFFD, or one that is no text.
    """
    for string in strings:
        require(bool(string), "a stop string is empty: it would stop every text")
        require(BROKEN_BYTES not in string, f"the stop string {string!r} holds U+FFFD")
        require_text(f"the stop string {string!r}", string)


class TextStream:
    """Hands text out as it becomes certain: all pieces together are the whole text."""

    def __init__(self, stops: Stops) -> None:
        """Take the stops, which know how to decode."""
        self._stops = stops
        self._tokens: list[int] = []
        self._given = 0

    def __call__(self, token_ids: Sequence[int], *, finished: bool) -> str:
        """Take new tokens; give the text that is certain and was not given before."""
        self._tokens += token_ids
        text = (self._stops.text if finished else self._stops.certain_text)(self._tokens)
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece


def _begun(text: str, string: str) -> int:
    """Characters at the end of the text with which the string may be beginning."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(string[:n])), 0)
