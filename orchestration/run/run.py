"""A run: executes a recipe with an index, shared memory and workers, and keeps the results in a
folder.

out/  recipe.json  checkpoints/step-*/  logs/*.log  index/ (the embedded index's append-only file)

Run.create(recipe, out) ─▶ execute(stop) ─▶ RunResult        events() ─▶ every reader of the run
                             └ beside the supervisor: the embedded index, started again whenever it dies
Run.resume(out)         ─▶ …the same, from the newest checkpoint
Run.hosted(recipe, out, id) ─▶ host(url, stop) ─▶ Outcome    in the index of a service, begun or taken over

The process that executes a run holds the lock of its folder, from creating the run to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import json
import os
import secrets
import shlex
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import stamina
import structlog

from orchestration.cluster.ray_hosts import RayHosts
from orchestration.disk import refusal
from orchestration.elastic.budget import RestartBudget
from orchestration.private_files import MASKS, write_private
from orchestration.processes.forkserver import ForkServer
from orchestration.processes.handles import Process
from orchestration.processes.starter import SPAWN
from orchestration.recipe.devices import assign, on_this_node
from orchestration.recipe.flow import declared_of, flow_of
from orchestration.recipe.load import change_recipe, overridden, recorded_recipe
from orchestration.recipe.planner import notices_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import LaunchSection
from orchestration.run import checkpoint
from orchestration.run.checkpoint import Checkpoint
from orchestration.run.documents import (
    CHECKPOINT_REPORTED,
    DECLARED,
    HEADS_INDEX,
    REWINDS,
    RUN_FLOW,
    RUN_PATHS,
    RUN_RECIPE,
    SCALE,
    Ending,
)
from orchestration.run.kinds import remote_workers
from orchestration.run.launchers import InlineLauncher, Launcher, ProcessLauncher, RemoteLauncher
from orchestration.run.lock import LOCK, RunError, RunLocked, lock_run
from orchestration.run.paths import FIRST_ID, RECIPE, RunPaths
from orchestration.run.storage import base_models
from orchestration.run.storage.recorded import set_newer_aside, start_of, store_url
from orchestration.run.supervisor import REWIND, Outcome, Supervisor
from orchestration.service.lifecycle import WHERE, shared_of
from orchestration.service.registry import LIVE
from pipeline.documents.flow import SECRET
from pipeline.events import ENDED, Event, WorkerEvent
from pipeline.first_of import first_of
from pipeline.index.address import Address, split_password
from pipeline.index.client import INDEX_VARIABLE, Index, IndexUnreachable
from pipeline.index.embedded import EmbeddedIndex, end_unknown, served_by_tls
from pipeline.index.errors import IndexUnwritable
from pipeline.node import AUTO, own_address, owned_prefix
from pipeline.warehouse.arena import shared_memory_directory
from stages.flow.graph import document
from stages.threads import run_in_thread
from stages.weights.documents import EVALUATED

log = structlog.get_logger()

# in the run's folder: the working directory of its command, for modules that the recipe names
BEGUN_IN = "begun-in"
READERS_SECONDS = 10.0  # how long the index stays up for readers that have not reached the end
HOSTS_SECONDS = 10.0  # how long the index stays up for hosts that have not seen the end
FORMER_SECONDS = 30.0  # how long a runner waits for the lock of a former one
LOOK_SECONDS = 0.1  # until the lock is tried again, at first


@dataclass(frozen=True)
class RunResult:
    """How a run ended. ``checkpoint`` is the newest one; its ``model`` opens with transformers."""

    run: str
    state: str
    reason: str
    out_dir: Path
    checkpoint: Checkpoint | None
    seconds: float
    worker: str = ""  # that has failed


class Run:
    """One run in ``out_dir``. Make it with :meth:`create` or :meth:`resume`; execute it once."""

    def __init__(
        self,
        recipe: Recipe,
        out_dir: Path,
        start: Checkpoint | None = None,
        hosted: str = "",
        lock: BinaryIO | None = None,
    ) -> None:
        self.recipe = recipe
        self.out_dir = out_dir.resolve()
        self.start = start
        self.id = hosted or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        self.supervisor: Supervisor | None = None
        # forks the workers; None: the run starts a fork server
        self.forks: ForkServer | None = None
        # while it is executed, unless its index is another one
        self.server: EmbeddedIndex | None = None
        self.shared = shared_memory_directory() / f"{owned_prefix(os.getpid())}{self.id}"
        if hosted:  # a runner that takes the run over must find its memory
            self.shared = shared_of(self.out_dir)
        self._hosted = bool(hosted)
        self._lock = lock
        self._store_url = ""
        self.evaluated: int | None = (
            None  # the newest version that was, of a resumed run; None: the one before its start
        )
        self.last_event = "0"  # the id after which those of its events begin
        # the command by which another machine joins it as a host, once that is known
        self.joining = ""
        self._index: Index | None = None
        self._hosts = RayHosts(recipe, self.out_dir) if recipe.launch.on_cluster else None
        self._up = asyncio.Event()
        self._over = False
        self._readers: set[asyncio.Event] = set()

    @property
    def begins(self) -> int:
        """Optimizer steps that were made before it starts."""
        return self.start.version if self.start else 0

    @classmethod
    def create(cls, recipe: Recipe, out_dir: Path) -> Run:
        """A new run; ``out_dir`` must be new or empty.

        A new one has the mode of ``launch.readers``. Raises RunError.
        """
        if out_dir.exists():
            _refuse_used(out_dir)
        else:
            _make_folder(out_dir, recipe)
        recipe = recipe.with_absolute_paths()
        lock = lock_run(out_dir)
        try:
            _refuse_used(out_dir, lock)
            write_private(out_dir / RECIPE, recipe.to_json())
            (out_dir / BEGUN_IN).write_text(str(Path.cwd()))
            return cls(recipe, out_dir, lock=lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def resume(
        cls, out_dir: Path, overrides: Sequence[str] = (), start_version: int | None = None
    ) -> Run:
        """The run in ``out_dir``, to go on from its newest checkpoint (from the start when it has
        made none), or from that of ``start_version`` (0: from the start); newer ones are then set
        aside. ``overrides``, ``section.key=value`` each, change the recipe for good, from that
        checkpoint on. Raises RunError, and RecipeError for what does not fit the recipe and for
        keys that may not change (:func:`orchestration.recipe.load.fixed_keys`)."""
        try:
            recipe = recorded_recipe(out_dir / RECIPE)
        except OSError as error:
            raise RunError(
                f"run: {out_dir} holds no recipe.json ({error}); give the folder of a run"
            ) from None
        lock = lock_run(out_dir)
        try:
            _refuse_hosted(out_dir)
            free = base_models.moved(recipe, overridden(overrides), out_dir)
            base_models.refuse_missing(recipe, out_dir, free)
            if overrides:
                recipe = change_recipe(recipe, overrides, free=free).with_absolute_paths()
            url = store_url(recipe, out_dir)
            start = start_of(out_dir, url, recipe.train.steps, start_version)
            if start_version is not None:
                set_newer_aside(out_dir, url, start_version)
            if overrides:
                write_private(out_dir / RECIPE, recipe.to_json())
            return cls(recipe, out_dir, start, lock=lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def hosted(cls, recipe: Recipe, out_dir: Path, run: str) -> Run:
        """Returns the run ``run`` of a service, which another runner may have begun in
        ``out_dir``."""
        out_dir.mkdir(parents=True, exist_ok=True)
        write_private(out_dir / RECIPE, recipe.to_json())
        start = checkpoint.newest(out_dir / "checkpoints", store_url(recipe, out_dir, run))
        return cls(recipe, out_dir, start, hosted=run)

    async def host(self, url: str, stop: asyncio.Event | None = None) -> Outcome:
        """Run to the end in the index at ``url``, from wherever the run stands.

        Its samples stay in shared memory and in the index until the service removes them; no
        process stays behind. Cancelling ends all workers at once, and changes nothing else: the run
        can be taken over. Raises RunLocked when a former runner does not let go of the folder.
        """
        launcher = _launcher(self.recipe, self.out_dir, self.forks)
        try:
            await self._take_lock()
            return await self._work(url, stop or asyncio.Event(), launcher)
        finally:
            launcher.close()
            await self._end()

    async def execute(self, stop: asyncio.Event | None = None) -> RunResult:
        """Run to the end, or until ``stop`` is set.

        Whatever happens, no process and no shared memory stays behind, and a run that cannot go on
        has failed, with its reason. Cancelling ends everything at once.
        """
        began = time.monotonic()
        launcher = _launcher(self.recipe, self.out_dir, self.forks)
        sockets = Path(tempfile.mkdtemp(prefix=owned_prefix(os.getpid())))
        try:
            try:
                sweep_leftovers()
                outcome = await self._execute(sockets, stop or asyncio.Event(), launcher)
            except Exception as error:
                log.exception("the run cannot go on")
                outcome = Outcome("failed", _reason(error, self.out_dir))
            newest = checkpoint.latest(self.out_dir / "checkpoints")
            seconds = time.monotonic() - began
            return RunResult(
                self.id,
                outcome.state,
                outcome.reason,
                self.out_dir,
                newest,
                seconds,
                outcome.worker,
            )
        finally:
            launcher.close()
            await self._end()
            if self.server is not None:
                self.server.stop()
            shutil.rmtree(sockets, ignore_errors=True)
            shutil.rmtree(self.shared, ignore_errors=True)

    async def _execute(self, sockets: Path, stop: asyncio.Event, launcher: Launcher) -> Outcome:
        if self.recipe.pipeline.index != "embedded":
            return await self._work(self.recipe.pipeline.index, stop, launcher)
        data = self.out_dir / "index"
        shutil.rmtree(data, ignore_errors=True)
        pipeline = self.recipe.pipeline
        address = None
        tls = pipeline.tls_contexts()
        if text := self.recipe.index_address:
            text = await _reached_at(self.recipe, self._hosts) if text == AUTO else text
            address = await asyncio.to_thread(
                Address.parse, text, pipeline.tls_authority if tls else ""
            )
        self.server = EmbeddedIndex(data, socket=sockets / "index.sock", address=address)
        await _start_index(self.server)
        async with (
            served_by_tls(self.server, tls[0]) if tls and address else contextlib.nullcontext()
        ):
            outcome, *_ = await first_of(
                self._work(self.server.url, stop, launcher),
                _keep_index(self.server, self.recipe.launch, self._emit_restart),
                *([end_unknown(self.server)] if address else []),
            )
        return cast(Outcome, outcome)

    async def _emit_restart(self, reason: str) -> None:
        event = WorkerEvent(stage="index", worker="index-0", change="restarted", reason=reason)
        with contextlib.suppress(IndexUnreachable):
            if self._index is not None:
                await self._index.emit(event)

    async def _take_lock(self) -> None:
        """Take the folder's lock, after waiting for a former runner that has lost its lease and is
        about to end."""
        attempts = stamina.retry_context(
            RunLocked,
            attempts=None,
            timeout=FORMER_SECONDS,
            wait_initial=LOOK_SECONDS,
            wait_max=1.0,
            wait_jitter=0,
        )
        async for attempt in attempts:
            with attempt:
                self._lock = self._lock or lock_run(self.out_dir)

    async def _work(self, url: str, stop: asyncio.Event, launcher: Launcher) -> Outcome:
        self._index = Index(url, self.id)
        await self._prepare(self._index)
        # For programs that watch the run. The URL may hold a password.
        address = self.server.address if self.server is not None else None
        join = address.url if address else url
        without, token = split_password(join)
        where = {
            "index": url,
            "run": self.id,
            "hosted": self._hosted,
            "join": without,
            "token": token,
        }
        write_private(self.out_dir / WHERE, json.dumps(where))
        if self.recipe.launch.remote_rollouts:
            secret = (
                token if self.server is not None or not token else "PASSWORD"
            )  # that of a user's index is not shown
            self.joining = _joining_command(
                without, secret, self.id, self.recipe.launch.remote_rollouts
            )
        self._up.set()
        for notice in notices_of(self.recipe):
            log.warning("notice", recipe=str(notice))
        if self._hosts is not None:
            self._hosts.begin(self._index, join)
        launch = self.recipe.launch
        budget = RestartBudget(launch.max_restarts, launch.restart_window)
        while (outcome := await self._supervise(stop, launcher)).state == REWIND:
            if budget.take(time.monotonic()):
                outcome = Outcome(
                    "failed",
                    f"launch.max_restarts = {launch.max_restarts} is used up: {outcome.reason}",
                )
                await self._index.transition(
                    ["created", *LIVE, "stopping"], outcome.state, outcome.reason
                )
                break
            await self._rewind()
        if self._hosts is not None:
            await self._hosts.close()
        if readers := [asyncio.create_task(done.wait()) for done in self._readers]:
            _, late = await asyncio.wait(readers, timeout=READERS_SECONDS)
            for task in late:
                task.cancel()
        return outcome

    async def _rewind(self) -> None:
        """Prepare to go on from the newest checkpoint: samples of steps since were lost with a
        node, and these steps cannot be replayed."""
        assert self._index is not None
        shutil.rmtree(self.shared, ignore_errors=True)
        self.start = checkpoint.latest(self.out_dir / "checkpoints")
        await self._prepare(self._index)
        rewinds = await REWINDS.get(self._index) or 0
        await REWINDS.put(self._index, rewinds + 1)

    async def _supervise(self, stop: asyncio.Event, launcher: Launcher) -> Outcome:
        assert self._index is not None
        remote = RemoteLauncher(self._index, launcher, remote_workers(self.recipe), self._hosts)
        self.supervisor = Supervisor(
            self._index, remote, self.recipe, begins=self.begins, folder=self.out_dir
        )
        try:
            await remote.begin()
            outcome = await self.supervisor.run(stop)
            if self.server is not None and outcome.state != REWIND:
                await remote.until_hosts_ended(HOSTS_SECONDS)
            return outcome
        finally:
            remote.close()

    async def _end(self) -> None:
        self._over = True
        self._up.set()
        # a run of a service may be taken over; it is removed when the run is concluded
        if not self._hosted:
            (self.out_dir / WHERE).unlink(missing_ok=True)
        if self._hosts is not None:
            await self._hosts.close()
        if self._index is not None:
            await self._index.close()
        if self._lock is not None:
            self._lock.close()

    async def events(self, after: str = "0") -> AsyncIterator[Event]:
        """Yield the run's events after id ``after`` as they come; ends after the run's last
        state."""
        done = asyncio.Event()
        self._readers.add(done)
        try:
            await self._up.wait()
            if self._index is None:
                return
            async for event in self._index.follow(after):
                yield event
                ended = event.kind == "state" and event.data["state"] in ENDED
                # otherwise it was resumed since
                if ended and (await self._index.state())[0] in ENDED:
                    return
        except IndexUnreachable:
            if not self._over:
                raise
        finally:
            done.set()
            self._readers.discard(done)

    async def _prepare(self, index: Index) -> None:
        # It imports torch, for seconds in which the loop would hear no signal.
        await run_in_thread(lambda: importlib.import_module("pipeline.columns"), "imports")
        self._store_url = store_url(self.recipe, self.out_dir, self.id)
        if self._store_url:
            (self.out_dir / FIRST_ID).write_text(self._store_url.rpartition("/")[2])
            await asyncio.to_thread(
                _prepare_store, self._store_url, self.start, self.recipe.checkpoint.keep
            )
        flow = flow_of(self.recipe)
        config = flow.config(self.recipe.staleness_plan, self.recipe.algorithm.max_dropped)
        counters = {"published": 0, "trained": 0, "admitted": 0}
        remake = list[int]()
        rates = ""
        if self.start is not None:
            counters = self.start.counters
            remake = self.start.remake
            rates = self.start.rates
        await index.continue_events(self.last_event)
        begun = not await index.init(config, counters, remake, rates)
        if not begun:
            await SCALE.remove(index)  # of the run that this one resumes
            if self.recipe.first_slack != self.recipe.staleness_plan.slack:
                await index.set_slack(self.recipe.first_slack)
        # the machine was rebooted, or is another one: the samples are gone
        lost = begun and not self.shared.is_dir()
        reported = await CHECKPOINT_REPORTED.get(index) or 0
        if lost or not begun:
            # Not from the beginning, or from an older one, on a machine that does not have the
            # run's folder.
            checkpoint.latest_of_run(self.out_dir / "checkpoints", reported, self._store_url)
            await CHECKPOINT_REPORTED.put(index, self.begins)
        if lost:
            await index.rewind(config, counters, remake, rates)
            if (evaluated := await EVALUATED.get(index)) is not None:
                await EVALUATED.put(index, min(evaluated, self.begins))
            since = (
                (f"from the checkpoint of version {self.start.version}")
                if self.start
                else "from the beginning"
            )
            log.warning("the samples in shared memory are gone; going on", since=since)
            rewound: dict[str, Any] = {
                "stage": "runner",
                "worker": "runner-0",
                "change": "rewound",
                "pid": os.getpid(),
            }
            reason = f"its samples were gone; it goes on {since}"
            await index.emit(WorkerEvent(**rewound, version=self.begins, reason=reason))
            begun = False
        if not begun:
            newest = self.begins - 1 if self.evaluated is None else self.evaluated
            await EVALUATED.put_once(index, newest)
            shutil.rmtree(self.shared, ignore_errors=True)
            self.shared.mkdir(parents=True, mode=0o700)
        base_models.record_beside(self.recipe, self.out_dir)
        place = RunPaths(
            self.out_dir, self.shared, self.start.path if self.start else None, self._store_url
        )
        await _put_recipe(index, self.recipe)
        await RUN_FLOW.put(index, document(flow))
        await (RUN_PATHS.put_once if begun else RUN_PATHS.put)(index, place)
        await SECRET.put_once(index, secrets.token_hex(32).encode())
        await index.put_own_address(await _reached_at(self.recipe, self._hosts))
        if self.server is not None:
            await HEADS_INDEX.put(index, True)
        await index.transition([""], "created")


async def _put_recipe(index: Index, recipe: Recipe) -> None:
    """Put what workers build their parts from: the recipe, and what its own stages declare, before
    it."""
    if recipe.stages:
        await DECLARED.put(index, declared_of(recipe))
    await RUN_RECIPE.put(index, recipe)


async def _reached_at(recipe: Recipe, hosts: RayHosts | None) -> str:
    """Returns the address by which other machines reach this one: that of the index, if it is
    given, or by which the nodes of the Ray cluster reach it, or that of its network."""
    own = await (hosts.connect() if hosts is not None else asyncio.to_thread(own_address))
    if (text := recipe.index_address) not in ("", AUTO):
        host = Address.split(text)[0]
        own = str((await asyncio.to_thread(socket.getaddrinfo, host, 0))[0][4][0])
    return own


def _joining_command(join: str, token: str, run: str, workers: int) -> str:
    """Returns the command by which another machine starts ``workers`` workers of ``run``."""
    variables = {INDEX_VARIABLE: join, **({"ASYNCDOCK_HOST_TOKEN": token} if token else {})}
    assigned = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    several = ["--workers", str(workers)] if workers > 1 else []
    return " ".join([*assigned, "asyncdock host --run", run, *several])


def _reason(error: Exception, out: Path) -> str:
    """Returns why the run in ``out`` has failed with ``error``."""
    if isinstance(error, IndexUnwritable):  # the server does not say where its file is
        refused = OSError(errno.ENOSPC, str(error))
        needed = sum(file.stat().st_size for file in (out / "index").rglob("*.aof"))
        return f"index: {refusal(out / 'index', needed, refused)}, and resume the run"
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def _prepare_store(url: str, start: Checkpoint | None, keep: int) -> None:
    """Check that checkpoints can be copied to ``url``, and copy there the one that the run begins
    with."""
    from orchestration.run.storage.store import CheckpointStore

    store = CheckpointStore(url)
    store.probe()
    if start is not None and start.path.name not in store.names():
        start.verify()
        store.push(start.path, keep)


async def _start_index(server: EmbeddedIndex) -> None:
    for pause in server.starting():
        await asyncio.sleep(pause)


async def _keep_index(
    server: EmbeddedIndex, launch: LaunchSection, emit: Callable[[str], Coroutine[Any, Any, None]]
) -> None:
    """Start the embedded index again whenever it dies; its append-only file holds all that was
    acknowledged. ``emit`` reports why. Raises RunError when it dies more often than a worker may.
    """
    events = set[asyncio.Task[None]]()
    budget = RestartBudget(launch.max_restarts, launch.restart_window)
    try:
        while True:
            assert server.process is not None
            code = await Process.of(server.process.pid, server.process).wait()
            reason = f"the embedded index {Ending(code)}"
            if budget.take(time.monotonic()):
                raise RunError(
                    f"{reason} and launch.max_restarts = {budget.most} is used up; see {server.log}"
                )
            log.warning("the index died; starting it again", reason=reason)
            await _start_index(server)
            events.add(asyncio.create_task(emit(reason)))  # the index may die again before that
    finally:
        for event in events:
            event.cancel()
        await asyncio.gather(*events, return_exceptions=True)


def _make_folder(out_dir: Path, recipe: Recipe) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    out_dir.chmod(0o777 & ~MASKS[recipe.launch.readers])


def _refuse_used(out_dir: Path, lock: BinaryIO | None = None) -> None:
    """Raises RunError when ``out_dir`` holds anything but a lock file: RunLocked when a run in it
    is being executed."""
    if any(path.name != LOCK for path in out_dir.iterdir()):
        if lock is None and (out_dir / LOCK).exists():
            lock_run(out_dir).close()
        raise RunError(
            f"out: {out_dir} is not empty; give a new folder, or continue with "
            f"`asyncdock resume {out_dir}`"
        )


def _refuse_hosted(out_dir: Path) -> None:
    """Raises RunError when the run in ``out_dir`` is a service's that has not ended."""
    try:
        where = json.loads((out_dir / WHERE).read_text())
    except (OSError, ValueError):
        return
    if where.get("hosted"):
        raise RunLocked(
            f"run: {out_dir} is run {where['run']} of a service, which executes it; end it with "
            f"`asyncdock runs stop {where['run']}` first (or remove {out_dir / WHERE}, if that "
            f"service is gone for good)"
        )


def sweep_leftovers() -> None:
    """Remove what killed runs have left in shared memory, and the socket directories of their
    indexes."""
    for parent in (shared_memory_directory(), Path(tempfile.gettempdir())):
        for folder in parent.glob("asyncdock-*-*-*"):
            pid = folder.name.split("-")[1]
            owned = pid.isdigit() and folder.name.startswith(owned_prefix(int(pid)))
            if owned and not Process.of(int(pid)).alive():
                shutil.rmtree(folder, ignore_errors=True)
                log.info("removed what a killed run left behind", folder=str(folder))


def _launcher(recipe: Recipe, out: Path, forks: ForkServer | None) -> Launcher:
    """Returns what starts the workers of this machine."""
    if recipe.launch.launcher == "inline":
        return InlineLauncher()
    # vLLM brings processes and threads of its own, and has not been tried in a fork.
    method = SPAWN if recipe.rollout.engine == "vllm" else recipe.launch.start_method
    return ProcessLauncher(out / "logs", method, forks, assign(recipe, on_this_node()))
