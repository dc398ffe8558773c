"""Hosts: processes on other machines that start workers of a run with the launcher of their own.

    head: launch ──▶ log "orders" ────────▶ host with room: put_once "host:NAME" decides which one has the worker
          wait   ◀── document "exit:NAME" ◀── its worker has ended
          end    ──▶ document "end:NAME" ──▶ it ends the worker
          a host whose document "beat:HOST" does not change for LOST_SECONDS is lost, and its workers with it

All of it is in the run's index, so a host needs the index's URL and the run's id, and no connection to the head. Hosts may
join at any time: one that is lost leaves its workers to the supervisor, which orders them again. Readers of documents are
woken by the topic "hosts".
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import msgpack
import structlog

from orchestration.processes.starter import SPAWN
from orchestration.recipe.flow import flow_of
from orchestration.recipe.schema import Recipe
from orchestration.run.kinds import remote_workers
from orchestration.run.launchers import HEAD, HOSTS, LOST_SECONDS, ORDERS, ProcessLauncher, Pulse, beat
from orchestration.run.paths import HOST_VARIABLE, RunPaths
from orchestration.run.run import RECIPE, owned_prefix, sweep_leftovers
from pipeline.events import ENDED
from pipeline.first_of import first_of
from pipeline.index.client import Index, IndexUnreachable, worker_name
from pipeline.node import node_id
from pipeline.warehouse.arena import shared_memory_directory
from pipeline.warehouse.dock import Dock

log = structlog.get_logger()

HEAD_LOST_SECONDS = 60.0  # without a sign of life of the run's head, its hosts end
DRAIN_SECONDS = 60.0  # for which a host that is stopped moves its samples to other machines


class Host:
    """Starts up to ``workers`` workers of the run ``run`` on this machine, with their logs in ``folder``. Its warehouse is
    served at ``serve`` (0.0.0.0: announced is the address that leads to the index)."""

    def __init__(self, url: str, run: str, folder: Path, *, workers: int = 1, serve: str = "0.0.0.0") -> None:
        self._url, self._folder, self._workers, self._serve = url, folder, workers, serve
        self._index = Index(url, run)
        self.name = worker_name("host", os.getpid())
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._index_is_heads = False

    async def run(self, stop: asyncio.Event) -> None:
        """Work until the run has ended or ``stop`` is set. Raises LookupError when the index has no such run, ValueError for
        an address that other nodes cannot reach, and IndexUnreachable."""
        try:
            await self._run(stop)
        except IndexUnreachable as lost:
            if not self._index_is_heads:
                raise
            log.warning("the index has ended with the head of the run; ending", run=self._index.run, reason=str(lost))

    async def _run(self, stop: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._index.close)
            recipe_json, paths_json = await self._index.get("recipe"), await self._index.get("place")
            if recipe_json is None or paths_json is None:
                raise LookupError(f"run: {self._index.run!r} is not in this index; give the id of a run that is")
            recipe, paths = Recipe.from_json(recipe_json), RunPaths.from_json(paths_json)
            self._index_is_heads = bool(recipe.pipeline.index_serve)
            if not remote_workers(recipe):
                raise ValueError(
                    f"run: {self._index.run!r} starts all of its workers itself; set launch.remote_rollouts"
                )
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
                secret=(await self._index.get("secret") or "").encode(),
                tls=recipe.pipeline.tls_contexts(),
            )
            stack.push_async_callback(dock.close)
            await dock.join(recipe.pipeline.arena)
            address = await dock.serve(self._serve)
            has_folder = (paths.out / RECIPE).is_file()  # by a network file system
            out = paths.out if has_folder else self._folder / self._index.run  # other runs may use the folder too
            out.mkdir(parents=True, exist_ok=True)
            own = {"warehouse": node_id(shared), "out": str(out), "shared": str(shared)}
            method = SPAWN if recipe.rollout.engine == "vllm" else recipe.launch.start_method
            launcher = ProcessLauncher(self._folder / "logs", method, environment={HOST_VARIABLE: json.dumps(own)})
            stack.callback(launcher.close)
            log.info("host works", host=self.name, address=address, workers=self._workers)
            try:
                await first_of(
                    beat(self._index, self.name), self._take_orders(launcher), self._until_ended(), stop.wait()
                )
            finally:
                for life in self._lives.values():
                    life.cancel()
                await asyncio.gather(*self._lives.values(), return_exceptions=True)
            if stop.is_set() and (await self._index.state())[0] not in ENDED:
                async with asyncio.timeout(DRAIN_SECONDS):
                    await dock.drain()

    async def _until_ended(self) -> None:
        """Return when the run has ended, or its head gives no sign of life any more."""
        pulse = Pulse(self._index)
        while await pulse.silent(HEAD) < HEAD_LOST_SECONDS:
            state, _, after = await self._index.state()
            if state in ENDED:
                return
            await self._index.wait("state", after, LOST_SECONDS)
        log.warning("the head of the run gives no sign of life; ending", run=self._index.run)

    async def _take_orders(self, launcher: ProcessLauncher) -> None:
        """Take each order that no other host has taken, while there is room."""
        number = 0
        while True:
            while len(self._lives) >= self._workers:
                self._room.clear()
                await self._room.wait()
            if (packed := await self._index.read_log(ORDERS, number, LOST_SECONDS)) is None:
                continue
            order, number = msgpack.unpackb(packed), number + 1
            name = order["name"]
            if await self._index.put_once(f"host:{name}", self.name) == self.name:
                work = self._keep(launcher, order["kind"], order["number"], name)
                self._lives[name] = asyncio.create_task(work, name=name)

    async def _keep(self, launcher: ProcessLauncher, kind: str, number: int, name: str) -> None:
        """Start a worker, end it when that is ordered, and report its exit code."""
        log.info("worker starts", worker=name)
        life, code = None, None
        try:
            life = await launcher.launch(self._index.run, self._url, kind, number, name)
            _, code = await first_of(self._until_end(name), life.wait())
        except OSError as error:
            log.error("worker cannot be started", worker=name, error=str(error))
        finally:
            if life is not None:
                life.end()
                await life.wait()
            await self._index.put(f"exit:{name}", str(-signal.SIGKILL if code is None else code))
            await self._index.wake(HOSTS)
            del self._lives[name]
            self._room.set()

    async def _until_end(self, name: str) -> None:
        after = ""
        while await self._index.get(f"end:{name}") is None:
            after = await self._index.woken(HOSTS, after, LOST_SECONDS)
