"""Sharing of an engine's rows between the clients of a policy: first between tokens, then between
requests.

    request ──▶ claim (owner, rows) ──▶ waits ── a row is free, and its owner has the fewest ──▶ the engine ──▶ ended
                                                    └ then: the request of that owner with the fewest

An engine starts rows in the order in which they are submitted, so rows past its room wait here. A
row that decodes is never taken away. So that long responses of one client do not keep another one
waiting until they end, ``spare`` rows beyond ``most`` are for requests that have none: half of them
for requests of owners that have some, all for those of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from pipeline.first_of import cancel_all
from stages.engines.protocols import Completion, GroupRequest, Token

SPARE_SHARE = 4  # one row of so many is spare, beyond them


def spare_of(most: int) -> int:
    """Return the number of rows beyond ``most`` that an engine has for requests without any."""
    return max(2, most // SPARE_SHARE)


@dataclass(eq=False)
class Claim:
    """The rows of one request: ``waiting`` for the engine, ``granted`` and not taken yet,
    ``running``: both these and those in the engine."""

    rows: Rows
    owner: str
    waiting: int
    running: int = 0
    granted: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self) -> int:
        """Wait until some rows may start; return how many."""
        while not self.granted:
            self.changed.clear()
            await self.changed.wait()
        granted = self.granted
        self.granted = 0
        return granted

    def end(self, rows: int = 1) -> None:
        """Note that so many rows have left the engine."""
        self.rows.leave(self, rows)


class Rows:
    """The rows of an engine: ``most``, and ``spare`` ones.

    Invariant: no owner's request waits while its owner has fewer rows than another one that is
    granted some.
    """

    def __init__(self, most: int, spare: int = 0) -> None:
        self.most = most
        self.spare = spare
        self.running = 0
        self._of: dict[str, int] = {}  # rows of each owner
        # that wait, by owner, in the order in which they came
        self._claims: dict[str, list[Claim]] = {}

    @contextlib.contextmanager
    def claim(self, owner: str, rows: int) -> Iterator[Claim]:
        """Claim ``rows`` for one request of ``owner``."""
        claim = Claim(self, owner, rows)
        self._claims.setdefault(owner, []).append(claim)
        self._grant()
        try:
            yield claim
        finally:
            self._stop_waiting(claim)
            self.leave(claim, claim.running)

    def leave(self, claim: Claim, rows: int) -> None:
        claim.running -= rows
        self.running -= rows
        self._of[claim.owner] = self._of.get(claim.owner, 0) - rows
        if not self._of[claim.owner]:
            del self._of[claim.owner]
        self._grant()

    def _grant(self) -> None:
        while (claim := self._next()) is not None:
            claim.waiting -= 1
            claim.running += 1
            claim.granted += 1
            self.running += 1
            self._of[claim.owner] = self._of.get(claim.owner, 0) + 1
            claim.changed.set()
            if not claim.waiting:
                self._stop_waiting(claim)
            else:  # behind the others of its owner with as many rows
                claims = self._claims[claim.owner]
                claims.remove(claim)
                claims.append(claim)
                self._claims[claim.owner] = self._claims.pop(claim.owner)

    def _next(self) -> Claim | None:
        """Return the claim that gets the next row; None where there is no room for any."""
        if self.running >= self.most + self.spare:
            return None
        for owner in sorted(self._claims, key=lambda owner: self._of.get(owner, 0)):
            claim = min(self._claims[owner], key=lambda claim: claim.running)
            if self.running < self.most + self._spare_for(claim):
                return claim
        return None

    def _spare_for(self, claim: Claim) -> int:
        if claim.running:
            return 0
        return self.spare // 2 if self._of.get(claim.owner) else self.spare

    def _stop_waiting(self, claim: Claim) -> None:
        claims = self._claims.get(claim.owner, [])
        if claim in claims:
            claims.remove(claim)
            if not claims:
                del self._claims[claim.owner]


Item = Token | Completion


async def shared(
    start: Callable[[Sequence[GroupRequest]], AsyncGenerator[Item, None]],
    claim: Claim,
    groups: Sequence[GroupRequest],
) -> AsyncGenerator[Item, None]:
    """Yield what ``start`` yields of ``groups``, whose rows start as ``claim`` is granted them.

    Raises what it raises.
    """
    places = [(group, place) for group in groups for place in group.places]
    granted = await claim.take()
    if granted == len(places):
        async with aclosing(start(groups)) as items:
            async for item in items:
                claim.end(isinstance(item, Completion))
                yield item
        return
    queue = asyncio.Queue[Item | Exception]()
    tasks = list[asyncio.Task[None]]()

    async def forward(part: Sequence[GroupRequest]) -> None:
        try:
            async with aclosing(start(part)) as items:
                async for item in items:
                    queue.put_nowait(item)
        except Exception as error:
            queue.put_nowait(error)

    async def feed(granted: int) -> None:
        begun = 0
        while begun < len(places):
            granted = granted or await claim.take()
            tasks.append(asyncio.create_task(forward(_part(places[begun : begun + granted]))))
            begun = begun + granted
            granted = 0

    tasks.append(asyncio.create_task(feed(granted)))
    remaining_rows = len(places)
    try:
        while remaining_rows:
            outcome = await queue.get()
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, Completion):
                remaining_rows -= 1
                claim.end()
            yield outcome
    finally:
        await cancel_all(*tasks)


def _part(places: Sequence[tuple[GroupRequest, int]]) -> list[GroupRequest]:
    """Return the requests for some ``places`` of their groups."""
    members = itertools.groupby(places, key=lambda one: one[0].group)
    parts = ([*part] for _, part in members)
    return [replace(part[0][0], places=tuple(place for _, place in part)) for part in parts]
