"""The life of a run, from its folder and an index to its end.

    index ─▶ prepare ─▶ supervise ─▶ ended: finished, stopped or failed
               ▲            └─ samples were lost with a node ─▶ rewind to the newest checkpoint ─┐
               └──────────────────────────────────────────────────────────────────────────────────┘
    events() ─▶ every reader of the run, until its last state

A command executes a run so (`asyncdock run`, `asyncdock resume`), and so does the runner of a service.
They differ in the folder and in the index that they give: see :class:`RunFolder` and :class:`RunIndex`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import pkgutil
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import structlog

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.checkpoint import Checkpoint
from orchestration.disk import refusal
from orchestration.event_feed import EventFeed
from orchestration.launch.launchers import (
    Hosts,
    InlineLauncher,
    Launcher,
    ProcessLauncher,
    RemoteLauncher,
)
from orchestration.processes.forkserver import ForkServer
from orchestration.processes.leftovers import sweep_leftovers
from orchestration.processes.starter import SPAWN
from orchestration.recipe.devices import assign, on_this_node
from orchestration.recipe.flow import declared_of, flow_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import notices_of
from orchestration.recipe.worker_kinds import remote_workers
from orchestration.run.folder import RunFolder
from orchestration.run.run_index import RunIndex, index_of, reached_at
from orchestration.state.documents import (
    CHECKPOINT_REPORTED,
    DECLARED,
    HEADS_INDEX,
    REWINDS,
    RUN_FLOW,
    RUN_PATHS,
    RUN_RECIPE,
    SCALE,
)
from orchestration.state.lock import RunError
from orchestration.state.paths import INDEX
from orchestration.supervise.budget import RestartBudget
from orchestration.supervise.supervisor import REWIND, Outcome, Supervisor
from pipeline.data.events import ENDED, LIVE, Event, WorkerEvent
from pipeline.documents.flow import SECRET
from pipeline.first_of import first_of
from pipeline.index.address import split_password
from pipeline.index.client import INDEX_VARIABLE, Index, IndexUnreachable, RunConfig
from pipeline.index.errors import IndexUnwritable
from stages.flow.document import document
from stages.flow.resolver import Flow
from stages.threads import run_in_thread
from stages.weights.documents import EVALUATED

log = structlog.get_logger()

READERS_SECONDS = 10.0  # how long the index stays up for readers that have not reached the end
HOSTS_SECONDS = 10.0  # how long the index stays up for hosts that have not seen the end


@dataclass(frozen=True)
class RunResult:
    """The end of a run. ``checkpoint`` is the newest one; its ``model`` opens with transformers."""

    run: str
    state: str
    reason: str
    out_dir: Path
    checkpoint: Checkpoint | None
    worker: str = ""  # that has failed


class Execution:
    """The one execution of the run in ``folder``, in ``index`` (default: the one of its recipe).

    ``forks`` forks the workers; None: the run starts a fork server.
    """

    def __init__(
        self, folder: RunFolder, index: RunIndex | None = None, forks: ForkServer | None = None
    ) -> None:
        self.folder = folder
        self.recipe = folder.recipe
        self.index = index or index_of(folder.recipe, folder.path)
        self.forks = forks
        self.supervisor: Supervisor | None = None
        # the newest version that was, of a resumed run; None: the one before its start
        self.evaluated: int | None = None
        self.last_event = "0"  # the id after which those of its events begin
        # the command by which another machine joins it as a host, once that is known
        self.joining = ""
        self._client: Index | None = None
        self._feed: EventFeed | None = None
        self._hosts = _hosts(self.recipe, folder.path)
        self._up = asyncio.Event()
        self._over = False
        self._readers: set[asyncio.Event] = set()

    async def execute(self, stop: asyncio.Event | None = None) -> RunResult:
        """Run to the end, or until ``stop`` is set, from wherever the run stands in the index.

        No process stays behind, and a run that cannot go on has failed, with its reason. Cancelling
        ends all workers at once. Raises IndexUnreachable where another process may go on with the
        run.
        """
        try:
            outcome = await self._outcome(stop or asyncio.Event())
            return RunResult(
                self.folder.run_id,
                outcome.state,
                outcome.reason,
                self.folder.path,
                self.folder.newest(),
                outcome.worker,
            )
        finally:
            self._release_readers()
            self.folder.close()

    async def _outcome(self, stop: asyncio.Event) -> Outcome:
        try:
            await self.folder.lock()
            sweep_leftovers()
            async with self.index.serving(self._hosts):
                work = self._run(stop)
                outcome, *_ = await first_of(work, *self.index.watching(self._emit_restart))
                return cast(Outcome, outcome)
        except Exception as error:
            if isinstance(error, IndexUnreachable) and self.folder.outlives_process:
                raise
            if not isinstance(error, IndexUnwritable):  # a full disk: its reason says all
                log.exception("the run cannot go on")
            return Outcome("failed", _reason(error, self.folder.path))

    async def _run(self, stop: asyncio.Event) -> Outcome:
        """Prepare and supervise the run until it has ended and its readers know."""
        launcher = _launcher(self.recipe, self.folder.path, self.forks)
        self._client = Index(self.index.url, self.folder.run_id)
        try:
            await self._prepare()
            async with EventFeed.reading(self._client) as self._feed:
                self._announce()
                outcome = await self._supervise_and_rewind(stop, launcher, self._feed)
                await self._let_readers_finish()
            return outcome
        finally:
            launcher.close()
            self._release_readers()
            if self._hosts is not None:
                await self._hosts.close()
            await self._client.close()

    async def _prepare(self) -> None:
        """Bring the index to where the run stands, and put there what workers build their parts
        from."""
        index = self._connected
        # It imports torch, for seconds in which the loop would hear no signal.
        await run_in_thread(lambda: importlib.import_module("pipeline.data.columns"), "imports")
        await asyncio.to_thread(self.folder.prepare_store)
        await index.continue_events(self.last_event)
        flow = flow_of(self.recipe)
        standing = self._standing(flow)
        is_new = await index.init(*standing)
        if is_new:
            await self._forget_former(index)
        # the machine was rebooted, or is another one
        lost_samples = not is_new and not self.folder.shared.is_dir()
        begins_at_checkpoint = is_new or lost_samples
        if begins_at_checkpoint:
            await self._require_newest_checkpoint(index)
        if lost_samples:
            await index.rewind(*standing)
            await self._report_lost_samples(index)
        if begins_at_checkpoint:
            newest = self.folder.begins - 1 if self.evaluated is None else self.evaluated
            await EVALUATED.put_once(index, newest)
            self.folder.empty_shared()
        if self.recipe.has_model_folders:
            from orchestration.checkpoints import base_models

            base_models.record_beside(self.recipe, self.folder.path)
        if self.recipe.stages:  # before the recipe: workers wait for that
            await DECLARED.put(index, declared_of(self.recipe))
        await RUN_RECIPE.put(index, self.recipe)
        await RUN_FLOW.put(index, document(flow))
        put_paths = RUN_PATHS.put if begins_at_checkpoint else RUN_PATHS.put_once
        await put_paths(index, self.folder.paths)
        await SECRET.put_once(index, secrets.token_hex(32).encode())
        await index.put_own_address(await reached_at(self.recipe, self._hosts))
        if self.index.is_own:
            await HEADS_INDEX.put(index, True)
        await index.transition([""], "created")

    def _standing(self, flow: Flow) -> tuple[RunConfig, Mapping[str, int], Sequence[int], str]:
        """Return what the index is told of the run when it begins: the configuration of ``flow``,
        counters, groups to make again, and pass rates."""
        recipe = self.recipe
        config = flow.config(
            recipe.staleness_plan, recipe.algorithm.max_dropped, recipe.replay_versions
        )
        start = self.folder.start
        if start is None:
            return config, {"published": 0, "trained": 0, "admitted": 0}, [], ""
        return config, start.counters, start.remake, start.rates

    async def _forget_former(self, index: Index) -> None:
        """Take back what was asked of the run that this one resumes."""
        await SCALE.remove(index)
        if self.recipe.first_slack != self.recipe.staleness_plan.slack:
            await index.set_slack(self.recipe.first_slack)

    async def _require_newest_checkpoint(self, index: Index) -> None:
        """Raise RunError on a machine that does not have the run's folder: it would begin from the
        start, or from an older checkpoint."""
        reported = await CHECKPOINT_REPORTED.get(index) or 0
        checkpoints = self.folder.path / "checkpoints"
        checkpoint.latest_of_run(checkpoints, reported, self.folder.store_url)
        await CHECKPOINT_REPORTED.put(index, self.folder.begins)

    async def _report_lost_samples(self, index: Index) -> None:
        """Report that the run goes on from the checkpoint that it begins with."""
        begins = self.folder.begins
        if (evaluated := await EVALUATED.get(index)) is not None:
            await EVALUATED.put(index, min(evaluated, begins))
        since = f"from the checkpoint of version {begins}" if begins else "from the beginning"
        log.warning("the samples in shared memory are gone; going on", since=since)
        await index.emit(
            WorkerEvent(
                stage="runner",
                worker="runner-0",
                change="rewound",
                pid=os.getpid(),
                version=begins,
                reason=f"its samples were gone; it goes on {since}",
            )
        )

    def _announce(self) -> None:
        """Say where the run is reached: to readers here, to programs that watch its folder, and to
        other machines."""
        launch = self.recipe.launch
        address, password = split_password(self.index.join_url)
        self.folder.record_index({"index": self.index.url, "join": address, "token": password})
        if launch.remote_rollouts:
            # that of a user's index is not shown
            shown = password if self.index.is_own or not password else "PASSWORD"
            run_id = self.folder.run_id
            self.joining = _joining_command(address, shown, run_id, launch.remote_rollouts)
        self._up.set()
        for notice in notices_of(self.recipe):
            log.warning("notice", recipe=str(notice))
        if self._hosts is not None:
            self._hosts.begin(self._connected, self.index.join_url)

    async def _supervise_and_rewind(
        self, stop: asyncio.Event, launcher: Launcher, events: EventFeed
    ) -> Outcome:
        outcome = await self._supervise(stop, launcher, events)
        launch = self.recipe.launch
        budget = RestartBudget(launch.max_restarts, launch.restart_window)
        while outcome.state == REWIND:
            if budget.take(time.monotonic()):
                return await self._fail(
                    f"launch.max_restarts = {budget.most} is used up: {outcome.reason}"
                )
            await self._rewind()
            outcome = await self._supervise(stop, launcher, events)
        return outcome

    async def _supervise(
        self, stop: asyncio.Event, launcher: Launcher, events: EventFeed
    ) -> Outcome:
        index = self._connected
        remote = RemoteLauncher(index, launcher, remote_workers(self.recipe), self._hosts)
        self.supervisor = Supervisor(
            index, remote, self.recipe, events, begins=self.folder.begins, folder=self.folder.path
        )
        try:
            await remote.begin()
            outcome = await self.supervisor.run(stop)
            if self.index.is_own and outcome.state != REWIND:
                await remote.until_hosts_ended(HOSTS_SECONDS)
            return outcome
        finally:
            remote.close()

    async def _rewind(self) -> None:
        """Prepare to go on from the newest checkpoint: samples of steps since were lost with a
        node, and these steps cannot be replayed."""
        self.folder.remove_shared()
        self.folder.start = self.folder.newest()
        await self._prepare()
        rewinds = await REWINDS.get(self._connected) or 0
        await REWINDS.put(self._connected, rewinds + 1)

    async def _fail(self, reason: str) -> Outcome:
        outcome = Outcome("failed", reason)
        await self._connected.transition(["created", *LIVE, "stopping"], outcome.state, reason)
        return outcome

    def _release_readers(self) -> None:
        """From now on a lost index is no failure, and nobody waits for one."""
        self._over = True
        self._up.set()

    async def _let_readers_finish(self) -> None:
        """Keep the index until all readers have seen the end, for at most READERS_SECONDS."""
        if readers := [asyncio.create_task(done.wait()) for done in self._readers]:
            _, late = await asyncio.wait(readers, timeout=READERS_SECONDS)
            for task in late:
                task.cancel()

    async def events(self, after: str = "0") -> AsyncIterator[Event]:
        """Yield the run's events after id ``after`` as they come; ends after the run's last
        state."""
        done = asyncio.Event()
        self._readers.add(done)
        try:
            await self._up.wait()
            if self._feed is None:
                return
            async for event in self._feed.follow(after):
                yield event
                ended = event.kind == "state" and event.data["state"] in ENDED
                # otherwise it was resumed since
                if ended and (await self._connected.state())[0] in ENDED:
                    return
        except IndexUnreachable:
            if not self._over:
                raise
        finally:
            done.set()
            self._readers.discard(done)

    async def _emit_restart(self, reason: str) -> None:
        event = WorkerEvent(stage="index", worker="index-0", change="restarted", reason=reason)
        with contextlib.suppress(IndexUnreachable):
            if self._client is not None:
                await self._client.emit(event)

    @property
    def _connected(self) -> Index:
        assert self._client is not None, "the run is executed"
        return self._client


def _joining_command(join: str, token: str, run: str, workers: int) -> str:
    """Return the command by which another machine starts ``workers`` workers of ``run``."""
    variables = {INDEX_VARIABLE: join, **({"ASYNCDOCK_HOST_TOKEN": token} if token else {})}
    assigned = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    several = ["--workers", str(workers)] if workers > 1 else []
    return " ".join([*assigned, "asyncdock host --run", run, *several])


def _reason(error: Exception, out: Path) -> str:
    """Return why the run in ``out`` has failed with ``error``."""
    if isinstance(error, IndexUnwritable):  # the server does not say where its file is
        refused = OSError(errno.ENOSPC, str(error))
        needed = sum(file.stat().st_size for file in (out / INDEX).rglob("*.aof"))
        return f"index: {refusal(out / 'index', needed, refused)}, and resume the run"
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def _hosts(recipe: Recipe, out: Path) -> Hosts | None:
    """Return what places the run's workers on the nodes of a cluster."""
    if recipe.launch.cluster is None:
        return None
    hosts: type[Hosts] = pkgutil.resolve_name(recipe.launch.cluster.hosts)
    return hosts(recipe, out)


def _launcher(recipe: Recipe, out: Path, forks: ForkServer | None) -> Launcher:
    """Return what starts the workers of this machine."""
    if recipe.launch.launcher == "inline":
        return InlineLauncher()
    # vLLM brings processes and threads of its own, and has not been tried in a fork.
    method = SPAWN if recipe.rollout.engine == "vllm" else recipe.launch.start_method
    return ProcessLauncher(out / "logs", method, forks, assign(recipe, on_this_node()))
