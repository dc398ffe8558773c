"""The runs in folders of this machine, for a server that shows them and changes none.

FOLDER ─▶ recipe.json ─▶ its command goes on? ─yes─▶ the index of that command
                                               └no──▶ files; while it is looked at, a server on a copy of its index
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from orchestration.checkpoints.recorded import SUMMARY
from orchestration.history.events_file import METRICS, newest_event
from orchestration.recipe.loading.paths import name_of
from orchestration.run.folder import BEGUN_IN
from orchestration.state.live import live_index
from orchestration.state.paths import INDEX, RECIPE
from orchestration.state.registry import Ask, Page, ReadOnly, Registry, RunRecord, UnknownRun
from pipeline.data.events import ENDED, StepEvent
from pipeline.index.calls import key_prefix
from pipeline.index.client import Index, Link
from pipeline.index.embedded import EmbeddedIndex

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
    """The runs in ``folders``: each is a run's folder, or one with such folders in it, or in those.
    A run's id is the name of its folder. ``url``: an index for what the server itself keeps;
    ``copies``: a folder for copies of indexes."""

    def __init__(self, url: str, folders: Sequence[Path], copies: Path, **options: Any) -> None:
        super().__init__(url, **options)
        self._folders = folders
        self._copies = copies
        self._opened = OrderedDict[str, _Opened]()
        self._opening = asyncio.Lock()
        self._known = dict[Path, tuple[float, RunRecord]]()  # of ended runs, by their files' time

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
        folder = (await asyncio.to_thread(self._by_id)).get(run)
        if folder is None:
            raise UnknownRun(run)
        async with self._opening:
            record = await self._record(run, folder)
            if run not in self._opened and record.ended is not None:
                await self._open_copy(run, folder)
        return await asyncio.to_thread(_with_step, record)

    async def list(
        self, *, state: str = "", name: str = "", owner: str = "", after: str = "", limit: int = 50
    ) -> Page:
        """Return runs, newest first, and the cursor of the next page ("": there is none)."""
        records = await self._all()
        wanted = [
            record
            for record in sorted(records, key=lambda record: record.created, reverse=True)
            if state in ("", record.state)
            and name.lower() in record.id.lower() + record.name.lower()
            and owner in ("", record.owner)
        ]
        begin = int(after or 0)
        end = begin + limit
        page = [await asyncio.to_thread(_with_step, record) for record in wanted[begin:end]]
        return page, str(end) if end < len(wanted) else ""

    async def counts(self) -> dict[str, int]:
        """Return the number of ended runs by state."""
        records = await self._all()
        states = [record.state for record in records]
        return {"created": 0} | {state: states.count(state) for state in ENDED}

    async def ask(self, run: str, what: Ask) -> NoReturn:
        """Raise ReadOnly."""
        raise ReadOnly(run, what)

    async def reopen(self, record: RunRecord, _: Any) -> NoReturn:
        """Raise ReadOnly."""
        raise ReadOnly(record.id, "resume")

    async def delete(self, run: str) -> NoReturn:
        """Raise ReadOnly."""
        raise ReadOnly(run, "delete")

    async def _all(self) -> Sequence[RunRecord]:
        folders = await asyncio.to_thread(self._by_id)
        async with self._opening:
            return [await self._record(run, folder) for run, folder in folders.items()]

    def _by_id(self) -> dict[str, Path]:
        """Return the runs' folders by their ids."""
        ids = dict[str, Path]()
        for folder in dict.fromkeys(found for each in self._folders for found in runs_in(each)):
            run = name_of(folder.name)
            if run in ids:  # two folders of one name
                run = f"{run}-{uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).hex[:4]}"
            ids[run] = folder
        return ids

    async def _record(self, run: str, folder: Path) -> RunRecord:
        where = await asyncio.to_thread(live_index, folder)
        if where is None:
            await self._close_live(run)
            return await asyncio.to_thread(self._ended, run, folder)
        if run not in self._opened or self._opened[run].run != where["run"]:
            await self._close(run)
            self._opened[run] = _Opened(
                Link(where["index"], timeout=self.link.timeout), where["run"]
            )
        state, reason, _ = await self.index(run).state()
        return replace(_begun(run, folder), state=state or "starting", reason=reason)

    def _ended(self, run: str, folder: Path) -> RunRecord:
        files = [folder / name for name in (SUMMARY, METRICS, RECIPE)]
        changed = max(path.stat().st_mtime for path in files if path.exists())
        known = self._known.get(folder)
        if known is None or known[0] != changed or known[1].id != run:
            known = self._known[folder] = changed, _ended(run, folder, changed)
        return known[1]

    async def _close_live(self, run: str) -> None:
        if run in self._opened and self._opened[run].server is None:
            await self._close(run)

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


def runs_in(folder: Path) -> Iterator[Path]:
    """Yield the run that ``folder`` is, or those in it."""
    if (folder / RECIPE).is_file():
        yield folder.resolve()
        return
    for pattern in (f"*/{RECIPE}", f"*/*/{RECIPE}"):
        for recipe in sorted(folder.glob(pattern)):
            yield recipe.parent.resolve()


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
    )


def _ended(run: str, folder: Path, changed: float) -> RunRecord:
    summary: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((folder / SUMMARY).read_bytes())
    return replace(
        _begun(run, folder),
        state=summary.get("state", "failed"),
        reason=summary.get("reason", BROKEN_OFF.format(folder)),
        ended=changed,
    )


def _with_step(record: RunRecord) -> RunRecord:
    """Return ``record``, with its newest step where it has ended."""
    if record.ended is None:
        return record
    event = newest_event(Path(record.folder) / METRICS, "step")
    return replace(record, step=None if event is None else StepEvent.of(event.data))
