"""Turns and places at an engine, which its clients share.

EngineTime  seconds that each owner has used ─┬▶ lane of training: the next turn ─▶ its models in turn
                                              └▶ lane of sampling: the next rows, and whether it stops
Places      of the models that are loaded ─▶ of the owner with most: the longest unused one leaves

Start-time fair queueing (Goyal, Vin and Cheng, 1996): the owner that has used least goes first,
whatever it asks for. So each of n owners that always want something has an n-th of the engine,
however much it sends. A turn of training is not interrupted: others wait for its end.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

CREDIT_SECONDS = 5.0
GRACE_SECONDS = 0.2
REVIEW_SECONDS = 0.05  # while what is used may change who is stopped
RESERVE = 4  # one in so many slots for sampling is for other owners, where there are some
MOST_REMEMBERED = 10_000  # owners and models whose last turns are known


class EngineTime:
    """What owners have used of an engine, whose two lanes run beside each other.

    Owners are active while they wait for a slot of a lane or hold one. A second is shared by the
    lanes that run, and in a lane by the slots that owners hold.

    Idle time is not saved up: an owner that becomes active has used at most ``CREDIT_SECONDS`` less
    than the others. But its next call may be on its way. For a grace after its last one no turn of
    training is given to an owner that has used more, and that time is charged to it. The grace is
    as long as the last turn of who would be next, at most ``GRACE_SECONDS``: so waiting costs no
    more than it may save.

    Invariant: an owner is stopped only by one that has used less, so that one of the lanes runs
    while anybody is active, but for the grace. ``clock``: seconds.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.training = Lane(self, 1)
        self.sampling = Lane(self, slots)
        self.changed = asyncio.Event()
        """Set at each change of what lanes hold."""
        self.clock = clock
        self._settled = clock()
        self._used = dict[str, float]()
        self._active = Counter[str]()
        self._left = dict[str, float]()  # when owners became inactive, a grace ago at most
        self._kept_for = ""  # the owner in its grace whom the lane of training waits for
        self._kept_until = 0.0
        self._floor = 0.0  # the least used of the active owners, which only grows

    @property
    def seconds_to_review(self) -> float | None:
        """After which what is stopped may change by time alone; None: it does not."""
        if self._kept_for:
            return max(0.0, self._kept_until - self.clock())
        is_contended = len(self._active) > 1 and self.training.owners and self.sampling.owners
        return REVIEW_SECONDS if is_contended else None

    @property
    def shared(self) -> bool:
        """Whether several owners are active, or were a short time ago."""
        return len(self._used) > 1

    def used(self, owner: str) -> float:
        return self._used[owner]

    def enter(self, owner: str) -> None:
        """Count a request of ``owner`` in."""
        self._settle()
        self._left.pop(owner, None)
        if not self._active[owner]:
            earliest = self._floor - CREDIT_SECONDS
            self._used[owner] = max(self._used.get(owner, earliest), earliest)
        self._active[owner] += 1

    def leave(self, owner: str) -> None:
        """Count a request of ``owner`` out, which holds no slot any more."""
        self._settle()
        self._active[owner] -= 1
        if not self._active[owner]:
            del self._active[owner]
            self._left[owner] = self._settled
            if not self._active:
                self._floor = max(self._floor, self._used[owner])
        self.review()

    def review(self) -> None:
        """Charge what was used, and decide what is stopped and who is next."""
        self._settle()
        self._forget()
        trains = min(map(self.used, self.training.owners), default=math.inf)
        samples = min(map(self.used, self.sampling.owners), default=math.inf)
        waits = min(map(self.used, self.training.waiting), default=-math.inf)
        self._keep()
        self.training.is_stopped = bool(self._kept_for) or samples < waits
        self.sampling.is_stopped = not self._kept_for and trains < samples
        self.training.give()
        self.sampling.give()
        self.changed.set()

    def _keep(self) -> None:
        """Decide whether the lane of training waits for an owner in its grace."""
        self._kept_for = ""
        if not self._left or not self.training.waiting or self.training.holding:
            return
        owner = min(self._left, key=self.used)
        following = min(self.training.waiting, key=self.used)
        grace = min(GRACE_SECONDS, self.training.lengths[following])
        self._kept_until = self._left[owner] + grace
        if self.used(owner) < self.used(following) and self._settled < self._kept_until:
            self._kept_for = owner

    def _settle(self) -> None:
        """Charge the time since the last call."""
        now = self.clock()
        holding = [self.training.holding or Counter([self._kept_for] if self._kept_for else [])]
        if not self.sampling.is_stopped:
            holding.append(self.sampling.holding)
        running = [each for each in holding if each]
        for slots in running:
            second = (now - self._settled) / len(running) / slots.total()
            for owner, count in slots.items():
                self._used[owner] += second * count
        self._settled = now
        if self._active:
            self._floor = max(self._floor, min(map(self.used, self._active)))

    def _forget(self) -> None:
        earliest = self._settled - GRACE_SECONDS
        self._left = {each: left for each, left in self._left.items() if left > earliest}
        self._used = {
            each: used
            for each, used in self._used.items()
            if each in self._active or each in self._left or used > self._floor - CREDIT_SECONDS
        }


class Lane:
    """One of the two things that an engine does at a time, with ``slots``: turns that are held at
    once."""

    def __init__(self, engine_time: EngineTime, slots: int) -> None:
        self.holding = Counter[str]()
        """Slots by owner."""
        self.waiting = dict[str, dict[str, deque[_Turn]]]()
        """By owner and model."""
        self.lengths = defaultdict[str, float](float)
        """Seconds of the last turns by owner."""
        self.is_stopped = False
        """Whether it gives no turns."""
        self._time = engine_time
        self._slots = slots
        # numbers of the last turns, by owner, and by owner and model
        self._numbers = itertools.count(1)
        self._last = Counter[tuple[str, ...]]()

    @property
    def owners(self) -> set[str]:
        return self.waiting.keys() | self.holding.keys()

    @asynccontextmanager
    async def turn(self, owner: str, model: str, size: int = 1) -> AsyncIterator[None]:
        """Wait for a turn of ``owner`` for its ``model``, and hold it. ``size``: the slots that it
        takes; more than a part of all count as that part."""
        turn = _Turn(min(size, max(1, self._slots // RESERVE)))
        self._time.enter(owner)
        self.waiting.setdefault(owner, {}).setdefault(model, deque()).append(turn)
        self._time.review()
        try:
            await turn.given
            yield
        finally:
            if turn.began is None:
                self._withdraw(owner, model, turn)
            else:
                self._count(owner, -turn.size)
                self.lengths[owner] = self._time.clock() - turn.began
            self._time.leave(owner)

    def give(self) -> None:
        """Give turns to those who are next, as far as there is room."""
        while not self.is_stopped and (following := self._next()) is not None:
            owner, model = following
            turn = self.waiting[owner][model][0]
            self._withdraw(owner, model, turn)
            self._count(owner, turn.size)
            self._last[(owner,)] = self._last[owner, model] = next(self._numbers)
            turn.began = self._time.clock()
            if not turn.given.cancelled():  # else it is released at once
                turn.given.set_result(None)
        if not self.waiting and len(self._last) > MOST_REMEMBERED:
            self._last.clear()
            self.lengths.clear()

    def _next(self) -> tuple[str, str] | None:
        """Return owner and model of the next turn; None where nobody waits, or it has no room."""
        free = self._slots - self.holding.total()
        most = self._slots - self._slots // RESERVE if self._time.shared else self._slots
        by_use = sorted(self.waiting, key=lambda each: (self._time.used(each), self._last[(each,)]))
        for owner in by_use:
            models = self.waiting[owner]
            model = min(models, key=lambda each: self._last[owner, each])
            size = models[model][0].size
            if self.holding[owner] + size <= most:
                return (owner, model) if size <= free else None
        return None

    def _count(self, owner: str, slots: int) -> None:
        self.holding[owner] += slots
        if not self.holding[owner]:
            del self.holding[owner]

    def _withdraw(self, owner: str, model: str, turn: _Turn) -> None:
        models = self.waiting[owner]
        models[model].remove(turn)
        if not models[model]:
            del models[model]
        if not models:
            del self.waiting[owner]


class _Turn:
    """A turn that is waited for, of ``size`` slots."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.began: float | None = None
        self.given: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Resident(Protocol):
    @property
    def owner(self) -> str: ...

    async def leave(self) -> None:
        """Release the place, at the end of what is going on."""


class Places:
    """At most ``most`` places, of ``most_bytes`` together. Who has the most of them makes room: the
    many models of one owner do not drive out another's."""

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
        places = Counter(each.owner for each in (resident, *others))
        leaving = [each for each in others if each not in self._taking]
        return max(leaving, key=lambda each: places[each.owner], default=None)
