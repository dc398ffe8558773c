"""State that request handlers share: the settings, the registry of runs, the indexes of runs, and
authorization.

The service owns connections and nothing else: closing it does not change any run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from api.policy.process import PolicyProcess
from api.server.access.addresses import client_of
from api.server.access.authorization import LOCAL, allowed
from api.server.access.logins import PREFIX, Logins
from api.server.access.sessions import Sessions
from api.server.access.settings import Settings
from api.server.access.tokens import Scope, Token, Tokens
from api.server.http.problems import HTTPProblem
from api.server.service.external_sessions import ExternalSessions
from api.server.service.recipe_checks import Checks
from api.server.service.run_status import RunStatuses
from orchestration.history.events_file import METRICS
from orchestration.state.recording import give_up
from orchestration.state.registry import Registry, RunRecord
from pipeline.index.client import Index, IndexUnreachable

log = structlog.get_logger()

INDEX_SECONDS = 10.0  # for which a request waits for an index that restarts
MOST_HELD = 2000  # requests that wait or stream, unless connections are limited to fewer
OTHERS_SHARE = 8  # of them, one of so many is left to other tokens and addresses than one
# the token of a request for an operation with a scope
PRINCIPAL = web.RequestKey("principal", Token)
MOST_OWNERS = 10_000  # of runs that are remembered
GIVEN_UP_SECONDS = 60.0  # after a run's end; those who follow it have read its last events by then
GIVEN_UP_AT_ONCE = 100  # runs
SEARCHES = 2  # in samples at once: each computes, in a thread, for as long as a second


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
        self.searches = asyncio.Semaphore(SEARCHES)
        self.run_statuses = RunStatuses()
        self.external_sessions = ExternalSessions(settings.data, registry)
        folders = {name: str(folder) for name, folder in settings.checkpoints.items()}
        options = {"index": registry.link.url, "checkpoints": folders, "most": settings.policies}
        self.policies = PolicyProcess(settings.data / "policies.log", options)
        self.most_held = MOST_HELD
        self._held = Counter[str]()

    def index(self, run: str) -> Index:
        """Return the index of ``run``. It has no connections of its own, and need not be closed."""
        return self.registry.index(run)

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
