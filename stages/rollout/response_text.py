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
        before, text = self._decode(self._begin, self._end), self._decode(self._begin)
        if text.endswith(BROKEN):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return self._release(text[len(before) :])

    def finish(self) -> str:
        """Return the rest, when there are no more tokens."""
        before = self._decode(self._begin, self._end)
        text = self._release(self._decode(self._begin)[len(before) :]) + self._held
        self._held = ""
        return text

    def _decode(self, begin: int, end: int | None = None) -> str:
        ids = self._ids[begin:end]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + new, ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                self._held = text[at:]
                return text[:at]
        return text
