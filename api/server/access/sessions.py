"""Requests under way, and the tokens that they were let in with.

revoked ──▶ the stream of changes wakes `watch` ──▶ the tokens in use are looked up ──▶ requests of those that are gone end
expires ──▶ the deadline of its requests                            (an answer that has begun breaks off, another one is 401)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from api.server.access.tokens import Scope, Token, Tokens
from api.server.problems import Problem
from pipeline.index.client import IndexUnreachable

log = structlog.get_logger()

RECHECK_SECONDS = 10.0  # the tokens in use are looked up this often without a change, too


class Sessions:
    """Requests under way, each with the token that it was let in with: revoking the token, or its end, ends them."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._open: dict[asyncio.Timeout, tuple[Token, Scope]] = {}

    @asynccontextmanager
    async def session(self, token: Token, scope: Scope) -> AsyncIterator[None]:
        """Surrounds what is done with ``token``, which may do ``scope``. Raises a Problem (401) once it no longer may."""
        left = None if token.expires is None else token.expires - time.time()
        try:
            async with asyncio.timeout(left) as ending:
                self._open[ending] = token, scope
                try:
                    yield
                finally:
                    del self._open[ending]
        except TimeoutError:
            if not ending.expired():
                raise
            detail = "The token was revoked, or has expired."
            raise Problem(401, detail, kind="token", fix="ask for another token") from None

    async def watch(self) -> None:
        """End what revoked tokens do, until cancelled."""
        marker = ""
        while True:
            try:
                marker = await self._tokens.changed(marker, RECHECK_SECONDS)
                await self._end_refused()
            except IndexUnreachable as lost:  # while it does not answer, no token can be revoked either
                log.warning("whether tokens were revoked is not known now", reason=str(lost))
                await asyncio.sleep(1.0)

    async def _end_refused(self) -> None:
        known: dict[str, Token | None] = {}
        while asked := {token.id for token, _ in self._open.values()} - known.keys():  # more may begin meanwhile
            known |= dict.fromkeys(asked) | dict(await self._tokens.of(asked))
        for ending, (token, scope) in list(self._open.items()):
            now = known.get(token.id, token)
            if (now is None or not now.may(scope)) and not ending.expired():
                ending.reschedule(asyncio.get_running_loop().time())
