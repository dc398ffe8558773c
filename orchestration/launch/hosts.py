"""Hosts: processes on other machines that start workers of a run with the launcher of their own.

    head: launch ──▶ log ORDERS ────▶ the host of its place, or one with room: TAKEN_BY.put_once decides
          wait   ◀── document ENDING ◀── its worker has ended
          end    ──▶ document END ──▶ it ends the worker
          a host whose document BEAT does not change for LOST_SECONDS is lost, and its workers with it

All of it is in the run's index, so a host needs the index's URL and the run's id, and no connection
to the head. Hosts may join at any time: one that is lost leaves its workers to the supervisor,
which orders them again. Readers of documents are woken by the topic HOSTS.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import structlog

from orchestration.launch.launchers import ProcessLauncher
from orchestration.launch.pulse import BEAT_SECONDS, LOST_SECONDS, Pulse, beat
from orchestration.logs import configure
from orchestration.private_files import keep_from_others
from orchestration.processes.environment import take
from orchestration.processes.forkserver import ForkServer
from orchestration.processes.leftovers import sweep_leftovers
from orchestration.processes.starter import SPAWN
from orchestration.recipe.devices import DevicePool, on_this_node
from orchestration.recipe.flow import flow_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import kind_of, remote_workers
from orchestration.state.documents import (
    BEAT,
    DECLARED,
    END,
    ENDING,
    HEAD,
    HEADS_INDEX,
    HOSTS,
    IS_LOST,
    LEAVE,
    ORDERS,
    OVER,
    REWINDS,
    RUN_PATHS,
    RUN_RECIPE,
    TAKEN_BY,
    WAREHOUSE,
    Ending,
    EndKind,
)
from orchestration.state.paths import HOST_VARIABLE, RECIPE, RunPaths
from pipeline.data.arena import shared_memory_directory
from pipeline.data.events import ENDED, WorkerEvent
from pipeline.documents.flow import SECRET, STATE
from pipeline.first_of import first_of
from pipeline.index.client import INDEX_VARIABLE, Index, IndexUnreachable
from pipeline.node import AUTO, node_id, owned_prefix
from pipeline.warehouse.dock import Dock

log = structlog.get_logger()

HEAD_LOST_SECONDS = 60.0  # without a sign of life of the run's head, its hosts end
LOOK_SECONDS = 1.0  # between two looks at a run that has not begun


class Host:
    """A process that starts up to ``workers`` workers of the run ``run`` on this machine, with
    their logs in the run's folder, or where that is not here in ``folder``. ``serve``: the address
    of its warehouse (`auto`: the one that leads to the index). No other host of the run has the
    ``name``. ``forks`` forks the workers; by default it starts one."""

    def __init__(
        self,
        url: str,
        run: str,
        folder: Path,
        *,
        workers: int = 1,
        serve: str = AUTO,
        name: str = "",
        forks: ForkServer | None = None,
    ) -> None:
        self._url = url
        self._folder = folder
        self._workers = workers
        self._serve = serve
        self._forks = forks
        self._index = Index(url, run)
        self._is_named = bool(name)  # by a cluster, which starts others where one is lost
        self.name = name or _new_name()
        self._shared = False  # the run's folder is here too
        self._devices = DevicePool(on_this_node())
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._ending = set[str]()  # of them those that end, which nothing may cut short
        self._room = asyncio.Event()
        self._emptied = asyncio.Event()  # the last of its workers has left
        self._moved = False
        self._moving = asyncio.Lock()  # its samples were moved away, and it has no warehouse
        self._index_is_heads = False

    async def run(self, stop: asyncio.Event) -> None:
        """Work until the run has ended or ``stop`` is set.

        Raises LookupError when the index has no such run, ValueError for an address that other
        nodes cannot reach, and IndexUnreachable.
        """
        try:
            while await self._work(stop):
                if not self._is_named:
                    self.name = _new_name()
                log.info("this host joins the run again", host=self.name)
            await BEAT.put(self._index, OVER, host=self.name)
            await self._index.wake(HOSTS)
        except IndexUnreachable as lost:
            if not self._index_is_heads:
                raise
            log.warning(
                "the index has ended with the head of the run; ending",
                run=self._index.run,
                reason=str(lost),
            )
        finally:
            await self._index.close()

    async def _work(self, stop: asyncio.Event) -> bool:
        """Join the run and work.

        Returns whether to join it again: it was rewound, or this host was taken for lost, and what
        it had here is gone.
        """
        async with AsyncExitStack() as stack:
            rewinds = await REWINDS.get(self._index)
            if (begun := await self._until_begun(stop)) is None:
                return False
            recipe, paths = begun
            sweep_leftovers()
            shared = shared_memory_directory() / f"{owned_prefix(os.getpid())}{self.name}"
            shared.mkdir(mode=0o700)
            stack.callback(shutil.rmtree, shared, ignore_errors=True)
            dock = Dock(
                self._index,
                flow_of(recipe).schema,
                worker=self.name,
                directory=shared,
                warehouse=node_id(shared),
                secret=await SECRET.get(self._index) or b"",
                tls=recipe.pipeline.tls_contexts(),
            )
            stack.push_async_callback(dock.close)
            await dock.join(recipe.pipeline.arena)
            self._moved = False
            address = await dock.serve(self._serve)
            launcher = self._launcher(recipe, paths, shared)
            stack.callback(launcher.close)
            await WAREHOUSE.put(self._index, node_id(shared), host=self.name)
            await self._emit("ready")
            log.info("host works", host=self.name, address=address, workers=self._workers)
            try:
                *_, again, _ = await first_of(
                    beat(self._index, self.name),
                    self._take_orders(recipe, launcher, dock),
                    self._move_when_emptied(dock),
                    self._until_over(rewinds),
                    self._leave(stop, dock, recipe.launch.stop_timeout),
                )
            finally:
                for name, life in self._lives.items():
                    if name not in self._ending:
                        life.cancel()
                await asyncio.gather(*self._lives.values(), return_exceptions=True)
                self._lives.clear()  # one that found no index has not taken itself out
                self._ending.clear()
                self._devices = DevicePool(on_this_node())
            await self._emit("stopped")
            return bool(again)

    async def _until_begun(self, stop: asyncio.Event) -> tuple[Recipe, RunPaths] | None:
        """Return the recipe and the paths of the run once it has begun; None: ``stop`` came first.

        Raises LookupError for a run that is not there or has ended, ValueError for one that has no
        workers on other machines.
        """
        while (recipe := await RUN_RECIPE.get(self._index)) is None or (
            paths := await RUN_PATHS.get(self._index)
        ) is None:
            state, _, marker = await self._index.state()
            if not state or state in ENDED:
                raise LookupError(
                    f"run: {self._index.run!r} is not in this index; give the id of a run that is"
                )
            if stop.is_set():
                return None
            # a service has not begun it yet
            await self._index.wait(STATE, marker, LOOK_SECONDS)
        if recipe.stages and (declared := await DECLARED.get(self._index)):
            recipe = recipe.with_declared(declared)
        self._index_is_heads = await HEADS_INDEX.get(self._index) is not None
        if not remote_workers(recipe):
            raise ValueError(
                f"run: {self._index.run!r} starts all of its workers itself; set "
                f"launch.remote_rollouts"
            )
        return recipe, paths

    def _launcher(self, recipe: Recipe, paths: RunPaths, shared: Path) -> ProcessLauncher:
        """Return what starts workers here, which find this host's folders in their environment."""
        self._has_url = bool(paths.url)
        self._shared = (paths.out / RECIPE).is_file()  # by a network file system
        # other runs may use the folder too
        out = paths.out if self._shared else self._folder / self._index.run
        out.mkdir(parents=True, exist_ok=True)
        host_record = {
            "name": self.name,
            "warehouse": node_id(shared),
            "out": str(out),
            "shared": str(shared),
        }
        return ProcessLauncher(
            (out if self._shared else self._folder) / "logs",
            SPAWN if recipe.rollout.engine == "vllm" else recipe.launch.start_method,
            self._forks,
            self._devices.given,
            {HOST_VARIABLE: json.dumps(host_record)},
        )

    async def _leave(self, stop: asyncio.Event, dock: Dock, timeout: float) -> None:
        """Take no more orders once ``stop`` is set, let the workers leave, and move the samples to
        other machines."""
        await stop.wait()
        self._workers = 0
        try:
            async with asyncio.timeout(timeout):
                lives = dict(self._lives)
                for name in lives:
                    await LEAVE.put(self._index, True, name=name)
                if lives:
                    await asyncio.wait(lives.values())  # a timeout cancels none of them
                await self._move_away(dock)
        except TimeoutError:
            log.warning("not all was moved away within launch.stop_timeout", seconds=timeout)

    async def _move_away(self, dock: Dock) -> None:
        async with self._moving:
            if not self._moved and not self._lives and (await self._index.state())[0] not in ENDED:
                moved = await dock.drain()
                self._moved = True
                log.info("samples moved to other machines", bytes=moved)

    async def _move_when_emptied(self, dock: Dock) -> None:
        """Move the samples away each time that the last worker has left: this machine may be taken
        from the run then."""
        while True:
            await self._emptied.wait()
            self._emptied.clear()
            await self._move_away(dock)

    async def _join(self, dock: Dock, arena: int) -> None:
        """Bring the warehouse back into the run, where it was taken out."""
        async with self._moving:
            if self._moved:
                await dock.join(arena)
                await dock.serve(self._serve)
                self._moved = False

    async def _until_over(self, rewinds: int | None) -> bool:
        """Return when the run has ended, or its head gives no sign of life any more; True when it
        was rewound since it had been ``rewinds`` times, or has lost this host, which is back."""
        pulse = Pulse(self._index)
        while await pulse.silent(HEAD) < HEAD_LOST_SECONDS:
            state, _, after = await self._index.state()
            if state in ENDED:
                return False
            if await REWINDS.get(self._index) != rewinds:
                return True
            if await IS_LOST.get(self._index, host=self.name):
                log.warning("the run took this host for lost, and it is back", host=self.name)
                return not self._is_named
            await self._index.wait(STATE, after, BEAT_SECONDS)
        log.warning("the head of the run gives no sign of life; ending", run=self._index.run)
        return False

    async def _emit(self, change: str) -> None:
        name = self.name
        node = platform.node()
        event = WorkerEvent(
            stage="host", worker=name, change=change, pid=os.getpid(), node=node, host=name
        )
        await self._index.emit(event)

    async def _take_orders(self, recipe: Recipe, launcher: ProcessLauncher, dock: Dock) -> None:
        """Take each order for this host, and for any host that no other one has taken, while there
        is room."""
        number = 0
        while True:
            while len(self._lives) >= self._workers:
                self._room.clear()
                await self._room.wait()
            order = await ORDERS.read(self._index, number, LOST_SECONDS)
            if order is None or not self._workers:
                continue
            number += 1
            if order.host not in ("", self.name):
                continue
            if await TAKEN_BY.put_once(self._index, self.name, name=order.name) == self.name:
                await self._join(dock, recipe.pipeline.arena)
                self._devices.give(recipe, (order.kind, order.number))
                work = self._keep(launcher, order.kind, order.number, order.name)
                self._lives[order.name] = asyncio.create_task(work, name=order.name)

    async def _keep(self, launcher: ProcessLauncher, kind: str, number: int, name: str) -> None:
        """Start a worker, end it when that is ordered, and report its exit code."""
        log.info("worker starts", worker=name)
        life = None
        code = None
        try:
            if kind_of(kind).rank_group and not self._shared and not self._has_url:
                refused = (
                    "writes checkpoints, and this host does not have the run's folder; set "
                    "checkpoint.url, or mount the folder at the same path"
                )
                ending = Ending(reason=f"{kind}-{number}: {refused}")
                await ENDING.put_once(self._index, ending, name=name)
                code = EndKind.FATAL
                return
            life = await launcher.launch(self._index.run, self._url, kind, number, name)
            _, code = await first_of(END.wait(self._index, LOST_SECONDS, name=name), life.wait())
        except OSError as error:
            log.error("worker cannot be started", worker=name, error=str(error))
        finally:
            self._ending.add(name)
            if life is not None:
                life.end()
                await life.wait()
            await self._index.forget_worker(name)  # only here is it known that it writes no more
            ending = await ENDING.get(self._index, name=name) or Ending()
            ending = replace(ending, code=-signal.SIGKILL if code is None else code)
            await ENDING.put(self._index, ending, name=name)
            self._devices.take_back((kind, number))
            del self._lives[name]
            self._ending.remove(name)
            self._room.set()
            if not self._lives and await LEAVE.get(self._index, name=name):
                self._emptied.set()


def _new_name() -> str:
    return f"host-{uuid.uuid4().hex[:6]}"


def forked(arguments: Sequence[str]) -> None:
    """Run :func:`main` in a child of a fork server; the host's workers are forked from a copy of
    it."""
    forks = ForkServer.within()
    try:
        main(arguments, forks)
    finally:
        forks.close()


def main(arguments: Sequence[str] | None = None, forks: ForkServer | None = None) -> None:
    """Run the process of a host of a cluster, whose workers are those that are placed on it.

    ``arguments``: the run, the host's folder and name.
    """
    run, folder, name = arguments or sys.argv[1:]
    keep_from_others()
    configure(terminal=False)
    host = Host(
        take(INDEX_VARIABLE), run, Path(folder), workers=sys.maxsize, name=name, forks=forks
    )
    asyncio.run(host.run(asyncio.Event()))


if __name__ == "__main__":
    main()
