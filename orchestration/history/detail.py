"""The newest events that come by the clock, as they were sent: what each worker did and when, some
minutes back.

stage, span ──▶ detail.jsonl ──at 4 MiB──▶ detail.old.jsonl, in place of the one before
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from orchestration.history.lines import event_json, event_of, id_of
from orchestration.history.segments import events_after
from pipeline.data.events import Event, order

# beside metrics.jsonl
DETAIL = "detail.jsonl"
OLD = "detail.old.jsonl"
MOST_BYTES = 4 << 20  # of each of both

log = structlog.get_logger()


class DetailFile:
    """Writer of the detail beside ``path``, a ``metrics.jsonl``.

    What its disk refuses is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(DETAIL)
        self._refused = False
        self.last = max(map(_last_id, files_of(path)), key=order, default="")  # when it was opened
        self._file = self._path.open("ab", buffering=0)
        with contextlib.suppress(OSError):
            if not _ends_whole(self._path):
                self._file.write(b"\n")

    def write(self, event: Event) -> None:
        if order(event.id) <= order(self.last):  # a former process has written it
            return
        line = event_json(event).encode() + b"\n"
        try:
            if self._file.tell() + len(line) > MOST_BYTES:
                self._file.close()
                os.replace(self._path, self._path.with_name(OLD))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(line)
        except OSError as error:
            if not self._refused:
                log.warning("detail of a run is left out", path=str(self._path), reason=str(error))
            self._refused = True

    def close(self) -> None:
        self._file.close()


def files_of(path: Path) -> list[Path]:
    """Return the files of detail beside ``path``, the older one first."""
    return [file for name in (OLD, DETAIL) if (file := path.with_name(name)).is_file()]


def detail_of(path: Path) -> Iterator[Event]:
    """Yield the events of the detail beside ``path``."""
    for file in files_of(path):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
            yield from (event for line in lines if (event := event_of(line)) is not None)


def detail_begins(path: Path) -> str:
    """Return the id with which the detail beside ``path`` begins; "": there is none."""
    for file in files_of(path):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
            return id_of(lines.readline())
    return ""


def detail_after(path: Path, event_id: str, count: int) -> list[Event]:
    """Return the next ``count`` events of the detail beside ``path`` after ``event_id``."""
    events: list[Event] = []
    for file in files_of(path):
        last = order(events[-1].id if events else event_id)
        with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
            events += events_after(lines, last, count - len(events)) if len(events) < count else []
    return events


def with_detail(events: Iterable[Event], detail: Iterable[Event]) -> Iterator[Event]:
    """Yield both in the order of their ids, each once, as precise as it was sent."""
    last = ""
    for event in heapq.merge(detail, events, key=lambda event: order(event.id)):
        if event.id != last:
            yield event
        last = event.id


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _last_id(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (64 << 10)))
        return max((event_id for line in file if (event_id := id_of(line))), key=order, default="")
