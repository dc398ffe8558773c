"""State that request handlers share: the settings, the registry of runs, the indexes of runs, and
authorization.

The service owns connections and nothing else: closing it does not change any run.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, model_validator

from api.policy.process import PolicyProcess
from api.server.access.addresses import client_of
from api.server.access.logins import PREFIX, Logins
from api.server.access.sessions import Sessions
from api.server.access.tokens import OWN, Scope, Token, Tokens
from api.server.http.problems import HTTPProblem
from api.server.service.external_sessions import ExternalSessions
from api.server.service.recipe_checks import Checks
from api.server.service.run_status import RunStatuses
from orchestration.history.events_file import METRICS
from orchestration.state.recording import give_up
from orchestration.state.registry import Registry, RunRecord
from pipeline.index.client import Index, IndexUnreachable

log = structlog.get_logger()

LOOPBACK = ("127.0.0.1", "::1", "localhost")
INDEX_SECONDS = 10.0  # for which a request waits for an index that restarts
MOST_HELD = 2000  # requests that wait or stream, unless connections are limited to fewer
OTHERS_SHARE = 8  # of them, one of so many is left to other tokens and addresses than one
# the token of a request for an operation with a scope
PRINCIPAL = web.RequestKey("principal", Token)
NO_TOKEN = "none"  # is as if no token came: clients of OpenAI's API cannot be made without one
MOST_OWNERS = 10_000  # of runs that are remembered
GIVEN_UP_SECONDS = 60.0  # after a run's end; those who follow it have read its last events by then
GIVEN_UP_AT_ONCE = 100  # runs
LOCAL = Token("local", OWN, "admin", 0.0, None)  # the token of every request where none is required


class Settings(BaseModel):
    """Settings of ``asyncdock serve``. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: Path
    """The folder of the service: its lock, its own index, the token of its user, the folders of
    runs."""
    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    index: str = ""
    """URL of an index; "" for a server of its own under ``data``."""
    runs: int = Field(default=1, ge=0)
    """Runs that execute at once; 0: other agents execute them."""
    roots: tuple[Path, ...] = ()
    """Folders below which every path in a recipe must lie."""
    recipes: tuple[Path, ...] = ()
    """Folders of stored recipes, before the package's."""
    allow_rewards: frozenset[str] = frozenset()
    """``module:name`` of reward functions that a recipe may name beside installed ones. The next
    four likewise."""
    allow_algorithms: frozenset[str] = frozenset()
    allow_stages: frozenset[str] = frozenset()
    allow_engines: frozenset[str] = frozenset()
    allow_datasets: frozenset[str] = frozenset()
    allow_listen: frozenset[str] = frozenset()
    """Addresses where runs may open ports."""
    allow_teachers: frozenset[str] = frozenset()
    """URLs that runs may ask as teachers."""
    allow_checkpoints: frozenset[str] = frozenset()
    """Values that ``checkpoint.url`` may have."""
    allow_clusters: frozenset[str] = frozenset()
    """Values that ``launch.address`` may have."""
    allow_networks: frozenset[str] = frozenset()
    """Reward functions that may have the network in their sandbox."""
    allow_environment: frozenset[str] = frozenset()
    """Variables that reward functions may see."""
    unsandboxed_code: bool = False
    """Whether code of ``allow_rewards`` may run without a sandbox."""
    no_token: bool = False
    """Every request is the owner's; on loopback alone."""
    hosts: tuple[str, ...] = ()
    """Further host names (behind a proxy)."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    body_limit: int = Field(default=2**20, ge=1)
    body_seconds: float = Field(default=20.0, gt=0)
    handler_seconds: float = Field(default=60.0, gt=0)
    header_seconds: float = Field(default=10.0, gt=0)
    """Time until a request's headers are complete."""
    idle_seconds: float = Field(default=75.0, gt=0)
    max_connections: int = Field(default=0, ge=0)
    """0: derived from the limit of open files."""
    max_connections_per_address: int = Field(default=0, ge=0)
    """0: derived from the limit of open files."""
    rate: float = Field(default=1000.0, gt=0)
    """Requests of one client per second."""
    burst: int = Field(default=2000, ge=1)
    """Requests of one client at once."""
    policies: int = Field(default=3, ge=0)
    """Policies that are open at once; 0: none."""
    checkpoints: dict[str, Path] = {}
    """Folders of models that are served, by name."""
    max_waiting: int = Field(default=1000, ge=1)
    """Runs in the queue."""
    max_workers: int = Field(default=64, ge=3)
    """Workers of one recipe."""
    max_arena: int = Field(default=16 * 2**30, gt=0)
    """Bytes of the arena of one recipe."""

    @property
    def loopback(self) -> bool:
        """Whether the server can be reached from this machine only."""
        return self.host in LOOPBACK or re.fullmatch(r"127(\.\d{1,3}){3}", self.host) is not None

    @model_validator(mode="after")
    def _others_need_a_token(self) -> Self:
        if self.no_token and (self.hosts or not self.loopback):
            reached = (
                f"a proxy reaches it as {self.hosts[0]}"
                if self.hosts
                else f"{self.host} is reached from elsewhere"
            )
            raise ValueError(
                f"no_token: {reached}, and whoever reaches a service without tokens runs code as "
                f"its user; leave --no-token out, or listen on 127.0.0.1 without --host-name"
            )
        return self

    @property
    def tokens_needed(self) -> bool:
        return not self.no_token


Find = Callable[[str], Awaitable[Token | None]]


async def allowed(find: Find, headers: Mapping[str, str], scope: Scope, *, needed: bool) -> Token:
    """Return the token of a request, which ``find`` looks up; LOCAL where none came and none is
    ``needed``. Raises an HTTPProblem (401, 403)."""
    kind, _, presented = headers.get("Authorization", "").partition(" ")
    kind = "" if presented == NO_TOKEN else kind
    if not kind and not needed:
        return LOCAL
    token = await find(presented.strip()) if kind.lower() == "bearer" else None
    if token is None:
        reason = "The token is not valid." if kind else "A token is needed."
        fix = (
            "send the header 'Authorization: Bearer TOKEN'. The user who runs the service has it "
            "in the file `authorization` of its folder (curl -H @FILE), and makes one for others "
            "with `asyncdock token create`"
        )
        raise HTTPProblem(
            401,
            reason,
            kind="token",
            fix=fix,
            headers={"WWW-Authenticate": 'Bearer realm="asyncdock"'},
        )
    if not token.may(scope):
        detail = f"This needs a token of scope {scope}; the one given has scope {token.scope}."
        raise HTTPProblem(403, detail, kind="scope", fix=f"ask for a token of scope {scope}")
    return token


class Service:
    """State of one server.

    ``closing`` is set when the server closes: streams then send a last message and end. ``checks``
    that are passed in are closed by the caller.
    """

    def __init__(
        self, settings: Settings, registry: Registry, checks: Checks | None = None
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.tokens = Tokens(registry.link)
        self.sessions, self.logins = Sessions(self.tokens), Logins(self.tokens)
        self._owners = dict[str, str]()
        self.checks = checks or Checks()
        self._owns_checks = checks is None
        self.closing = asyncio.Event()
        self.run_statuses = RunStatuses()
        self.external_sessions = ExternalSessions(settings.data, registry)
        folders = {name: str(folder) for name, folder in settings.checkpoints.items()}
        options = {"index": registry.link.url, "checkpoints": folders, "most": settings.policies}
        self.policies = PolicyProcess(settings.data / "policies.log", options)
        self.most_held = MOST_HELD
        self._held = Counter[str]()

    def index(self, run: str) -> Index:
        """Return the index of ``run``. It has no connections of its own, and need not be closed."""
        return Index(self.registry.link, run)

    @contextlib.contextmanager
    def held(self, request: web.Request) -> Iterator[bool]:
        """Count a request that waits or streams without a deadline.

        Yields False when there are too many, of all clients, of its token, or of its address: the
        other connections are kept for requests that are answered at once.
        """
        of_one = self.most_held - self.most_held // OTHERS_SHARE
        limits = {"": self.most_held, f"token {request[PRINCIPAL].id}": of_one}
        limits[f"address {client_of(request.remote or '')}"] = of_one
        self._held.update(limits.keys())
        try:
            yield all(self._held[key] <= limit for key, limit in limits.items())
        finally:
            self._held.subtract(limits.keys())
            for key in limits:
                if not self._held[key]:
                    del self._held[key]

    def folder(self, record: RunRecord) -> Path:
        """Return the folder of a run's files: recipe.json, checkpoints/, logs/, metrics.jsonl."""
        return Path(record.folder) if record.folder else self.settings.data / "runs" / record.id

    @contextlib.asynccontextmanager
    async def authorised(self, request: web.Request, scope: Scope) -> AsyncIterator[None]:
        """Authorize a request while it is handled.

        Raises an HTTPProblem (401, 403) when its token is not valid or lacks ``scope``, or when it
        becomes so while the request is handled.
        """
        request[PRINCIPAL] = token = await self._token(request, scope)
        if token is LOCAL:
            yield
        else:
            async with self.sessions.session(token, scope):
                yield

    async def _token(self, request: web.Request, scope: Scope) -> Token:
        return await allowed(
            self.find_token, request.headers, scope, needed=self.settings.tokens_needed
        )

    async def find_token(self, presented: str) -> Token | None:
        """Return the token that a request presents, itself or by a session of it; None when it is
        not valid."""
        finds = self.logins.find if presented.startswith(PREFIX) else self.tokens.find
        return await finds(presented)

    async def refuse_others(self, token: Token, run: str) -> None:
        """Raise an HTTPProblem (403) unless ``token`` has the name that owns ``run``, or the scope
        admin. Raises UnknownRun."""
        if token.may("admin"):
            return
        if run not in self._owners:
            if len(self._owners) >= MOST_OWNERS:
                self._owners.clear()
            self._owners[run] = (await self.registry.get(run)).owner
        owner = self._owners[run]
        if owner != token.name:
            ownership = f"belongs to {owner!r}" if owner else "has no owner"
            fix = (
                (f"ask {owner} to do it, or use a token of scope admin")
                if owner
                else "use a token of scope admin"
            )
            detail = f"Run {run!r} {ownership}; the token that came is {token.name!r}'s."
            raise HTTPProblem(403, detail, kind="owner", field="path.run", value=run, fix=fix)

    async def give_up_events(self) -> None:
        """Have the index give up the events of ended runs that this server can read in their files.

        Runs until it is cancelled.
        """
        while True:
            try:
                for record in await self.registry.whole(GIVEN_UP_SECONDS, GIVEN_UP_AT_ONCE):
                    await self.registry.looked_at(record.id, given_up=await self._give_up(record))
            except IndexUnreachable as error:
                log.warning("events of ended runs stay in the index for now", reason=str(error))
            await asyncio.sleep(GIVEN_UP_SECONDS / 4)

    async def _give_up(self, record: RunRecord) -> bool:
        """Return whether the index has given up the events of ``record``.

        A failure with one run does not keep the others waiting.
        """
        try:
            return await give_up(self.index(record.id), self.folder(record) / METRICS)
        except IndexUnreachable:
            raise
        except Exception as error:
            log.warning(
                "events of an ended run stay in the index for now", run=record.id, error=repr(error)
            )
            return False

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
# builds the OpenAPI document, once
DOCUMENT: web.AppKey[Callable[[], dict[str, Any]]] = web.AppKey("document")
