"""The text of a response, piece by piece as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

BROKEN = "\ufffd"  # what a tokenizer writes for the first bytes of a character
MOST_PENDING = 16  # tokens without a certain character; more are bytes that make none


class Decodes(Protocol):
    """The method of a tokenizer that texts need."""

    def decode(self, token_ids: list[int]) -> Any: ...


class ResponseText:
    """Decodes the tokens of one response. Its text ends before the first of the ``stops``; text
    that may turn out to be the beginning of one, and bytes of an incomplete character, are returned
    later. ``stopped``: at which stop string it has ended. ``special_tokens``: they have a text,
    too. ``least``: tokens in which no stop string is looked for. ``include_stop``: the text has the
    stop string at its end. ``newest``: what the last call has decoded, before stop strings."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        *,
        special_tokens: bool = False,
        least: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._all_stops = stops
        self._least = least
        self._include_stop = include_stop
        self._options = {} if special_tokens else {"skip_special_tokens": True}
        self._ids: list[int] = []
        # of the tokens that were decoded last: the next ones are decoded after them
        self._begin = self._end = 0
        self._held = ""
        self.newest = ""
        self.stopped = ""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._ids)

    @property
    def pending(self) -> int:
        """The number of the last tokens that have not been decoded, as they end inside a
        character."""
        return len(self._ids) - self._end

    def add(self, token: int) -> str:
        """Append a token; returns the text that is certain now."""
        self._ids.append(token)
        return self._new_text(whole=False)

    def finish(self) -> str:
        """Return the rest, when there are no more tokens."""
        return self._new_text(whole=True)

    def _new_text(self, *, whole: bool) -> str:
        self.newest = "" if self.stopped else self._decode_newest(whole=whole)
        if self.stopped or not (self.newest or whole):
            return ""
        text = self._held + self.newest
        matches = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            certain, self.stopped = min(matches)
            certain += len(self.stopped) if self._include_stop else 0
        else:
            certain = len(text) if whole else self._certain(text)
        self._held = text[certain:]
        return text[:certain]

    @property
    def _stops(self) -> Sequence[str]:
        return self._all_stops if len(self._ids) > self._least else ()

    def _decode_newest(self, *, whole: bool) -> str:
        """Return what the tokens after those of the last call add; "" while they end inside a
        character."""
        before = self._decode(self._begin, self._end)
        text = self._decode(self._begin, None)
        count = len(self._ids)
        if not text.endswith(BROKEN) or whole:
            self._begin = self._end
            self._end = count
            return text[len(before) :]
        for end in range(count - 4, count) if count - self._end > MOST_PENDING else ():
            first = self._decode(self._begin, end)
            rest = self._decode(end, None)
            if first + rest == text:  # no character begins before this token and ends after it
                self._begin = self._end = end
                return first[len(before) :]
        return ""

    def _decode(self, begin: int, end: int | None) -> str:
        ids = self._ids[begin:end]
        return str(self._tokenizer.decode(ids, **self._options)) if ids else ""

    def _certain(self, text: str) -> int:
        """Return how many characters of ``text`` are before what may be the beginning of a stop
        string."""
        longest = max(map(len, self._stops), default=1) - 1
        begins = range(max(0, len(text) - longest), len(text))
        return next(
            (at for at in begins if any(stop.startswith(text[at:]) for stop in self._stops)),
            len(text),
        )
