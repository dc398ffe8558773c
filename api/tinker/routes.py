"""The application's part for Tinker's clients.

build_app ──▶ add_routes(app, calls) ──▶ the paths below /api/v1/ and /tinker/, as operations of the server
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from aiohttp import web

from api.server.service.operations import build_routes
from api.tinker import models, progress, records, sampling, sessions
from api.tinker.calls import SHARED, Shared

if TYPE_CHECKING:
    from orchestration.calls.service import Service

ROUTES = (sessions, models, sampling, records, progress)


def add_routes(
    app: web.Application, open_calls: Callable[[], AbstractAsyncContextManager[Service]]
) -> None:
    """Serve training calls by ``app``. They are opened when it starts, and closed when it ends."""

    async def calls_of(app: web.Application) -> AsyncIterator[None]:
        async with open_calls() as calls:
            app[SHARED] = Shared(calls)
            yield

    app.cleanup_ctx.append(calls_of)
    build_routes(app, ROUTES)
