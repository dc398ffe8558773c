"""Where a program's requests wait for their turns.

endpoint: ask ─▶ Asked in the queue ─▶ environment: next_request ─▶ rollout ─▶ answer ─▶ endpoint: the turn
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from stages.environments.interface import Request, Turn


class SessionEnded(RuntimeError):
    """A request came to a session that has ended. The message says why it has."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A request, and its turn to come."""

    request: Request
    turn: asyncio.Future[Turn]


class Exchange:
    """The requests of one session, which are answered in the order in which they came. ``key``: with
    which it is asked. ``was_asked``: a request has come."""

    def __init__(self) -> None:
        self.key = f"sk-session-{secrets.token_urlsafe(24)}"
        self._queue: asyncio.Queue[Asked] = asyncio.Queue()
        self._present: Asked | None = None
        self._ended = ""
        self.was_asked = False

    async def ask(self, request: Request) -> Turn:
        """Return the policy's turn. Raises SessionEnded."""
        if self._ended:
            raise SessionEnded(self._ended)
        self.was_asked = True
        asked = Asked(request, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(asked)
        return await asked.turn

    async def next_request(self) -> Request:
        """Wait for the next request whose client still waits."""
        while True:
            self._present = await self._queue.get()
            if not self._present.turn.done():
                return self._present.request

    def answer(self, turn: Turn) -> None:
        """Answer the present request. Does nothing where its client has gone."""
        if self._present is not None and not self._present.turn.done():
            self._present.turn.set_result(turn)

    def end(self, reason: str) -> None:
        """Answer all requests, also those to come, by SessionEnded."""
        self._ended = self._ended or reason
        waiting = [self._present] if self._present else []
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        for asked in waiting:
            if not asked.turn.done():
                asked.turn.set_exception(SessionEnded(self._ended))
                asked.turn.exception()  # its client may have gone
