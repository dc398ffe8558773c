"""``metrics.jsonl``: the file of all events of a run, one JSON object a line."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from orchestration.disk import refusal, replacing
from pipeline.events import Event, order

METRICS = "metrics.jsonl"  # in the run's folder
MOST_KEPT = 64 << 20  # bytes of events that wait in memory for room on the disk
MOST_TORN = 5  # torn lines that are named
_ID_OF_LINE = re.compile(rb'\{"id": ?"(\d+-\d+)"')

log = structlog.get_logger()


class MetricsFile:
    """Writes each event as one JSON line, at once; numbers that are not finite become null. An existing file is continued
    after its last whole line; ``last`` is the greatest id of an event in it ("0": no event). An event that the run was
    rewound removes the events of what is made again. Events that the disk refuses are kept, and written when it has room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._kept = b""  # lines that the disk has not taken yet
        self.refused = ""  # why, in words
        self.last = "0"
        whole = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):  # a kill has cut it short
                    break
                whole += len(line)
                if found := _ID_OF_LINE.match(line):
                    self.last = max(self.last, found[1].decode(), key=order)
        os.ftruncate(self._file.fileno(), whole)

    def rewind(self, version: int) -> int:
        """Remove steps, evaluations, publications and checkpoints after policy ``version``; a run that is resumed from there
        makes them again. Torn lines stay. Returns the newest evaluated version of those that stay; -1: none. Raises OSError
        with the room that it needs."""
        evaluated, removed = -1, 0
        with self.path.open("rb") as lines:
            for line in lines:
                if (event := _parsed(line)) is None:
                    continue
                if _made_after(version, event):
                    removed += len(line)
                elif event["kind"] == "evaluation":
                    evaluated = max(evaluated, event["data"]["version"])
        if removed:
            self._rewrite(version, self.path.stat().st_size - removed)
        return evaluated

    def _rewrite(self, version: int, size: int) -> None:
        with self.path.open("rb") as lines, replacing(self.path, size) as partial:
            with partial.open("wb") as kept:
                for line in lines:
                    event = _parsed(line)
                    if event is None or not _made_after(version, event):
                        kept.write(line)
            shutil.copymode(self.path, partial)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)

    def event(self, event: Event) -> None:
        """Raises OSError when the disk has refused :data:`MOST_KEPT` bytes of events."""
        if event.kind == "worker" and event.data["change"] == "rewound" and "version" in event.data:
            self.rewind(event.data["version"])
        self._kept += event_json(event).encode() + b"\n"
        self.last = event.id
        self._write()
        if len(self._kept) > MOST_KEPT:
            raise OSError(errno.ENOSPC, self.refused)

    def _write(self) -> None:
        """Write the lines that are kept, all of them or none."""
        file, written = self._file.fileno(), 0
        size = os.fstat(file).st_size
        try:
            while written < len(self._kept):
                written += os.write(file, self._kept[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            was_refused, self.refused = self.refused, refusal(self.path, len(self._kept), error)
            if not was_refused:
                log.warning("events are kept in memory until their disk takes them", reason=self.refused)
            return
        if self.refused:
            log.warning("the disk takes events again; none is lost", path=str(self.path))
        self._kept, self.refused = b"", ""

    def __enter__(self) -> MetricsFile:
        return self

    def close(self) -> str:
        """Write what the disk has refused so far. Returns why events are lost, "" where none is."""
        self._write()
        self._file.close()
        return self.refused and f"events of the run are lost: {self.refused}"

    def __exit__(self, *_: object) -> None:
        if not self._file.closed and (lost := self.close()):
            log.error(lost)


def _made_after(version: int, event: Mapping[str, Any]) -> bool:
    """Whether ``event`` is of a step after policy ``version``: what reports it, or its versions, or
    the ledger then. A ledger of an older program does not say its version, and stays."""
    data = event["data"]
    match event["kind"]:
        case "alarm":
            return data["step"] >= version  # type: ignore[no-any-return]
        case "forecast":  # it is about the step that follows
            return data["step"] > version  # type: ignore[no-any-return]
        case "step" | "evaluation" | "sync" | "checkpoint" | "ledger" | "turn":
            return (data.get("version") or 0) > version  # type: ignore[no-any-return]
    return False


def event_json(event: Event) -> str:
    """One line of JSON, always of finite numbers."""
    line = {"id": event.id, "time": event.time, "kind": event.kind, "data": finite(event.data)}
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """``value`` with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_metrics(path: Path, last_bytes: int = 0) -> Iterator[Event]:
    """The events of ``path``, or those in its last bytes; torn lines are left out, and logged."""
    if not path.exists():
        return
    torn = list[int]()
    with path.open("rb") as lines:
        if last_bytes and (size := path.stat().st_size) > last_bytes:
            lines.seek(size - last_bytes)
            lines.readline()
        begins = lines.tell()
        for number, line in enumerate(lines, start=1):
            if (event := _parsed(line)) is not None:
                yield Event(**event)
            elif line.endswith(b"\n"):
                torn.append(number)
    if torn:
        _say_torn(path, begins, tuple(torn[:MOST_TORN]), len(torn))


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the event of ``line``; None where it is torn: a full disk, or a kill, has cut it short."""
    try:
        event = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return event if isinstance(event, dict) and event.keys() == {"id", "time", "kind", "data"} else None


@functools.cache
def _say_torn(path: Path, begins: int, numbers: Sequence[int], count: int) -> None:
    """Log once in this process that lines of ``path``, counted from byte ``begins`` on, are left out."""
    where: dict[str, Any] = {"path": str(path), "lines": list(numbers), "after_byte": begins, "count": count}
    log.warning("torn lines are left out, with their events; remove them from the file", **where)


def finite_numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values of ``data`` that a float holds."""
    numbers: dict[str, float] = {}
    for name, value in data.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an int that is too large
                numbers[name] = float(value)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
