"""What request handlers use: the settings, the registry of runs, the indexes of runs, and authorization.

The service owns connections and nothing else: closing it does not change any run.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from api.policy.process import PolicyProcess
from api.server.access.sessions import Sessions
from api.server.access.tokens import Scope, Token, Tokens
from api.server.external_sessions import ExternalSessions
from api.server.problems import HTTPProblem
from api.server.recipe_checks import Checks
from api.server.run_status import RunStatuses
from orchestration.service.registry import Registry, RunRecord
from pipeline.index.client import Index

LOOPBACK = ("127.0.0.1", "::1", "localhost")
INDEX_SECONDS = 10.0  # for which a request waits for an index that restarts
MOST_HELD = 2000  # requests that wait or stream, unless connections are limited to fewer
PRINCIPAL = web.RequestKey("principal", Token)  # the token of a request for an operation with a scope
NO_TOKEN = "none"  # is as if no token came: clients of OpenAI's API cannot be made without one
LOCAL = Token("local", "local", "admin", 0.0, None)  # the token of every request where none is required


class Settings(BaseModel):
    """Settings of ``asyncdock serve``. Sizes in bytes, times in seconds.

    ``index``: a URL; "" for a server of its own under ``data``. ``runs``: how many execute at once; 0: other agents execute
    them. ``roots``: folders below which every path in a recipe must lie. ``recipes``: folders of stored recipes, before the
    package's. ``allow_*``: ``module:name`` that a recipe may name beside installed ones; ``allow_listen``: addresses where
    its runs may open ports, ``allow_teachers``: URLs that they may ask as teachers, ``allow_checkpoints``,
    ``allow_clusters``: values that ``checkpoint.url`` and ``launch.address`` may have. ``hosts``: further host names (behind
    a proxy); they require tokens.
    ``header_seconds``: until a request's headers are complete. ``max_connections``,
    ``max_connections_per_address``: 0: derived from the limit of open files. ``rate``, ``burst``: requests of one client,
    per second and at once. ``max_waiting``: runs in the queue. ``max_workers``, ``max_arena``: limits of one recipe.
    ``policies``: how many are open at once; 0: none. ``checkpoints``: folders of models that are served, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: Path
    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    index: str = ""
    runs: int = Field(default=1, ge=0)
    roots: tuple[Path, ...] = ()
    recipes: tuple[Path, ...] = ()
    allow_rewards: frozenset[str] = frozenset()
    allow_algorithms: frozenset[str] = frozenset()
    allow_stages: frozenset[str] = frozenset()
    allow_engines: frozenset[str] = frozenset()
    allow_datasets: frozenset[str] = frozenset()
    allow_listen: frozenset[str] = frozenset()
    allow_teachers: frozenset[str] = frozenset()
    allow_checkpoints: frozenset[str] = frozenset()
    allow_clusters: frozenset[str] = frozenset()
    require_token: bool = False
    hosts: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    body_limit: int = Field(default=2**20, ge=1)
    body_seconds: float = Field(default=20.0, gt=0)
    handler_seconds: float = Field(default=60.0, gt=0)
    header_seconds: float = Field(default=10.0, gt=0)
    idle_seconds: float = Field(default=75.0, gt=0)
    max_connections: int = Field(default=0, ge=0)
    max_connections_per_address: int = Field(default=0, ge=0)
    rate: float = Field(default=1000.0, gt=0)
    burst: int = Field(default=2000, ge=1)
    policies: int = Field(default=3, ge=0)
    checkpoints: dict[str, Path] = {}
    max_waiting: int = Field(default=1000, ge=1)
    max_workers: int = Field(default=64, ge=3)
    max_arena: int = Field(default=16 * 2**30, gt=0)

    @property
    def loopback(self) -> bool:
        """Whether the server can be reached from this machine only."""
        return self.host in LOOPBACK or re.fullmatch(r"127(\.\d{1,3}){3}", self.host) is not None

    @property
    def tokens_needed(self) -> bool:
        return self.require_token or not self.loopback or bool(self.hosts)


async def allowed(tokens: Tokens, headers: Mapping[str, str], scope: Scope, *, needed: bool) -> Token:
    """Return the token of a request; LOCAL where none came and none is ``needed``. Raises an HTTPProblem (401, 403)."""
    kind, _, presented = headers.get("Authorization", "").partition(" ")
    kind = "" if presented == NO_TOKEN else kind
    if not kind and not needed:
        return LOCAL
    token = await tokens.find(presented.strip()) if kind.lower() == "bearer" else None
    if token is None:
        wrong = "The token is not valid." if kind else "A token is needed."
        fix = "send the header 'Authorization: Bearer TOKEN'; `asyncdock token create` makes one"
        raise HTTPProblem(401, wrong, kind="token", fix=fix, headers={"WWW-Authenticate": 'Bearer realm="asyncdock"'})
    if not token.may(scope):
        detail = f"This needs a token of scope {scope}; the one given has scope {token.scope}."
        raise HTTPProblem(403, detail, kind="scope", fix=f"ask for a token of scope {scope}")
    return token


class Service:
    """State of one server. ``closing`` is set when the server closes: streams then send a last message and end. ``checks``
    that are passed in are closed by the caller."""

    def __init__(self, settings: Settings, registry: Registry, checks: Checks | None = None) -> None:
        self.settings, self.registry, self.tokens = settings, registry, Tokens(registry.link)
        self.sessions = Sessions(self.tokens)
        self.checks, self._owns_checks = checks or Checks(), checks is None
        self.closing = asyncio.Event()
        self.run_statuses = RunStatuses()
        self.external_sessions = ExternalSessions(settings.data, registry)
        folders = {name: str(folder) for name, folder in settings.checkpoints.items()}
        options = {"index": registry.link.url, "checkpoints": folders, "most": settings.policies}
        self.policies = PolicyProcess(settings.data / "policies.log", options)
        self.most_held, self._held = MOST_HELD, 0

    def index(self, run: str) -> Index:
        """Return the index of ``run``. It has no connections of its own, and need not be closed."""
        return Index(self.registry.link, run)

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Count a request that waits or streams without a deadline. Yields False when there are too many: the other
        connections are kept for requests that are answered at once."""
        self._held += 1
        try:
            yield self._held <= self.most_held
        finally:
            self._held -= 1

    def folder(self, record: RunRecord) -> Path:
        """Return the folder of a run's files: recipe.json, checkpoints/, logs/, metrics.jsonl."""
        return Path(record.folder) if record.folder else self.settings.data / "runs" / record.id

    @contextlib.asynccontextmanager
    async def authorised(self, request: web.Request, scope: Scope) -> AsyncIterator[None]:
        """Surround the handling of a request. Raises an HTTPProblem (401, 403) when its token is not valid or lacks
        ``scope``, or when it becomes so while the request is handled."""
        request[PRINCIPAL] = token = await self._token(request, scope)
        if token is LOCAL:
            yield
        else:
            async with self.sessions.session(token, scope):
                yield

    async def _token(self, request: web.Request, scope: Scope) -> Token:
        return await allowed(self.tokens, request.headers, scope, needed=self.settings.tokens_needed)

    async def forget(self, run: str) -> None:
        """Close what is open for a deleted run."""
        self.run_statuses.forget(run)
        await self.external_sessions.forget(run)

    async def close(self) -> None:
        self.closing.set()
        await self.external_sessions.close()
        await self.policies.close()
        await self.tokens.close()
        if self._owns_checks:
            await asyncio.to_thread(self.checks.close)


SERVICE = web.AppKey("service", Service)
DOCUMENT: web.AppKey[Callable[[], dict[str, Any]]] = web.AppKey("document")  # builds the OpenAPI document, once
