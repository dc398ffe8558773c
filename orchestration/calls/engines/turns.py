"""Turns and places at an engine, which its clients share.

turns     owners that wait, in a ring ─▶ the next one ─▶ its models that wait, in a ring ─▶ the next one
places    of the models that are loaded ─▶ the one used the longest time ago leaves
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

MOST_REMEMBERED = 10_000  # owners and models whose last turns are known


class Turns:
    """Who waits gets a turn after at most one of each other owner.

    ``slots``: turns that are held at the same time."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting = dict[str, dict[str, deque[asyncio.Future[None]]]]()  # by owner and model
        # numbers of the last turns, by owner, and by owner and model
        self._numbers = itertools.count(1)
        self._last = Counter[tuple[str, ...]]()

    @asynccontextmanager
    async def turn(self, owner: str, model: str) -> AsyncIterator[None]:
        """Wait for a turn of ``owner`` for its ``model``, and hold it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {}).setdefault(model, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._release()
            raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self._free += 1
        self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            owner = min(self._waiting, key=lambda each: self._last[(each,)])
            models = self._waiting[owner]
            model = min(models, key=lambda each: self._last[owner, each])
            turn = models[model].popleft()
            if not models[model]:
                del models[model]
            if not models:
                del self._waiting[owner]
            if not turn.cancelled():
                self._free -= 1
                self._last[(owner,)] = self._last[owner, model] = next(self._numbers)
                turn.set_result(None)
        if not self._waiting and len(self._last) > MOST_REMEMBERED:
            self._last.clear()


class Resident(Protocol):
    async def leave(self) -> None:
        """Release the place, at the end of what is going on."""


class Places:
    """At most ``most`` places, of ``most_bytes`` together."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = dict[Resident, int]()  # the one used the longest time ago is first
        self._taking = set[Resident]()  # they wait for others: nobody waits for them

    async def take(self, resident: Resident, nbytes: int) -> None:
        """Give ``resident`` a place of ``nbytes``, or another size to the one that it has. It is
        then the last one that has to leave."""
        self._taking.add(resident)
        try:
            while (leaving := self._in_the_way(resident, nbytes)) is not None:
                await leaving.leave()
                self.release(leaving)
        finally:
            self._taking.discard(resident)
        self._bytes.pop(resident, None)
        self._bytes[resident] = nbytes

    def release(self, resident: Resident) -> None:
        self._bytes.pop(resident, None)

    def _in_the_way(self, resident: Resident, nbytes: int) -> Resident | None:
        others = {each: size for each, size in self._bytes.items() if each is not resident}
        if len(others) < self._most and sum(others.values()) + nbytes <= self._most_bytes:
            return None
        return next((each for each in others if each not in self._taking), None)
