"""Routes about the server itself: its health, the OpenAPI document, the reference page."""

from __future__ import annotations

import asyncio
import importlib.metadata
from importlib import resources
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, RootModel

from api.server.operations import Strict, operation
from api.server.problems import HTTPProblem
from api.server.service import DOCUMENT, Service

PAGES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


class Health(BaseModel):
    """The status is ``ok`` in every answer."""

    status: Literal["ok"]
    version: str


class Document(RootModel[dict[str, Any]]):
    """An OpenAPI 3.1 document."""


@operation("GET", "/healthz", scope=None, summary="Whether the server is alive", tag="service", seconds=0)
async def healthz(service: Service) -> Health:
    return Health(status="ok", version=importlib.metadata.version("asyncdock"))


@operation("GET", "/readyz", scope=None, summary="Whether the server can work: its index answers", tag="service")
async def readyz(service: Service) -> Health:
    if service.closing.is_set():
        raise HTTPProblem(503, "The server is going down.", kind="closing", headers={"Retry-After": "5"})
    await service.tokens.ping()
    return await healthz(service)


@operation("GET", "/openapi.json", scope=None, summary="This document", tag="service", seconds=0)
async def openapi_json(service: Service, request: web.Request) -> Document:
    return Document(await asyncio.to_thread(request.app[DOCUMENT]))


class PagePath(Strict):
    file: Literal["reference.js", "reference.css"]


@operation("GET", "/docs", scope=None, summary="The reference", tag="service", produces="text/html", hidden=True)
async def docs(service: Service) -> str:
    return _page("index.html")


@operation("GET", "/docs/{file}", scope=None, summary="What it needs", tag="service", produces="text/css", hidden=True)
async def docs_file(service: Service, path: PagePath) -> web.Response:
    return web.Response(text=_page(path.file), content_type=PAGES[path.file.partition(".")[2]], charset="utf-8")


def _page(name: str) -> str:
    return resources.files("api").joinpath("reference", name).read_text(encoding="utf-8")
