"""Launchers: start workers. The supervisor sees a started worker as a :class:`Life`.

inline    a task in this process: debugging, exact tests
process   a process of its own, forked or started, which the kernel ends when its supervisor dies (Linux)
remote    a process that a host starts (:mod:`orchestration.launch.hosts`): any that has room,
          or the one of the worker's place
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, cast

import structlog

from orchestration.launch.pulse import BEAT_SECONDS, LOST_SECONDS, Pulse, beat
from orchestration.processes.environment import without_secrets
from orchestration.processes.forkserver import ForkServer, Launch
from orchestration.processes.starter import Starter
from orchestration.recipe.devices import Devices, assign, on_this_node
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import kind_of, remote_workers
from orchestration.state.documents import (
    BEAT,
    END,
    ENDING,
    HEAD,
    HOSTS,
    IS_LOST,
    ORDERS,
    OVER,
    PROCESS,
    TAKEN_BY,
    WAREHOUSE,
    EndKind,
    Order,
)
from pipeline.data.events import WorkerEvent
from pipeline.first_of import first_of
from pipeline.index.client import INDEX_VARIABLE, Index

log = structlog.get_logger()

Worker = tuple[str, int]  # kind and number


class Life(Protocol):
    """One life of a worker, from launch to exit."""

    @property
    def pid(self) -> int: ...

    @property
    def orphaned(self) -> object:
        """Equal for workers that died together, with their fork server or their host; None when it
        died alone. Its text says with what. Known once it has ended."""

    async def wait(self) -> int | None:
        """Return the exit code, :class:`EndKind` or another one; None where it is not known."""

    def end(self) -> None:
        """End it now. Does nothing when it has ended."""


class Launcher(Protocol):
    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life: ...

    def rescale(self, recipe: Recipe) -> None:
        """Launch the workers of ``recipe`` from now on."""

    def close(self) -> None:
        """Launch nothing more, and end the workers that are still alive."""


class InlineLife:
    def __init__(self, work: asyncio.Task[None]) -> None:
        self.pid = os.getpid()
        self.orphaned = None
        self._work = work

    async def wait(self) -> int:
        await asyncio.wait([self._work])
        from orchestration.workers.worker import exit_code

        if self._work.cancelled():
            return EndKind.FAILED
        return exit_code(self._work.exception())

    def end(self) -> None:
        self._work.cancel()


class InlineLauncher:
    def rescale(self, recipe: Recipe) -> None:
        """Do nothing: it launches any worker."""

    def close(self) -> None:
        """Do nothing: its workers end by themselves, or are killed one by one."""

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        from orchestration.workers.worker import Worker  # imports torch

        return InlineLife(
            asyncio.create_task(Worker(run, url, kind, number, name).run(), name=name)
        )


class ProcessLauncher:
    """A launcher of worker processes.

    Each worker writes its log, JSON Lines, to ``logs/KIND-NUMBER.log``, and sees its own of
    ``devices``, and ``environment``. See :class:`Starter` for the rest.
    """

    def __init__(
        self,
        logs: Path,
        method: str,
        server: ForkServer | None = None,
        devices: Mapping[Worker, Devices] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._logs = logs
        self._starter = Starter(method, server)
        self._devices = devices or {}
        self._environment = environment or {}

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        self._logs.mkdir(parents=True, exist_ok=True)
        devices = self._devices.get((kind, number))
        options = {"run": run, "kind": kind, "number": str(number), "name": name}
        launch = Launch(
            "orchestration.workers.worker:main",
            [part for option, value in options.items() for part in (f"--{option}", value)],
            {
                **without_secrets(os.environ),
                **self._environment,
                INDEX_VARIABLE: url,
                **(devices.environment() if devices else {}),
            },
            os.getcwd(),
            str(self._logs / f"{kind}-{number}.log"),
            f"asyncdock worker {kind}-{number} of {run}",
            imports=[kind_of(kind).module],
        )
        return await self._starter.start(launch)

    def rescale(self, recipe: Recipe) -> None:
        self._devices = assign(recipe, on_this_node())

    def close(self) -> None:
        self._starter.close()


class Unplaceable(RuntimeError):
    """Workers can have no place on the cluster; the message says why and what to do."""


class Hosts(Protocol):
    """The interface to hosts of a cluster: starts them, and places workers on them.

    It is made of the run's recipe and folder. A host is a process on a node that executes
    ``orchestration.launch.hosts:main`` with the run, a folder of the node and the host's name as
    arguments, and the index's URL in its environment.
    """

    def __init__(self, recipe: Recipe, out: Path) -> None: ...

    async def connect(self) -> str:
        """Return the address by which nodes of the cluster reach this machine."""

    def begin(self, index: Index, join: str) -> None:
        """Take workers from now on. ``join``: the index's URL for the nodes."""

    async def close(self) -> None:
        """End all hosts."""

    async def host_of(self, worker: Worker) -> str:
        """Wait until a host has a place for ``worker``, and return its name. Raises Unplaceable."""

    def lost(self, host: str) -> str:
        """Return why ``host`` has ended; "" while it has not."""

    def rescale(self, recipe: Recipe) -> None:
        """Place the workers of ``recipe`` from now on."""


class RemoteLauncher:
    """A launcher that starts the workers ``remote`` on hosts, and the others by ``local``, which
    its owner closes.

    ``hosts`` places them; None: hosts that have room take them.
    """

    def __init__(
        self, index: Index, local: Launcher, remote: Collection[Worker], hosts: Hosts | None = None
    ) -> None:
        self.index = index
        self.hosts = hosts
        self._local = local
        self.remote = set(remote)
        self._orders = 0
        self._ordering = asyncio.Lock()
        self._lost: dict[str, str] = {}  # host → why
        self.taken: set[str] = set()  # hosts that have taken orders
        self._beating = asyncio.create_task(beat(index, HEAD)) if remote else None

    async def begin(self) -> None:
        """End the workers that a former head of the run, which was killed, has ordered; hosts have
        room again then."""
        if not self.remote:
            return
        self._orders = await ORDERS.end(self.index)
        for kind, number in self.remote:
            if former := await PROCESS.get(self.index, worker=f"{kind}-{number}"):
                await TAKEN_BY.put_once(self.index, HEAD, name=former)
                await END.put(self.index, True, name=former)

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        if (kind, number) not in self.remote:
            return await self._local.launch(run, url, kind, number, name)
        return RemoteLife(self, (kind, number), name)

    async def order(self, worker: Worker, name: str) -> str:
        """Order the start of ``worker`` under ``name``.

        Returns the host that it was placed on, "" for any.
        """
        host = await self.hosts.host_of(worker) if self.hosts else ""
        order = Order(*worker, name, host)
        async with self._ordering:  # entries of a log are written in their order
            await ORDERS.append(self.index, self._orders, order)
            self._orders += 1
        return host

    def rescale(self, recipe: Recipe) -> None:
        self.remote |= remote_workers(recipe)
        if self.hosts is not None:
            self.hosts.rescale(recipe)
        self._local.rescale(recipe)

    def lost(self, host: str) -> str:
        """Return why ``host`` has ended without ending its workers; "" where that is not known."""
        return self._lost.get(host, "") or (self.hosts.lost(host) if self.hosts else "")

    async def lose(self, host: str, reason: str) -> None:
        """Note that ``host`` has ended without ending its workers.

        Its samples are made again; one event reports it.
        """
        if host in self._lost:
            return
        self._lost[host] = reason
        await IS_LOST.put(self.index, True, host=host)
        log.warning("host lost", host=host, reason=reason)
        warehouse = await WAREHOUSE.get(self.index, host=host)
        for record in await self.index.warehouses():
            if record.name == warehouse:
                await self.index.suspect_warehouse(record.number, 0.0)
        await self.index.emit(WorkerEvent(stage="host", worker=host, change="died", reason=reason))

    async def until_hosts_ended(self, seconds: float) -> None:
        """Wait, for at most so many ``seconds``, until the hosts have seen that the run has ended:
        their index ends next."""
        after = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for host in self.taken - self._lost.keys():
                    while await BEAT.get(self.index, host=host) != OVER:
                        after = await self.index.woken(HOSTS, after, BEAT_SECONDS) or after

    def close(self) -> None:
        """Give no more signs of life: hosts end.

        Its workers end by themselves before, or are ended one by one.
        """
        if self._beating is not None:
            self._beating.cancel()


class RemoteLife:
    """The life of a worker on a host."""

    def __init__(self, launcher: RemoteLauncher, worker: Worker, name: str) -> None:
        self.pid = 0
        self.orphaned = cast("str | None", None)
        self._launcher = launcher
        self._index = launcher.index
        self._worker = worker
        self._name = name
        self._end = asyncio.Event()
        self._following = asyncio.create_task(self._follow(), name=f"life of {name}")

    async def wait(self) -> int | None:
        return await asyncio.shield(self._following)

    def end(self) -> None:
        self._end.set()

    async def _follow(self) -> int:
        placed, _ = await first_of(self._launcher.order(self._worker, self._name), self._end.wait())
        after = ""
        pulse = None
        ordered = False
        while True:
            ending = await ENDING.get(self._index, name=self._name)
            if ending is not None and ending.code is not None:
                return ending.code
            if self._end.is_set() and not ordered:
                ordered = True
                await END.put(self._index, True, name=self._name)
                taken = await TAKEN_BY.put_once(self._index, HEAD, name=self._name)
            else:
                taken = await TAKEN_BY.get(self._index, name=self._name) or ""
            if taken == HEAD:  # no host has taken the order, and none will
                return -signal.SIGKILL
            pulse = pulse or Pulse(self._index) if taken else None
            self._launcher.taken |= {taken} - {""}
            host = taken or placed or ""
            reason = self._launcher.lost(host)
            if not reason and pulse is not None and await pulse.silent(taken) > LOST_SECONDS:
                reason = f"no sign of life for {LOST_SECONDS:.0f} s"
            if reason:
                self.orphaned = f"its host {host} was lost: {reason}"
                await END.put(self._index, True, name=self._name)
                await self._launcher.lose(host, reason)
                return -signal.SIGKILL
            woken = await first_of(
                self._index.woken(HOSTS, after, BEAT_SECONDS),
                *(() if ordered else (self._end.wait(),)),
            )
            after = woken[0] or after
