"""The runs in folders of this machine, for a server that shows them and changes none.

FOLDER ─▶ recipe.json ─▶ its command goes on? ─yes─▶ the index of that command
                                               └no──▶ files; while it is looked at, a server on a copy of its index
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from orchestration.checkpoints.recorded import SUMMARY
from orchestration.history.events_file import METRICS, newest_events, read_metrics
from orchestration.history.totals import RunTotals
from orchestration.run.folder import BEGUN_IN
from orchestration.service.run_folders import RunFolders, has_settled
from orchestration.state.labels import Labels, read_labels
from orchestration.state.live import live_index
from orchestration.state.paths import INDEX, RECIPE, WHERE
from orchestration.state.registry import Ask, Page, ReadOnly, Registry, RunRecord, UnknownRun
from pipeline.data.events import ENDED, StepEvent
from pipeline.index.calls import key_prefix
from pipeline.index.client import Index, Link
from pipeline.index.embedded import EmbeddedIndex

LOOK_SECONDS = 1.0  # between two looks at the folders
MOST_OPEN = 8  # indexes of runs that have ended
BROKEN_OFF = "its command has ended before the run; `asyncdock resume {}` goes on with it"


@dataclass
class _Opened:
    """The index of a run: ``run`` is its id there, ``server`` that of a copy."""

    link: Link
    run: str
    server: EmbeddedIndex | None = None

    async def close(self) -> None:
        await self.link.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)
            shutil.rmtree(self.server.directory, ignore_errors=True)


class FolderRuns(Registry):
    """The runs in ``folders``, as :class:`RunFolders` lists them. ``url``: an index for what the
    server itself keeps; ``copies``: a folder for copies of indexes."""

    def __init__(self, url: str, folders: Sequence[Path], copies: Path, **options: Any) -> None:
        super().__init__(url, **options)
        self._folders = RunFolders(folders)
        self._copies = copies
        self._opened = OrderedDict[str, _Opened]()
        self._opening = asyncio.Lock()
        self._known = dict[Path, tuple[int, RunRecord]]()  # by when the folders had changed
        self._present = dict[str, RunRecord]()
        self._looked = -math.inf  # on the monotonic clock

    async def close(self) -> None:
        for opened in self._opened.values():
            await opened.close()
        await super().close()

    def index(self, run: str) -> Index:
        """Return the index of ``run``: without anything, until :meth:`get` was asked for it."""
        opened = self._opened.get(run)
        return Index(self.link, run) if opened is None else Index(opened.link, opened.run)

    async def get(self, run: str) -> RunRecord:
        """Return the record of ``run``. Raises UnknownRun."""
        record = next((each for each in await self.everything() if each.id == run), None)
        if record is None:
            raise UnknownRun(run)
        async with self._opening:
            if run not in self._opened and record.ended is not None:
                await self._open_copy(run, Path(record.folder))
        return await asyncio.to_thread(_with_step, record)

    async def list(
        self, *, state: str = "", name: str = "", owner: str = "", after: str = "", limit: int = 50
    ) -> Page:
        """Return runs, newest first, and the cursor of the next page ("": there is none)."""
        wanted = [
            record
            for record in await self.everything()
            if state in ("", record.state)
            and name.lower() in record.id.lower() + record.name.lower()
            and owner in ("", record.owner)
        ]
        begin = int(after or 0)
        end = begin + limit
        page = await asyncio.to_thread(lambda: [*map(_with_step, wanted[begin:end])])
        return page, str(end) if end < len(wanted) else ""

    async def counts(self) -> dict[str, int]:
        """Return the number of ended runs by state."""
        states = [record.state for record in await self.everything()]
        return {"created": 0} | {state: states.count(state) for state in ENDED}

    async def ask(self, run: str, what: Ask) -> NoReturn:
        """Raise ReadOnly."""
        raise ReadOnly(run, what)

    async def label(self, run: str, _: Labels) -> NoReturn:
        """Raise ReadOnly."""
        raise ReadOnly(run, "label")

    async def reopen(self, record: RunRecord, _: Any) -> NoReturn:
        """Raise ReadOnly."""
        raise ReadOnly(record.id, "resume")

    async def delete(self, run: str) -> NoReturn:
        """Raise ReadOnly."""
        raise ReadOnly(run, "delete")

    async def everything(self) -> Sequence[RunRecord]:
        """Return all runs, newest first: ended ones as they were within the last second."""
        async with self._opening:
            if time.monotonic() - self._looked > LOOK_SECONDS:
                self._present = await asyncio.to_thread(self._look)
                self._looked = time.monotonic()
            records = [await self._record(record) for record in self._present.values()]
        return sorted(records, key=lambda record: record.created, reverse=True)

    def look_again(self) -> None:
        """Have the next question look at the folders."""
        self._looked = -math.inf

    def _look(self) -> dict[str, RunRecord]:
        """Return the records of all runs by their ids; of one that may go on, without its state.

        A folder changes when a command begins or ends in it.
        """
        known = self._known
        self._known = {}
        records = dict[str, RunRecord]()
        for run, folder in self._folders.by_id().items():
            with contextlib.suppress(OSError, ValueError):  # removed, or no recipe
                changed = folder.stat().st_mtime_ns
                stamp, record = known.get(folder, (0, None))
                if record is None or stamp != changed or record.id != run:
                    is_live = live_index(folder) is not None
                    record = _live(run, folder) if is_live else _ended(run, folder)
                if has_settled(changed):
                    self._known[folder] = changed, record
                records[run] = record
        return records

    async def _record(self, record: RunRecord) -> RunRecord:
        """Return ``record``, of a run that may go on as it is now."""
        run = record.id
        folder = Path(record.folder)
        has_ended = record.ended is not None
        where = None if has_ended else await asyncio.to_thread(live_index, folder)
        if where is None:
            if run in self._opened and self._opened[run].server is None:
                await self._close(run)
            return record if has_ended else await asyncio.to_thread(_ended, run, folder)
        if run not in self._opened or self._opened[run].run != where["run"]:
            await self._close(run)
            self._opened[run] = _Opened(
                Link(where["index"], timeout=self.link.timeout), where["run"]
            )
        state, reason, _ = await self.index(run).state()
        return replace(record, state=state or "starting", reason=reason)

    async def _close(self, run: str) -> None:
        if (opened := self._opened.pop(run, None)) is not None:
            await opened.close()

    async def _open_copy(self, run: str, folder: Path) -> None:
        """Open the index of the ended ``run`` on a copy of its file, where there is one."""
        if not (folder / INDEX / "appendonlydir").is_dir():
            return
        copies = [name for name, opened in self._opened.items() if opened.server is not None]
        for oldest in copies[: 1 - MOST_OPEN]:
            await self._close(oldest)
        target = self._copies / uuid.uuid4().hex[:8]
        appended = target / "appendonlydir"
        await asyncio.to_thread(shutil.copytree, folder / INDEX / "appendonlydir", appended)
        server = EmbeddedIndex(target)
        await asyncio.to_thread(server.start)
        link = Link(server.url, timeout=self.link.timeout)
        before, after = f"{key_prefix('*')}state".split("*")
        keys = link.redis.scan_iter(match=f"{before}*{after}", count=1000)
        runs = [key.decode().removeprefix(before).removesuffix(after) async for key in keys]
        newest = [(await Index(link, each).event_ends(), each) for each in runs]
        self._opened[run] = _Opened(link, max(newest)[1] if newest else run, server)


def _begun(run: str, folder: Path) -> RunRecord:
    recipe = json.loads((folder / RECIPE).read_bytes())
    began = folder / BEGUN_IN
    created = (began if began.exists() else folder / RECIPE).stat().st_mtime
    return RunRecord(
        id=run,
        name=str(recipe.get("name", run)),
        state="",
        reason="",
        position=None,
        owner="",
        created=created,
        started=created,
        ended=None,
        agent="",
        attempts=1,
        folder=str(folder),
        recipe=recipe,
        labels=read_labels(folder),
    )


def _live(run: str, folder: Path) -> RunRecord:
    """Return the record of a run that a live command executes. The command writes WHERE when it
    begins or resumes the run."""
    record = _begun(run, folder)
    with contextlib.suppress(OSError):
        started = (folder / WHERE).stat().st_mtime
        return replace(record, started=started, former_seconds=_seconds_before(folder, started))
    return record


def _ended(run: str, folder: Path) -> RunRecord:
    record = _begun(run, folder)
    summary: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((folder / SUMMARY).read_bytes())
    with contextlib.suppress(OSError):
        newest = newest_events(folder / METRICS, {"state"}).get("state")
        if newest and (summary.get("ended") or 0.0) < newest.time:
            # the summary is of a command before, where the newest one could not write its own
            totals = _totals(folder)
            times = {"started": totals.began, "ended": totals.now, "seconds": totals.elapsed}
            summary = times | (dict(newest.data) if newest.data["state"] in ENDED else {})
    files = [folder / name for name in (SUMMARY, METRICS, RECIPE)]
    started = summary.get("started") or record.created
    ended = summary.get("ended") or max(path.stat().st_mtime for path in files if path.exists())
    return replace(
        record,
        state=summary.get("state", "failed"),
        reason=summary.get("reason", BROKEN_OFF.format(folder)),
        started=started,
        ended=ended,
        former_seconds=summary.get("seconds", ended - started) - (ended - started),
    )


@lru_cache(maxsize=1024)
def _seconds_before(folder: Path, until: float) -> float:
    """Return how long the run has run before the Unix time ``until``. Its events before that do not
    change, and may be many."""
    return _totals(folder, until).elapsed


def _totals(folder: Path, until: float = math.inf) -> RunTotals:
    """Return the totals of the run's events before the Unix time ``until``."""
    totals = RunTotals()
    for event in read_metrics(folder / METRICS):
        if event.time >= until:
            break
        totals.apply(event)
    return totals


def _with_step(record: RunRecord) -> RunRecord:
    """Return ``record``, with its newest step where it has ended."""
    if record.ended is None:
        return record
    step = newest_events(Path(record.folder) / METRICS, {"step"}).get("step")
    return replace(record, step=StepEvent.of(step.data) if step else None)
