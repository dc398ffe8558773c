"""Turns and places at an engine, which its clients share.

turns     owners that wait, in a ring ─▶ the next one ─▶ its models that wait, in a ring ─▶ the next one
places    of the models that are loaded ─▶ the one used the longest time ago leaves
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol


class Turns:
    """Who waits gets a turn after at most one of each other owner.

    ``slots``: turns that are taken at the same time."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        # waiting by owner and model, those of the next turn first
        self._waiting: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def turn(self, owner: str, model: str) -> AsyncIterator[None]:
        """Wait for a turn of ``owner`` for its ``model``, and hold it."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, {}).setdefault(model, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            models = self._waiting.pop(owner)
            model = next(iter(models))
            turns = models.pop(model)
            turn = turns.popleft()
            if turns:
                models[model] = turns
            if models:
                self._waiting[owner] = models
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1


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
