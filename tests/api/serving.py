"""A server of the test's own on loopback, over a real index."""

from __future__ import annotations

import atexit
import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from api.server.access.settings import Settings
from api.server.app import build_app
from api.server.http.problems import MEDIA_TYPE
from api.server.service.operations import build_routes
from api.server.service.recipe_checks import Checks
from orchestration import logs
from orchestration.state.registry import Registry
from tests.api.watchdog import Watchdog, marked

Client = TestClient[web.Request, web.Application]


@functools.cache
def shared_checks() -> Checks:
    """One for all servers of this test process: its first process takes a second to start."""
    checks = Checks()
    atexit.register(checks.close)
    return checks


@asynccontextmanager
async def serving(
    url: str,
    data: Path,
    *,
    modules: tuple[ModuleType, ...] = (),
    extend: Callable[[web.Application], None] | None = None,
    **settings: Any,
) -> AsyncGenerator[Client, None]:
    """A client of a server over the index at ``url``, with the operations of ``modules`` and what
    ``extend`` adds beside its own. It asks for no token unless ``settings`` say so. Afterwards no handler may have held the
    event loop."""
    # as the command has them: what a test shows of an error takes longer
    logs.configure(terminal=False)
    watchdog = Watchdog()
    registry = Registry(url, timeout=3.0)
    settings.setdefault("no_token", not settings.get("hosts"))
    app = build_app(Settings(data=data, **settings), registry, shared_checks())
    app.middlewares.insert(0, marked)
    build_routes(app, modules)
    if extend is not None:
        extend(app)
    with watchdog.watching():
        async with TestClient(TestServer(app), cookie_jar=aiohttp.DummyCookieJar()) as client:
            yield client
    await registry.close()
    assert not watchdog.holds, watchdog.holds


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def problem(response: ClientResponse, status: int) -> dict[str, Any]:
    """The problem that ``response`` is, of this status."""
    assert (response.status, response.content_type) == (status, MEDIA_TYPE), await response.text()
    answer = await response.json(content_type=None)
    assert answer["status"] == status
    return answer
