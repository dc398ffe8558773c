"""The choice of the events that a run's file keeps, so that it grows by steps and hardly by the
clock.

    span ─────────────────────▶ none
    stage, ledger, turn ──────▶ of each worker the newest one a minute: they say totals, or what is now
    sync ─────────────────────▶ of each worker one a minute: its seconds and bytes are sums, `merged` counts
    everything else ──────────▶ all, at once

    the worker's or the run's end, a checkpoint (for syncs), close() ──▶ what waits for its minute is kept too

An event that has waited gets the next free id after those that have passed, so that ids grow in the
file: its own is less than those of the lines before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.data.events import ENDED, Event, order

EVERY = 60.0  # seconds between two kept events of one worker and kind
MANY = 40  # from so many workers and kinds on the seconds grow with them: the bytes an hour do not
# kinds that come by the clock; their newest ones are kept in a file of their own
LIVE = ("stage", "span")
# of merged syncs
SUMS = ("bytes", "publish_seconds", "exposed_seconds", "hidden_seconds", "released_bytes")
Key = tuple[str, str, str]  # kind, worker, and of a turn its phase


@dataclass
class _Slot:
    """The events of one worker and kind between two that are kept.

    ``kept``: the newest event that was. ``waiting``: newer ones; more than one where a worker has
    begun again, or a checkpoint was made between them. ``begins``: the last of them is the first of
    a worker's new process, which shows that it began again: it stays beside later ones.
    """

    kept: Event
    waiting: list[Event] = field(default_factory=list)
    begins: bool = False

    @property
    def last(self) -> Event:
        return self.waiting[-1] if self.waiting else self.kept


class Kept:
    """The rule that chooses and merges events, which are given in the order of their ids. Does no
    I/O."""

    def __init__(self, every: float = EVERY) -> None:
        self.seen = "0"  # greatest id of an event that was given or kept
        self._every = every
        self._slots: dict[Key, _Slot] = {}
        self._due: dict[Key, None] = {}  # whose waiting events are kept as soon as an id is free
        self._saved = 0  # version of the newest checkpoint

    @property
    def seconds(self) -> float:
        """Seconds between two kept events of one worker and kind."""
        return self._every * max(1.0, len(self._slots) / MANY)

    def recall(self, event: Event) -> None:
        """Take note of an event that the file has."""
        self.seen = max(self.seen, event.id, key=order)
        if (key := _key(event)) is not None:
            self._slots[key] = _Slot(event)
        elif event.kind == "checkpoint":
            self._saved = _version(event)

    def again(self, event: Event) -> None:
        """Take an event that was given to a former process, which may not have kept it."""
        slot = self._slots.get(key) if (key := _key(event)) is not None else None
        if slot is None or key is None:
            return
        if event.kind != "sync":
            slot.waiting = [event]
        elif _version(event) > _version(slot.kept):
            self._wait(slot, event)

    def of(self, event: Event) -> Iterator[Event]:
        """Yield the events that are to be kept now that ``event`` has come, in the order of ids."""
        if event.kind == "checkpoint":
            self._saved = _version(event)
        for ending in self._ending(event):
            self._due[ending] = None
        if order(event.id)[0] > order(self.seen)[0]:  # nothing comes between them any more
            yield from self._take(list(self._due))
        self.seen = event.id
        if event.kind == "span":
            return
        if (key := _key(event)) is None:
            yield event
            return
        slot = self._slots.get(key)
        if slot is None:
            self._slots[key] = _Slot(event)
            yield event
            return
        self._wait(slot, event)
        # A clock that was set back is no reason to wait longer.
        if len(slot.waiting) == 1 and (
            slot.begins or abs(event.time - slot.kept.time) >= self.seconds
        ):
            kept_event = replace(slot.waiting[0], id=event.id)
            self._slots[key] = _Slot(kept_event)
            self._due.pop(key, None)
            yield kept_event
        elif len(slot.waiting) > 1:
            self._due[key] = None

    def rest(self) -> Iterator[Event]:
        """Yield what still waits: no more events come."""
        yield from self._take(list(self._slots))

    def rewind(self, version: int) -> None:
        """Forget what waits of steps after policy ``version``: they are made again."""
        self._saved = min(self._saved, version)
        for (kind, *_), slot in self._slots.items():
            if kind == "ledger":
                slot.waiting = []
            elif kind == "sync":
                slot.waiting = [event for event in slot.waiting if _version(event) <= version]

    def _ending(self, event: Event) -> list[Key]:
        """Return the keys whose waiting events are kept because of ``event``."""
        if event.kind == "state" and event.data.get("state") in ENDED:
            return list(self._slots)
        if event.kind == "worker":
            return [key for key in self._slots if key[1] == event.data.get("worker")]
        if event.kind == "checkpoint":
            return [key for key in self._slots if key[0] == "sync"]
        return []

    def _take(self, keys: list[Key]) -> Iterator[Event]:
        for key in keys:
            self._due.pop(key, None)
            slot = self._slots[key]
            for event in slot.waiting:
                milliseconds, number = order(self.seen)
                self.seen = f"{milliseconds}-{number + 1}"
                slot.kept = replace(event, id=self.seen)
                yield slot.kept
            slot.waiting = []
            slot.begins = False

    def _wait(self, slot: _Slot, event: Event) -> None:
        begins = event.kind == "stage" and _wall(event) < _wall(slot.last)
        if not slot.waiting or slot.begins or begins or self._are_apart(slot.last, event):
            slot.waiting.append(event)
        else:
            slot.waiting[-1] = merged(slot.last, event) if event.kind == "sync" else event
        slot.begins = begins

    def _are_apart(self, first: Event, second: Event) -> bool:
        """Return whether two sync events are not merged: a checkpoint is between them, or one is a
        publication."""
        if first.kind != "sync":
            return False
        is_between = _version(first) <= self._saved < _version(second)
        return is_between or bool(first.data.get("publish_seconds")) != bool(
            second.data.get("publish_seconds")
        )


def _version(event: Event) -> int:
    return int(event.data.get("version") or 0)


def _wall(event: Event) -> float:
    return float(event.data.get("wall") or 0.0)


def _key(event: Event) -> Key | None:
    match event.kind:
        case "stage" | "sync" | "turn":
            return (
                event.kind,
                str(event.data.get("worker")),
                str(event.data.get("phase") or event.data.get("to") or ""),
            )
        case "ledger":
            return event.kind, "", ""
    return None


def merged(first: Event, second: Event) -> Event:
    """Return one sync event in place of two of a worker: sums of seconds and bytes, the largest
    gaps, the rest of the newer one.

    >>> one = Event("1-0", 1.0, "sync", {"worker": "rollout-0", "version": 1, "bytes": 8, "gap_max": 0.2})
    >>> merged(one, Event("2-0", 2.0, "sync", {**one.data, "version": 2, "gap_max": 0.1})).data
    {'worker': 'rollout-0', 'version': 2, 'bytes': 16, 'gap_max': 0.2, 'merged': 2}
    """
    data: dict[str, Any] = {**first.data, **second.data}
    for name, value in first.data.items():
        other = second.data.get(name)
        if not isinstance(value, int | float) or not isinstance(other, int | float):
            continue
        if name in SUMS:
            data[name] = value + other
        elif name.startswith("gap_") and not name.endswith("_limit"):
            data[name] = max(value, other)
    data["merged"] = merged_count(first.data) + merged_count(second.data)
    return replace(second, data=data)


def merged_count(data: Mapping[str, Any]) -> int:
    """Return how many sync events ``data`` stands for."""
    return int(data.get("merged") or 1)


def of_one(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``data`` of a sync event with the mean seconds and bytes of those that it stands for.

    >>> of_one({"worker": "rollout-0", "exposed_seconds": 3.0, "merged": 2})
    {'worker': 'rollout-0', 'exposed_seconds': 1.5}
    """
    count = merged_count(data)
    means = {name: data[name] / count for name in SUMS if count > 1 and data.get(name) is not None}
    return {name: value for name, value in {**data, **means}.items() if name != "merged"}
