"""From tokens to text as they come, with stop strings found wherever they begin and end.

A token may be part of a character, and a stop string may be part of a token or span several. Text is made from a short
window of tokens, so that a token costs the same at any length of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
_UNFINISHED = "\ufffd"


class TextStream:
    """The text of one answer.

    Args:
        decode: token ids to text, without special tokens.
        stop: strings that end the answer; the text ends before them.

    Attributes:
        text: everything decoded so far; after a stop string was found, all before it.
        stopped: the stop string that was found, or None.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        if any(not string for string in stop):
            raise ValueError("a stop string is empty; it would end every answer before its first character")
        self.text = ""
        self.stopped: str | None = None
        self._decode = decode
        self._stop = tuple(stop)
        self._longest = max((len(string) for string in stop), default=0)
        self._tokens: list[int] = []
        # Tokens from _window to _done are decoded again with what follows: spaces depend on the token before.
        self._window = 0
        self._done = 0

    def push(self, token: int) -> str | None:
        """Add a token; the stop string that is complete with it, or None."""
        self._tokens.append(token)
        shown, whole = self._decode(self._tokens[self._window : self._done]), self._decode(self._tokens[self._window :])
        if len(whole) <= len(shown) or whole.endswith(_UNFINISHED):
            return None
        self._window, self._done = self._done, len(self._tokens)
        return self._append(whole[len(shown) :])

    def finish(self) -> None:
        """Add what was held back as an unfinished character: no more tokens will come."""
        if self.stopped is None:
            shown, whole = self._decode(self._tokens[self._window : self._done]), self._decode(self._tokens[self._window :])
            self._append(whole[len(shown) :])
            self._done = len(self._tokens)

    @property
    def settled(self) -> str:
        """The text without an end that may turn out to begin a stop string; what can be shown."""
        if self.stopped is not None:
            return self.text
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(string.startswith(self.text[-size:]) for string in self._stop):
                return self.text[:-size]
        return self.text

    def _append(self, piece: str) -> str | None:
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [(place, string) for string in self._stop if (place := self.text.find(string, searched)) >= 0]
        if found:
            place, self.stopped = min(found)
            self.text = self.text[:place]
        return self.stopped
