"""A worker: one process (or one task of the inline launcher) that runs some stages of a run.

    index: recipe, paths, secret ──▶ dock ──▶ Job.build ──▶ `ready` ──▶ Job.work ──▶ Job.finish ──▶ `stopped` ──▶ Job.close
    beside `work`: the run's state is watched, for pause, resume and stop

A worker needs the run's id and the index's URL, and nothing else. ``orchestration.recipe.worker_kinds`` lists
the kinds of workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pkgutil
import platform
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import structlog

from orchestration.checkpoints import checkpoint
from orchestration.logs import Current, configure
from orchestration.private_files import keep_from_others
from orchestration.processes.environment import take
from orchestration.recipe.flow import flow_of
from orchestration.recipe.sizes.planner import slab_bytes
from orchestration.recipe.worker_kinds import kind_of
from orchestration.state.documents import (
    DECLARED,
    ENDING,
    LEAVE,
    RUN_PATHS,
    RUN_RECIPE,
    Ending,
    EndKind,
)
from orchestration.state.paths import LOCAL, RunPaths
from orchestration.streams import open_outputs
from orchestration.workers.job import Job
from pipeline.data.events import WorkerEvent, by_count
from pipeline.documents.flow import SECRET, STATE
from pipeline.first_of import cancel_all
from pipeline.index.client import INDEX_VARIABLE, Index
from pipeline.index.errors import IndexRefused, IndexUnreachable, TooManyDropped
from pipeline.problems import Fatal, Passing, ProblemError
from pipeline.warehouse.dock import Dock
from stages.flow.catalogue import EMPTY
from stages.training.advantage import ABSENT, DROPPED, ENVIRONMENT_FAILED
from stages.training.update import SamplesGone

log = structlog.get_logger()

STATE_SECONDS = 10.0  # a wait for another state of the run is renewed this often


class CannotStart(Fatal, RuntimeError):
    """The worker's parts cannot be made, or cannot do their first work, and another attempt would
    fail in the same way. The message is the cause's."""


class NotStarted(RuntimeError):
    """The worker's parts could not be made, or could not do their first work, for a cause that may
    pass. The message is the cause's."""


# Python's own errors do not declare what they are. Those of reading a model, a config, a file or
# options: the same at each attempt.
LASTING = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NotImplementedError,
    ImportError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    OSError,
)
# Of these, the errors caused by another process that is about to come back.
PASSING = (Passing, ConnectionError, TimeoutError, BlockingIOError, InterruptedError)
# A restart would not help: training is replayed with the same rows and weights, and gives the same
# loss.
FATAL = (Fatal, FloatingPointError, NotImplementedError)

# What to change when a run loses too many groups, by the reason of most of them.
FIXES = {
    DROPPED: "raise rollout.max_tokens, or set rollout.truncated = 'mask' or 'train'",
    ABSENT: "let a reward function return a number for these responses",
    ENVIRONMENT_FAILED: "correct the environment (logs/ have each failure), or set "
    "environment.on_error = 'zero'",
    EMPTY: "look at prompts.responses: no token of them is trained",
}
REWARD_FAILED = "reward "  # how the reason of a group begins on which a reward function failed
FIX_REWARD = "correct the function (logs/ have each failure), or set reward.on_error = 'zero'"
FIX_OTHER = "correct what drops them: a stage of the recipe, or the algorithm's credit"


class Worker:
    """The worker ``kind``-``number`` of a run. ``name`` is another one after each restart."""

    def __init__(self, run: str, url: str, kind: str, number: int, name: str) -> None:
        self.index = Index(url, run)
        self.kind = kind
        self.number = number
        self.name = name
        self._job: Job | None = None
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Work until the run's work is done or the run stops.

        Raises what went wrong, after putting it into the index.
        """
        version = Current(lambda: None if self._job is None else self._job.version())
        structlog.contextvars.bind_contextvars(
            run=self.index.run, stage=self.kind, worker=self.name, version=version
        )
        dock = None
        beating = None
        try:
            recipe = await RUN_RECIPE.get(self.index)
            run_paths = await RUN_PATHS.get(self.index)
            if recipe is None or run_paths is None:
                raise RuntimeError(
                    f"run {self.index.run!r} is not in this index; give the id and the URL of one "
                    f"that is"
                )
            if recipe.launch.launcher != "inline":  # this process is the worker's own
                keep_from_others(recipe.launch.readers)
                # The modules of its own stages are imported in their own processes alone.
                if recipe.stages and (declared := await DECLARED.get(self.index)):
                    recipe = recipe.with_declared(declared)
            beating = asyncio.create_task(self._beat(recipe.launch.beat_seconds))
            paths, warehouse = run_paths.at_host()
            secret = await SECRET.get(self.index) or b""
            dock = Dock(
                self.index,
                flow_of(recipe).schema,
                worker=self.name,
                directory=paths.shared,
                warehouse=warehouse,
                lease=recipe.pipeline.lease_seconds,
                slab=slab_bytes(recipe),
                secret=secret,
                tls=recipe.pipeline.tls_contexts(),
            )
            if warehouse == LOCAL:
                await dock.join(recipe.pipeline.arena)
            else:  # the host's, which it serves: one that was lost does not come back without it
                await dock.enter()
            job_type: type[Job] = pkgutil.resolve_name(kind_of(self.kind).job)
            self._job = job = job_type(
                recipe, paths, self.index, dock, secret, self.kind, self.number
            )
            await self._build(job, paths)
            self._ready.set()
            await self._emit("ready")
            log.info("ready")
            try:
                await self._work(job)
            except Exception as error:
                await self._refuse_first_work(_first(error), paths)
                raise
            await self._emit("stopped")
        except BaseException as error:
            first = _first(error)
            if not isinstance(first, asyncio.CancelledError):
                log.error(
                    "worker failed",
                    error=repr(first),
                    trace="".join(traceback.format_exception(first)),
                )
                await ENDING.put_once(self.index, ending_of(first), name=self.name)
                raise first from first.__cause__
            raise
        finally:
            if self._job is not None:
                await self._job.close()
            if dock is not None:
                await dock.close()
            await cancel_all(beating)
            await self.index.close()

    async def _beat(self, seconds: float) -> None:
        """Give a sign of life every ``seconds``, and one when the worker is ready, until
        cancelled."""
        while True:
            job = self._job
            stages = (
                [controller.stage.name for controller in job.controllers] if job is not None else []
            )
            version = job.version() if job is not None else None
            ready = self._ready.is_set()
            with contextlib.suppress(IndexUnreachable):
                await self.index.beat(self.name, stages, version, ready=ready)
            if ready:
                await asyncio.sleep(seconds)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ready.wait(), seconds)

    async def _build(self, job: Job, paths: RunPaths) -> None:
        """Build the job. Raises CannotStart for an error that would come again.

        That is known only while the run starts: later, other processes may have changed what the
        worker reads, and a worker of an elastic kind may be on a node that lacks it.
        """
        try:
            await job.build()
        except FATAL as error:
            if not kind_of(self.kind).elastic or (await self.index.state())[0] in (
                "created",
                "starting",
            ):
                raise
            raise NotStarted(_in_words(error)) from error
        except Exception as error:
            first = _first(error)
            in_shared_memory = str(getattr(first, "filename", "") or "").startswith(
                str(paths.shared)
            )
            # other workers make and remove files there
            if isinstance(first, PASSING) or in_shared_memory:
                raise
            starting = (await self.index.state())[0] in ("created", "starting")
            refused = CannotStart if starting and isinstance(first, LASTING) else NotStarted
            raise refused(_in_words(first)) from first

    async def _refuse_first_work(self, error: BaseException, paths: RunPaths) -> None:
        """Raise CannotStart or NotStarted for an ``error`` before the run has trained a step: what
        an engine cannot compute then is its model, not a batch. Returns for errors of other
        processes, and for those that are fatal already."""
        causes = _causes(error)
        if any(isinstance(each, (*FATAL, *PASSING, IndexRefused)) for each in causes):
            return
        began = (
            checkpoint.open_checkpoint(paths.start).version
            if paths.start and paths.start.is_dir()
            else 0
        )
        with contextlib.suppress(IndexUnreachable):
            if (await self.index.status()).trained <= began:
                lasting = isinstance(causes[-1], LASTING) and not isinstance(
                    causes[-1], OSError | MemoryError
                )
                raise (CannotStart if lasting else NotStarted)(_in_words(error)) from error

    async def _emit(self, change: str) -> None:
        worker = f"{self.kind}-{self.number}"
        place: dict[str, Any] = (
            {"node": platform.node(), "host": RunPaths.host_name()} if change == "ready" else {}
        )
        await self.index.emit(
            WorkerEvent(stage=self.kind, worker=worker, name=self.name, change=change, **place)
        )

    async def _work(self, job: Job) -> None:
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(self._watch(job))]
            if kind_of(self.kind).elastic:
                watching.append(tasks.create_task(self._leave(job)))
            await job.work()
            await job.finish()
            for task in watching:
                task.cancel()

    async def _leave(self, job: Job) -> None:
        await LEAVE.wait(self.index, STATE_SECONDS, name=self.name)
        log.info("leaves")
        await job.leave()

    async def _watch(self, job: Job) -> None:
        """Pass the run's state on to ``job``, until the run stops."""
        while True:
            state, _, after = await self.index.state()
            await job.set_paused(state == "paused")
            if state in ("stopping", "stopped", "failed", "finished"):
                await job.stop()
                return
            await self.index.wait(STATE, after, STATE_SECONDS)


def _first(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups that is not a cancellation."""
    while isinstance(error, BaseExceptionGroup):
        error = next(
            (e for e in error.exceptions if not isinstance(e, asyncio.CancelledError)),
            error.exceptions[0],
        )
    return error


def _causes(error: BaseException) -> list[BaseException]:
    """Return ``error``, its cause, the cause of that, and so on."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes


def _dropped_in_words(error: TooManyDropped) -> str:
    """Return ``error`` with the recipe's key that bounds it, and a fix of the most frequent
    reason."""
    reason = by_count(error.reasons)[0][0] if error.reasons else ""
    fallback = FIX_REWARD if reason.startswith(REWARD_FAILED) else FIX_OTHER
    return f"{error} (algorithm.max_dropped); {FIXES.get(reason, fallback)}"


def _in_words(error: BaseException) -> str:
    if isinstance(error, TooManyDropped):
        return _dropped_in_words(error)
    return (
        str(error)
        if isinstance(error, CannotStart | NotStarted)
        else f"{type(error).__name__}: {error}"
    )


def ending_of(error: BaseException) -> Ending:
    """Return why a worker that fails with ``error`` ends, without its exit code."""
    fault = []
    for cause in _causes(error):
        fault.append(type(cause).__qualname__)
        if isinstance(cause, ProblemError):
            fault += [problem.key for problem in cause.problems]
    for frame in traceback.extract_tb(cause.__traceback__, limit=-1):
        fault.append(f"{frame.filename}:{frame.lineno}")
    return Ending(reason=_in_words(error), fault=tuple(fault))


def exit_code(error: BaseException | None) -> EndKind:
    """Return the exit code of a worker that ended with ``error``."""
    if error is None:
        return EndKind.DONE
    if isinstance(error, FATAL):
        return EndKind.FATAL
    if isinstance(error, SamplesGone):
        return EndKind.REWIND
    return EndKind.NOT_STARTED if isinstance(error, NotStarted) else EndKind.FAILED


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=f"One worker of a run; started by the run's launcher, with the index's URL in "
        f"{INDEX_VARIABLE}."
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--name", required=True)
    options = parser.parse_args(arguments)
    open_outputs()
    configure(terminal=False)
    # For rewards, algorithms and engines given as module:name; last in the path, so that they
    # shadow nothing.
    sys.path.append(os.getcwd())
    url = take(INDEX_VARIABLE)  # code of a user's runs here
    try:
        asyncio.run(Worker(options.run, url, options.kind, options.number, options.name).run())
    except Exception as error:
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
