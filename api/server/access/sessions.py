"""Ends a request when its token is revoked or expires.

revoked ──▶ the index wakes `watch` ──▶ the tokens in use are looked up ──▶ their requests end: 401, or a stream is cut off
expires ──▶ the deadline of its requests
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from api.server.access.tokens import Scope, Token, Tokens
from api.server.http.problems import HTTPProblem
from pipeline.index.client import IndexUnreachable

log = structlog.get_logger()

RECHECK_SECONDS = 10.0  # between look-ups of the tokens in use when no change is reported


class Sessions:
    """The requests in progress, each with its token."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._open: dict[asyncio.Timeout, tuple[Token, Scope]] = {}

    @asynccontextmanager
    async def session(self, token: Token, scope: Scope) -> AsyncIterator[None]:
        """Guard work that is done under ``token`` and ``scope``.

        Raises an HTTPProblem (401) when the token loses the scope.
        """
        seconds_left = None if token.expires is None else token.expires - time.time()
        try:
            async with asyncio.timeout(seconds_left) as ending:
                self._open[ending] = token, scope
                try:
                    yield
                finally:
                    del self._open[ending]
        except TimeoutError:
            if not ending.expired():
                raise
            detail = "The token was revoked, or has expired."
            raise HTTPProblem(401, detail, kind="token", fix="ask for another token") from None

    async def watch(self) -> None:
        """End the requests of revoked tokens, until cancelled."""
        marker = ""
        while True:
            try:
                marker = await self._tokens.changed(marker, RECHECK_SECONDS)
                await self._end_refused()
            except (
                IndexUnreachable
            ) as lost:  # tokens cannot be revoked either as long as it does not answer
                log.warning("whether tokens were revoked is not known now", reason=str(lost))
                await asyncio.sleep(1.0)

    async def _end_refused(self) -> None:
        tokens: dict[str, Token | None] = {}
        # more may begin meanwhile
        while ids := {token.id for token, _ in self._open.values()} - tokens.keys():
            tokens |= dict.fromkeys(ids) | dict(await self._tokens.of(ids))
        for ending, (token, scope) in list(self._open.items()):
            current = tokens.get(token.id, token)
            if (current is None or not current.may(scope)) and not ending.expired():
                ending.reschedule(asyncio.get_running_loop().time())
