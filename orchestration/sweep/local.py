"""Runs of a sweep on this machine, each as ``asyncdock run`` in a process of its own.

    recipes/NAME.json ─▶ asyncdock run --out NAME --json ─▶ events, by a pipe ─▶ report
                         asyncdock resume NAME --json         └ killed ─▶ resumed, from its newest checkpoint

When the sweep's process is killed, the standard input of its runs closes: they stop with a
checkpoint, and the next process of the sweep waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import structlog

from orchestration.checkpoints.recorded import SUMMARY
from orchestration.comparison.results import RunResult, read_run
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.history.lines import event_of
from orchestration.private_files import write_private
from orchestration.processes.environment import importable
from orchestration.recipe.problems import RecipeError
from orchestration.state.lock import LOCK
from orchestration.state.paths import RECIPE
from orchestration.streams import TIED
from orchestration.sweep.checks import recipe_of
from orchestration.sweep.record import LOGS, RECIPES, Sweep, SweepRun
from orchestration.sweep.room import Room, Share
from pipeline.data.events import Event, order
from pipeline.locks import is_held

log = structlog.get_logger()

COMMAND = (sys.executable, "-P", "-m", "asyncdock_command")
MOST_KILLED = 10  # times that a run's process is killed
LOOK_SECONDS = 0.2  # at a lock of another process
LINE_BYTES = 16 << 20  # of one event
STATES = {0: "finished", 130: "stopped"}  # by the command's exit code
KINDS = (b'"state"', b'"step"', b'"evaluation"')  # of events that are reported


class LocalRuns:
    """Executes the runs of ``sweep`` in folders below its own. ``room``: the memory that they
    share."""

    def __init__(self, sweep: Sweep, room: Room | None = None) -> None:
        self._sweep = sweep
        self._room = room or Room()
        self._shares: dict[str, Share] = {}

    def has_room(self, running: Collection[SweepRun], run: SweepRun) -> bool:
        """See :class:`orchestration.sweep.execution.Executor`."""
        return not running or self._room.has(
            [self._share(one) for one in running], self._share(run)
        )

    def _share(self, run: SweepRun) -> Share:
        if run.name not in self._shares:
            try:
                recipe = recipe_of(
                    self._sweep.request.recipe, run.settings, self._sweep.folder, files=False
                )
                self._shares[run.name] = Share.of(recipe)
            except RecipeError:  # it fails when it is executed
                self._shares[run.name] = Share(0)
        return self._shares[run.name]

    async def execute(
        self, run: SweepRun, report: Callable[[Event], None], stop: asyncio.Event
    ) -> tuple[str, str]:
        """See :class:`orchestration.sweep.execution.Executor`."""
        folder = self._sweep.folder_of(run)
        if not await _is_free(folder, stop):
            return "stopped", "another process executes it"
        summary = _summary(folder)
        if summary.get("state") in ("finished", "failed"):
            return summary["state"], summary.get("reason", "")
        code = 0
        for killed in range(MOST_KILLED):
            if killed:
                log.warning(
                    "a run of the sweep was killed; it is resumed", run=run.name, signal=-code
                )
            try:
                arguments = await asyncio.to_thread(self._arguments, run, folder)
            except RecipeError as error:
                return "failed", str(error)
            code = await self._run_command(run, arguments, report, stop)
            if code >= 0:
                state = STATES.get(code, "failed")
                if state != "failed":
                    return state, ""
                summary = _summary(folder)  # of this end, or of one before
                said = summary.get("state") == state and summary.get("reason")
                return state, said or self._last_line(run)
            if stop.is_set():
                return "stopped", f"ended by signal {-code}"
        return "failed", f"ended by signal {-code}, as {MOST_KILLED} times in a row"

    def _arguments(self, run: SweepRun, folder: Path) -> Sequence[str]:
        """Return the command's arguments that go on with ``run``. Raises RecipeError."""
        if (folder / RECIPE).is_file():
            return ["resume", str(folder), "--json"]
        # A kill can have left a folder without a recipe, in which nothing has begun.
        shutil.rmtree(folder, ignore_errors=True)
        recipe = recipe_of(self._sweep.request.recipe, run.settings, self._sweep.folder)
        path = self._sweep.folder / RECIPES / f"{run.name}.json"
        path.parent.mkdir(exist_ok=True)
        write_private(path, recipe.to_json())
        return ["run", str(path), "--out", str(folder), "--json"]

    async def _run_command(
        self,
        run: SweepRun,
        arguments: Sequence[str],
        report: Callable[[Event], None],
        stop: asyncio.Event,
    ) -> int:
        """Run ``asyncdock`` with ``arguments`` to its end, and return its exit code."""
        (self._sweep.folder / LOGS).mkdir(exist_ok=True)
        with self._log_of(run).open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                *arguments,
                stdin=asyncio.subprocess.PIPE,  # closes with this process, however that ends
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_BYTES,
                cwd=self._sweep.request.begun_in,
                env={**importable(os.environ), TIED: "1"},
                start_new_session=True,  # Ctrl-C reaches the sweep, which interrupts it once
            )
        assert process.stdout is not None
        terminating = None
        try:
            async for event in _events(process.stdout, self._sweep.folder_of(run) / METRICS):
                # Before its first event it would end without a word.
                terminating = terminating or asyncio.create_task(_terminate(process, stop))
                report(event)
            return await process.wait()
        finally:
            if terminating is not None:
                terminating.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _log_of(self, run: SweepRun) -> Path:
        return self._sweep.folder / LOGS / f"{run.name}.log"

    def _last_line(self, run: SweepRun) -> str:
        lines = self._log_of(run).read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else "its command has not said why"

    async def result(self, run: SweepRun) -> RunResult:
        """See :class:`orchestration.sweep.execution.Executor`."""
        return await asyncio.to_thread(read_run, self._sweep.folder_of(run))


async def _terminate(process: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
    await stop.wait()
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


async def _events(lines: asyncio.StreamReader, metrics: Path) -> AsyncIterator[Event]:
    """Yield the events of the file ``metrics`` when the first of ``lines`` comes, then those of
    ``lines``, each once."""
    last_id = ""
    async for line in lines:
        event = event_of(line) if any(kind in line for kind in KINDS) else None
        if event is None:
            continue
        if not last_id:
            last_id = "0-0"
            for past in await asyncio.to_thread(list, read_metrics(metrics)):
                last_id = past.id
                yield past
        if order(event.id) > order(last_id):
            yield event


async def _is_free(folder: Path, stop: asyncio.Event) -> bool:
    """Wait until no process executes the run in ``folder``; return False when ``stop`` is set
    first."""
    waits = False
    while folder.is_dir():  # noqa: ASYNC240
        if not is_held(folder / LOCK):
            return True
        if not waits:
            log.info("waiting for a run of the sweep to end", folder=str(folder))
        waits = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_SECONDS)
            return False
    return True


def _summary(folder: Path) -> dict[str, Any]:
    """Return what the run in ``folder`` has summarized at its end; {}: it has not ended."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / SUMMARY).read_bytes()))
    return {}
