"""The index that a run is executed in: its own server, or one that somebody else keeps.

OwnIndex     pipeline.index = "embedded": started with the run, again whenever it dies, ended with it
GivenIndex   any other one: a user's, or that of a service
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import structlog

from orchestration.launch.launchers import Hosts
from orchestration.processes.handles import Process
from orchestration.recipe.schema import Recipe
from orchestration.state.documents import Ending
from orchestration.state.lock import RunError
from orchestration.state.paths import INDEX
from orchestration.supervise.budget import RestartBudget
from pipeline.first_of import cancel_all
from pipeline.index.address import Address
from pipeline.index.embedded import EmbeddedIndex, end_unknown, served_by_tls
from pipeline.node import AUTO, own_address, owned_prefix

log = structlog.get_logger()

Emit = Callable[[str], Coroutine[Any, Any, None]]


class RunIndex(Protocol):
    """The index of a run.

    ``url``: by which this machine reaches the index; ``join_url``: by which other machines do.
    Known while it is served.
    """

    is_own: bool
    url: str
    join_url: str

    def serving(self, hosts: Hosts | None) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep it up."""

    def watching(self, emit: Emit) -> list[Coroutine[Any, Any, None]]:
        """Return what is to run beside the run while it is served. ``emit`` reports why it was
        started again."""


class GivenIndex:
    """The index at ``url``."""

    is_own = False

    def __init__(self, url: str) -> None:
        self.url = url
        self.join_url = url

    @contextlib.asynccontextmanager
    async def serving(self, hosts: Hosts | None) -> AsyncIterator[None]:
        yield

    def watching(self, emit: Emit) -> list[Coroutine[Any, Any, None]]:
        return []


class OwnIndex:
    """An embedded server of the run of ``recipe``, with its files in ``folder``."""

    is_own = True

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.server: EmbeddedIndex | None = None  # while it is served
        self.url = ""
        self.join_url = ""
        self._recipe = recipe
        self._folder = folder

    @contextlib.asynccontextmanager
    async def serving(self, hosts: Hosts | None) -> AsyncIterator[None]:
        """Start it, with nothing of an earlier one; end it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        sockets = Path(tempfile.mkdtemp(prefix=owned_prefix(os.getpid())))
        try:
            tls = self._recipe.pipeline.tls_contexts()
            address = await self._address(hosts, is_tls=tls is not None)
            server = EmbeddedIndex(self._folder, socket=sockets / "index.sock", address=address)
            self.server = server
            await _start(server)
            self.url = server.url
            self.join_url = server.address.url if server.address else server.url
            forwarding = served_by_tls(server, tls[0]) if tls and address else None
            async with forwarding or contextlib.nullcontext():
                yield
        finally:
            if self.server is not None:
                self.server.stop()
            shutil.rmtree(sockets, ignore_errors=True)

    async def _address(self, hosts: Hosts | None, *, is_tls: bool) -> Address | None:
        """Return the address at which it listens for other machines; None: it has a socket of this
        machine alone."""
        text = self._recipe.index_address
        if not text:
            return None
        if text == AUTO:
            text = await reached_at(self._recipe, hosts)
        authority = self._recipe.pipeline.tls_authority if is_tls else ""
        return await asyncio.to_thread(Address.parse, text, authority)

    def watching(self, emit: Emit) -> list[Coroutine[Any, Any, None]]:
        assert self.server is not None, "it is served"
        ending = [end_unknown(self.server)] if self.server.address is not None else []
        return [self._keep(self.server, emit), *ending]

    async def _keep(self, server: EmbeddedIndex, emit: Emit) -> None:
        """Start it again whenever it dies; its append-only file holds all that was acknowledged.

        Raises RunError when it dies more often than a worker may.
        """
        events = set[asyncio.Task[None]]()
        launch = self._recipe.launch
        budget = RestartBudget(launch.max_restarts, launch.restart_window)
        try:
            while True:
                assert server.process is not None
                code = await Process.of(server.process.pid, server.process).wait()
                reason = f"the embedded index {Ending(code)}"
                if budget.take(time.monotonic()):
                    raise RunError(
                        f"{reason} and launch.max_restarts = {budget.most} is used up; "
                        f"see {server.log}"
                    )
                log.warning("the index died; starting it again", reason=reason)
                await _start(server)
                # the index may die again before that
                events.add(asyncio.create_task(emit(reason)))
        finally:
            await cancel_all(*events)


def index_of(recipe: Recipe, folder: Path) -> RunIndex:
    """Return the index that ``recipe`` names for its run in ``folder``."""
    if recipe.pipeline.index == "embedded":
        return OwnIndex(recipe, folder / INDEX)
    return GivenIndex(recipe.pipeline.index)


async def reached_at(recipe: Recipe, hosts: Hosts | None) -> str:
    """Return the address by which other machines reach this one: that of the index, if it is given;
    else that by which the nodes of the Ray cluster reach it; else that of its network."""
    address = await (hosts.connect() if hosts is not None else asyncio.to_thread(own_address))
    if (text := recipe.index_address) not in ("", AUTO):
        host = Address.split(text)[0]
        address = str((await asyncio.to_thread(socket.getaddrinfo, host, 0))[0][4][0])
    return address


async def _start(server: EmbeddedIndex) -> None:
    for pause in server.starting():
        await asyncio.sleep(pause)
