"""``metrics.jsonl``: the file of all events of a run, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.events import Event

METRICS = "metrics.jsonl"  # in the run's folder


class MetricsFile:
    """Writes each event as one JSON line, at once; numbers that are not finite become null. An existing file is continued
    after its last whole line; ``last`` is the id of the event in it ("0": no event). An event that the run was rewound
    removes the events of what is made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self.last = "0"
        whole = 0
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):  # a kill may have cut the last one short
                    whole, last = whole + len(line), line
        if whole:
            self.last = json.loads(last)["id"]
        os.ftruncate(self._file.fileno(), whole)

    def rewind(self, version: int) -> int:
        """Remove steps, evaluations, publications and checkpoints after policy ``version``; a run that is resumed from there
        makes them again. Returns the newest evaluated version of those that stay; -1: none."""
        evaluated = -1
        partial = self.path.with_name(f".{self.path.name}")
        with self.path.open("rb") as lines, partial.open("wb") as kept:
            removed = False
            for line in lines:
                if _made_after(version, event := json.loads(line)):
                    removed = True
                else:
                    kept.write(line)
                    evaluated = max(evaluated, event["data"]["version"] if event["kind"] == "evaluation" else -1)
        if not removed:
            partial.unlink()
            return evaluated
        os.replace(partial, self.path)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        return evaluated

    def event(self, event: Event) -> None:
        if event.kind == "worker" and event.data["change"] == "rewound" and "version" in event.data:
            self.rewind(event.data["version"])
        self._file.write(event_json(event).encode() + b"\n")
        self.last = event.id

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _made_after(version: int, event: Mapping[str, Any]) -> bool:
    """Whether ``event`` reports a step, an evaluation, a publication, a checkpoint or an alarm after ``version``."""
    if event["kind"] == "alarm":
        return event["data"]["step"] >= version  # type: ignore[no-any-return]
    return event["kind"] in ("step", "evaluation", "sync", "checkpoint") and event["data"].get("version", 0) > version


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
    """The events of ``path``, or those in its last bytes; a last line that a kill cut short is left out."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        if last_bytes and (size := path.stat().st_size) > last_bytes:
            lines.seek(size - last_bytes)
            lines.readline()
        for line in lines:
            if line.endswith(b"\n"):
                yield Event(**json.loads(line))


def finite_numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values of ``data`` that a float holds."""
    numbers: dict[str, float] = {}
    for name, value in data.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an int that is too large
                numbers[name] = float(value)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
