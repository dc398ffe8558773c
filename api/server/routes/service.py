"""Routes about the server itself: its health, the OpenAPI document."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field, RootModel

from api.server.access.settings import RunsOf
from api.server.http.problems import HTTPProblem
from api.server.service.operations import operation
from api.server.service.service import DOCUMENT, Service

MODELS = "/tinker/models"  # an operation of api.tinker


class Health(BaseModel):
    """The status is ``ok`` in every answer."""

    status: Literal["ok"]
    version: str


class Document(RootModel[dict[str, Any]]):
    """An OpenAPI 3.1 document."""


class ServerView(BaseModel):
    """What a server has."""

    runs_of: RunsOf = Field(
        description="service: runs are submitted, and executed; folders: runs are shown, and none "
        "can be changed; none: it has no runs."
    )
    models: bool = Field(description="Whether it has models for the training loops of clients.")


@operation("GET", "/v1/server", scope="read", summary="What this server has", tag="service")
async def get_server(service: Service, request: web.Request) -> ServerView:
    paths = {resource.canonical for resource in request.app.router.resources()}
    return ServerView(runs_of=service.settings.runs_of, models=MODELS in paths)


@operation(
    "GET", "/healthz", scope=None, summary="Whether the server is alive", tag="service", seconds=0
)
async def healthz(service: Service) -> Health:
    return Health(status="ok", version=importlib.metadata.version("asyncdock"))


@operation(
    "GET",
    "/readyz",
    scope=None,
    summary="Whether the server can work: its index answers",
    tag="service",
)
async def readyz(service: Service) -> Health:
    if service.closing.is_set():
        raise HTTPProblem(
            503, "The server is going down.", kind="closing", headers={"Retry-After": "5"}
        )
    await service.tokens.ping()
    return await healthz(service)


@operation("GET", "/openapi.json", scope=None, summary="This document", tag="service", seconds=0)
async def openapi_json(service: Service, request: web.Request) -> Document:
    return Document(await asyncio.to_thread(request.app[DOCUMENT]))
