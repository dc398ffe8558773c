"""``metrics.jsonl``: the file of a run's events, one JSON object a line, in parts that are closed
and compressed.

    event ─▶ Kept ─▶ metrics.jsonl (open) ──4 MiB──▶ metrics/000007.jsonl ─▶ 000007.jsonl.gz ─▶ catalog.sqlite
               └ stage, span ─▶ detail.jsonl, some minutes      └───── a thread of this process ──────┘

A process that is killed between two of these leaves a state that the next one goes on from; no
event is lost or doubled.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Collection, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import structlog

from orchestration.disk import refusal, replacing
from orchestration.history.detail import DetailFile, detail_of, with_detail
from orchestration.history.facts import Facts, made_after
from orchestration.history.kept import LIVE, Kept
from orchestration.history.lines import event_of, id_of, line_of
from orchestration.history.segments import (
    SEGMENT_BYTES,
    Segment,
    close_part,
    closed,
    compress,
    lines_of,
    write,
)
from pipeline.data.events import Event, order

METRICS = "metrics.jsonl"  # in the run's folder
MOST_KEPT = 64 << 20  # bytes of events that wait in memory for room on the disk
MOST_TORN = 5  # torn lines that are named
TAIL_BYTES = 1 << 20  # at the end of a file, in which a whole line is looked for

log = structlog.get_logger()


class MetricsFile:
    """Writer of the events that :class:`Kept` chooses as JSON lines; numbers that are not finite
    become null. An existing file is continued after its last whole line; ``last`` is the greatest
    id of an event in it ("0": no event), and ``after`` the one after which its run's events are to
    be given again: those that wait to be kept were lost with a former process. An event that the
    run was rewound removes the events of what is made again."""

    def __init__(self, path: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.path = path
        self._segment_bytes = segment_bytes
        self.refused = ""  # why, in words
        self._waiting = b""  # lines that the disk has not taken yet
        self._closing: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._kept = Kept()
        self._facts = Facts()
        segments = closed(path)
        _cut(path)
        if path.stat().st_size >= segment_bytes:
            segments.append(close_part(path))
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = 0
        for event in self._read_open():
            self._kept.recall(event)
        before = next(
            (last_id for part in reversed(segments) if (last_id := _last_id(part)) != "0"), "0"
        )
        self._detail = DetailFile(path)
        written = max(self._facts.last_id, before, key=order)
        self.last = max(written, self._detail.last, key=order) or "0"
        # events up to it were given to a former process
        self._former = written if written != "0" else ""
        self._kept.seen = written
        milliseconds, _ = order(written)
        self.after = (
            f"{max(0, milliseconds - int(1000 * self._kept.seconds))}-0"
            if milliseconds > 0
            else "0"
        )
        if segments:
            self._tidy_soon()

    def _read_open(self) -> Iterator[Event]:
        """Yield the events of the open part, of which it takes note."""
        self._facts = Facts()
        with self.path.open("rb") as lines:
            for line in lines:
                if (event := self._facts.line(line)) is not None:
                    yield event
        self._size = self._facts.size

    def rewind(self, version: int) -> int:
        """Remove steps, evaluations, publications and checkpoints after policy ``version``; a run
        that is resumed from there makes them again. Torn lines stay. Returns the newest evaluated
        version of those that stay; -1: none. Raises OSError with the room that it needs."""
        self._settle()
        self._kept.rewind(version)
        for segment in self._made_since(version):
            _remove_after(segment, version)
        if self._facts.made > version:
            _rewrite(self.path, version)
            self._file.close()
            self._file = self.path.open("ab", buffering=0)
            for _ in self._read_open():
                pass
        return max(
            self._facts.evaluated, *(facts.evaluated for facts in facts_of(self.path).values()), -1
        )

    def _made_since(self, version: int) -> list[Segment]:
        """Return the closed parts that hold steps after ``version``, the newest first: what a kill
        leaves has no gap."""
        numbers = {
            number for (number, _), facts in facts_of(self.path).items() if facts.made > version
        }
        return [segment for segment in reversed(closed(self.path)) if segment.number in numbers]

    def event(self, event: Event) -> None:
        """Add ``event``. Raises OSError when the disk has refused :data:`MOST_KEPT` bytes of
        events."""
        if order(event.id) <= order(self._former):
            self._kept.again(event)
            return
        if event.kind == "worker" and event.data["change"] == "rewound" and "version" in event.data:
            self.rewind(event.data["version"])
        if event.kind in LIVE:
            self._detail.write(event)
        for kept_event in self._kept.of(event):
            self._add(kept_event)
        self.last = max(self.last, self._kept.seen, key=order)
        self._write()
        if len(self._waiting) > MOST_KEPT:
            raise OSError(errno.ENOSPC, self.refused)
        if self._size >= self._segment_bytes and not self._waiting:
            self._close_part()

    def _add(self, event: Event) -> None:
        self._facts.add(event)
        self._waiting += line_of(event)

    def _write(self) -> None:
        """Write the lines that wait, all of them or none."""
        if not self._waiting:
            return
        file = self._file.fileno()
        written = 0
        size = os.fstat(file).st_size
        try:
            while written < len(self._waiting):
                written += os.write(file, self._waiting[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            was_refused = self.refused
            self.refused = refusal(self.path, len(self._waiting), error)
            if not was_refused:
                log.warning(
                    "events are kept in memory until their disk takes them", reason=self.refused
                )
            return
        if self.refused:
            log.warning("the disk takes events again; none is lost", path=str(self.path))
        self._size = size + written
        self._waiting = b""
        self.refused = ""

    def _close_part(self) -> None:
        """Begin a new open part. Where the disk refuses that, the present one goes on."""
        self._file.close()
        try:
            close_part(self.path)
        except OSError as error:
            log.warning(
                "a part of a run's events stays open", path=str(self.path), reason=str(error)
            )
            self._file = self.path.open("ab", buffering=0)
            self._segment_bytes += SEGMENT_BYTES
            return
        self._file = self.path.open("ab", buffering=0)
        self._size = 0
        self._facts = Facts()
        self._tidy_soon()

    def _tidy_soon(self) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "metrics")
        self._closing = self._thread.submit(tidy, self.path)

    def _settle(self) -> None:
        """Wait until the parts that are closed are compressed and read."""
        if self._closing is not None:
            self._closing.result()

    def __enter__(self) -> MetricsFile:
        return self

    def close(self) -> str:
        """Write what waits, and what the disk has refused so far.

        Returns why events are lost, "" where none is.
        """
        for event in self._kept.rest():
            self._add(event)
        self._write()
        self._file.close()
        self._detail.close()
        if self._thread is not None:
            self._thread.shutdown()
        return self.refused and f"events of the run are lost: {self.refused}"

    def __exit__(self, *_: object) -> None:
        if not self._file.closed and (lost := self.close()):
            log.error(lost)


def tidy(path: Path) -> None:
    """Compress the closed parts of ``path`` and read what is new in them.

    What the disk refuses is done another time.
    """
    try:
        for segment in closed(path):
            compress(segment)
            if segment.compressed:  # a kill came between its replacement and the removal
                segment.path.with_suffix("").unlink(missing_ok=True)
        facts_of(path)
    except OSError as error:
        log.warning(
            "closed parts of a run's events are not compressed", path=str(path), reason=str(error)
        )


def _cut(path: Path) -> None:
    """Remove what a kill has left after the last whole line of ``path``, which is made where there
    is none."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - TAIL_BYTES)
        file.seek(begin)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(begin + tail.rfind(b"\n") + 1)


def _last_id(segment: Segment) -> str:
    """Return the greatest id in the end of a closed part; "0": none."""
    with segment.open() as lines:
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - TAIL_BYTES))
        return max(
            (event_id for line in lines if (event_id := id_of(line))), key=order, default="0"
        )


def _remove_after(segment: Segment, version: int) -> None:
    if not segment.compressed:
        _rewrite(segment.path, version)
        return
    with segment.open() as lines:
        content = b"".join(line for line in lines if _stays(line, version))
    write(segment.path, content, segment.path)


def _rewrite(path: Path, version: int) -> None:
    size = path.stat().st_size
    with path.open("rb") as lines, replacing(path, size) as partial:
        with partial.open("wb") as file:
            file.writelines(line for line in lines if _stays(line, version))
        shutil.copymode(path, partial)


def _stays(line: bytes, version: int) -> bool:
    event = event_of(line)
    return event is None or not made_after(version, event)


def read_metrics(path: Path, last_bytes: int = 0, *, detail: bool = False) -> Iterator[Event]:
    """Return the events of ``path`` and of its closed parts, or those in their last bytes. Torn
    lines are left out, and logged.

    ``detail``: with the stage and span events of the last minutes, as they were sent.
    """
    events = _events(path, last_bytes)
    return with_detail(events, detail_of(path)) if detail else events


def _events(path: Path, last_bytes: int) -> Iterator[Event]:
    torn = dict[Path, list[int]]()
    for file, number, line in lines_of(path, last_bytes):
        if (event := event_of(line)) is not None:
            yield event
        elif line.endswith(b"\n"):
            torn.setdefault(file, []).append(number)
    for file, numbers in torn.items():
        _say_torn(file, tuple(numbers[:MOST_TORN]), len(numbers))


@functools.cache
def _say_torn(path: Path, numbers: Sequence[int], count: int) -> None:
    """Log once in this process that lines of ``path``, counted from where it was read on, are left
    out."""
    where = {"path": str(path), "lines": list(numbers), "count": count}
    log.warning("torn lines are left out, with their events; remove them from the file", **where)


def newest_id(path: Path) -> str:
    """Return the greatest id of an event in ``path`` and its closed parts; "0": none."""
    newest = max(
        (id_of(line) for file, _, line in lines_of(path, TAIL_BYTES)), key=order, default=""
    )
    return newest or "0"


def newest_events(path: Path, kinds: Set[str]) -> dict[str, Event]:
    """Return the newest event of each of ``kinds`` that the end of ``path`` has."""
    newest = dict[str, Event]()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for tail in (TAIL_BYTES // 16, TAIL_BYTES):
            missing = kinds - newest.keys()
            if missing:
                file.seek(max(0, size - tail))
                newest |= dict(_newest_in(file.read(), missing))
            if tail >= size:
                break
    return newest


def _newest_in(lines: bytes, kinds: Collection[str]) -> Iterator[tuple[str, Event]]:
    """Yield the last event of each of ``kinds`` that ``lines`` has, with its kind."""
    for kind in kinds:
        marks = [f'"kind":{blank}"{kind}"'.encode() for blank in ("", " ")]
        end = len(lines)
        while (at := max(lines.rfind(mark, 0, end) for mark in marks)) >= 0:
            begin = lines.rfind(b"\n", 0, at) + 1
            event = event_of(lines[begin : lines.find(b"\n", at) + 1])
            if event is not None and event.kind == kind:
                yield kind, event
                break
            end = at  # torn, or the text of a sample


def newest_checkpoint(path: Path) -> int:
    """Return the newest version of which a checkpoint is recorded in ``path`` and its closed parts;
    0: none."""
    facts = Facts()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            facts.line(line)
    return max(facts.checkpoint, *(part.checkpoint for part in facts_of(path).values()), 0)


def facts_of(path: Path) -> dict[tuple[int, int], Facts]:
    """Return what is known of the closed parts of ``path``, by number and piece; those that are not
    known yet are read."""
    if not closed(path):
        return {}
    from orchestration.history.catalog import Catalog  # SQLite, for runs that are long

    with Catalog(path) as catalog:
        return catalog.update()
