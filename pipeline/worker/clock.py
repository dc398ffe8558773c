"""Clock of a worker: divides its wall time into four kinds that add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["busy", "waiting_input", "waiting_room", "other"]


@dataclass
class Clock:
    """A clock that attributes every instant to one kind: ``busy`` (rows are being processed),
    ``waiting_room`` (all work in progress waits for bytes), ``waiting_input`` (there is nothing to
    claim), ``other``. ``working`` counts the claims that are being processed, ``blocked`` those of
    them that wait for room."""

    now: Callable[[], float] = time.monotonic
    seconds: dict[Kind, float] = field(
        default_factory=lambda: {
            "busy": 0.0,
            "waiting_input": 0.0,
            "waiting_room": 0.0,
            "other": 0.0,
        }
    )
    working: int = 0
    blocked: int = 0
    waiting: int = 0

    def __post_init__(self) -> None:
        self.began = self._since = self.now()

    def state(self) -> Kind:
        """Return the kind of the present instant."""
        if self.working > self.blocked:
            return "busy"
        if self.blocked:
            return "waiting_room"
        return "waiting_input" if self.waiting else "other"

    @contextmanager
    def during(self, counter: Literal["working", "blocked", "waiting"]) -> Iterator[None]:
        """Count the time inside as ``counter``."""
        self.account()
        setattr(self, counter, getattr(self, counter) + 1)
        try:
            yield
        finally:
            self.account()
            setattr(self, counter, getattr(self, counter) - 1)

    def account(self) -> None:
        """Add the time since the last call to the present kind. Call it before a counter
        changes."""
        now = self.now()
        self.seconds[self.state()] += now - self._since
        self._since = now

    def read(self) -> dict[str, float]:
        """Return the seconds of each kind, and ``wall``, their sum."""
        self.account()
        return {
            **{str(kind): spent for kind, spent in self.seconds.items()},
            "wall": self._since - self.began,
        }
