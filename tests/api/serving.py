"""A server of the test's own on loopback, over a real index."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from api.operations import build_routes
from api.server import build_app
from api.service import Settings

Client = TestClient[web.Request, web.Application]


@asynccontextmanager
async def serving(
    url: str, data: Path, *, modules: tuple[ModuleType, ...] = (), registry: Any = None, **settings: Any
) -> AsyncGenerator[Client, None]:
    """A client of a server over the index at ``url``, with the operations of ``modules`` beside its own."""
    app = build_app(Settings(data=data, **settings), url, cast(Any, registry))
    build_routes(app, modules)
    async with TestClient(TestServer(app), cookie_jar=aiohttp.DummyCookieJar()) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
