"""Programs outside of the run, which ask for the next trajectory by HTTP.

environment opens ─▶ offer ··· POST /v1/sessions ─▶ base_url, key, row ─▶ chat/completions … ─▶ POST /v1/end ─▶ the reward
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.environments.programs.session import Session


@dataclass(frozen=True, eq=False)
class Offer:
    """A trajectory for which a program is sought. ``ended``: set at its end."""

    row: Mapping[str, Any]
    session: Session
    ended: asyncio.Future[None]


class Offers:
    """The trajectories that wait for a program, and those that have one."""

    def __init__(self) -> None:
        self._waiting: deque[Offer] = deque()
        self._by_key: dict[str, Offer] = {}
        self._changed = asyncio.Condition()

    async def offer(self, row: Mapping[str, Any], session: Session) -> None:
        """Return when a program has taken the trajectory and ended it."""
        offer = Offer(row, session, asyncio.get_running_loop().create_future())
        self._by_key[session.api_key] = offer
        try:
            async with self._changed:
                self._waiting.append(offer)
                self._changed.notify()
            await offer.ended
        finally:
            del self._by_key[session.api_key]
            if offer in self._waiting:
                self._waiting.remove(offer)

    async def take(self, seconds: float) -> Offer | None:
        """Return the trajectory that has waited longest, or None when none came within
        ``seconds``."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: bool(self._waiting))
                return self._waiting.popleft()
        except TimeoutError:
            return None

    def of(self, key: str) -> Offer | None:
        """Return the trajectory of the session with this key."""
        return self._by_key.get(key)


async def sessions(row: Mapping[str, Any], session: Session, offers: Offers) -> None:
    """The program of ``environment.use = "sessions"``: it is outside."""
    await offers.offer(row, session)


sessions.waits = True  # type: ignore[attr-defined]
