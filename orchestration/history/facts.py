"""Facts of a part of a run's file of events, known without reading it: its ids, steps, versions and
counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestration.history.lines import ID_OF_LINE, event_of
from pipeline.data.events import Event, order

VERSIONED = {"step", "evaluation", "sync", "checkpoint", "ledger", "turn", "alarm", "forecast"}
KIND_OF_LINE = re.compile(rb'"kind": ?"([a-z]+)"')


@dataclass
class Facts:
    """Facts of some lines.

    ``made``: greatest version that an event reports and a rewind to before it removes;
    ``evaluated``, ``checkpoint``: the newest versions of these; -1: none. Times in Unix seconds.
    """

    first_id: str = ""
    last_id: str = ""
    begins: float = 0.0
    ends: float = 0.0
    made: int = -1
    evaluated: int = -1
    checkpoint: int = -1
    size: int = 0  # bytes of lines
    counts: Counter[str] = field(default_factory=Counter)  # events by kind

    def line(self, line: bytes) -> Event | None:
        """Add ``line``.

        Returns its event; None where it is torn, or of a kind that is only counted.
        """
        self.size += len(line)
        kind = KIND_OF_LINE.search(line, 0, 120)
        if (
            kind
            and kind[1] == b"span"
            and (id_match := ID_OF_LINE.match(line))
            and line.endswith(b"}\n")
        ):
            self._pass("span", id_match[1].decode())
            return None
        if (event := event_of(line)) is not None:
            self.add(event)
        return event

    def add(self, event: Event) -> None:
        self._pass(event.kind, event.id)
        self.begins = min(self.begins, event.time) if self.begins else event.time
        self.ends = max(self.ends, event.time)
        self.made = max(self.made, version_of(event))
        version = _whole(event.data, "version")
        if event.kind == "evaluation":
            self.evaluated = max(self.evaluated, version)
        elif event.kind == "checkpoint":
            self.checkpoint = max(self.checkpoint, version)

    def _pass(self, kind: str, event_id: str) -> None:
        self.counts[kind] += 1
        self.first_id = self.first_id or event_id
        self.last_id = max(self.last_id, event_id, key=order)

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        data: dict[str, Any] = json.loads(text)
        return cls(**{**data, "counts": Counter(data["counts"])})


def version_of(event: Event) -> int:
    """Return the version to before which a rewind removes ``event``; -1: it stays in any case, as a
    ledger of an older program, which does not say its version."""
    return _whole(event.data, "version") if event.kind in VERSIONED else -1


def _whole(data: Mapping[str, Any], name: str) -> int:
    """Return the whole number ``name`` of ``data``; 0 where there is no such number: an event may
    be of any program."""
    value = data.get(name)
    return value if isinstance(value, int) else 0


def made_after(version: int, event: Event) -> bool:
    """Return whether ``event`` is of a step after ``version``: what reports it, or its versions, or
    the ledger then."""
    return version_of(event) > version
