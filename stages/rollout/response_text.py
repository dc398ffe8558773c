"""The text of a response, piece by piece as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what a tokenizer writes for the first bytes of a character


class ResponseText:
    """Decodes the tokens of one response. Its text ends before the first of the ``stops``; text that may turn out to be the
    beginning of one, and bytes of an incomplete character, are returned later. ``stopped``: there is no more text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._begin = self._end = 0  # of the tokens that were decoded last: the next ones are decoded after them
        self._held = ""
        self.stopped = False

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._ids)

    def add(self, token: int) -> str:
        """Append a token; returns the text that is certain now."""
        self._ids.append(token)
        return self._new_text(whole=False)

    def finish(self) -> str:
        """Return the rest, when there are no more tokens."""
        return self._new_text(whole=True)

    def _new_text(self, *, whole: bool) -> str:
        before, text = self._decode(self._begin, self._end), self._decode(self._begin, None)
        if self.stopped or (text.endswith(BROKEN) and not whole):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        text = self._held + text[len(before) :]
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        certain = min(found) if found else len(text) if whole else self._certain(text)
        self._held = text[certain:]
        return text[:certain]

    def _decode(self, begin: int, end: int | None) -> str:
        ids = self._ids[begin:end]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _certain(self, text: str) -> int:
        """Returns how many characters of ``text`` are before what may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        begins = range(max(0, len(text) - longest), len(text))
        return next((at for at in begins if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))
