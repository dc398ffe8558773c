"""Reduction: which numbers of a run's events are series, and how several events become one point.

    event ──▶ its series (`step`, `evaluation`, `ledger`, `stage/WORKER`, `sync/WORKER`)

A point reduces each number of its events: a growing count to the last one, amounts of single events
to their sum, maxima to the largest, everything else to the mean.
"""

from __future__ import annotations

from typing import Literal

from pipeline.data.events import Event

KINDS = ("step", "evaluation", "ledger", "stage", "sync")
OF_WORKERS = ("stage", "sync")  # one series for each worker
MOST_POINTS = 50_000  # of an answer

# Numbers of which a point keeps the last one, by kind.
LAST: dict[str, frozenset[str] | None] = {
    "step": frozenset({"step", "version", "tokens_generated", "tokens_trained", "tokens_filtered"}),
    "evaluation": frozenset({"step", "version", "count", "failed", "absent"}),
    "ledger": None,  # all of it
    "stage": frozenset(
        {"busy", "waiting_input", "waiting_room", "other", "wall", "rows", "tokens", "parked"}
    ),
    "sync": frozenset({"version"}),
}
SUM = {
    "step": frozenset({"rows", "reward_failed", "reward_absent"}),
    "sync": frozenset({"bytes", "publish_seconds", "exposed_seconds", "hidden_seconds", "merged"}),
}
How = Literal["last", "sum", "max", "mean"]


def series_of(event: Event) -> str:
    """Name of the series that an event belongs to; "" for none."""
    if event.kind not in KINDS:
        return ""
    return f"{event.kind}/{event.data['worker']}" if event.kind in OF_WORKERS else event.kind


def how(kind: str, name: str) -> How:
    """Return how the number ``name`` of events of a kind is reduced.

    >>> how("step", "version"), how("step", "rows"), how("step", "staleness_max"), how("step", "loss")
    ('last', 'sum', 'max', 'mean')
    """
    lasting = LAST[kind]
    if lasting is None or name in lasting:
        return "last"
    if name in SUM.get(kind, ()):
        return "sum"
    return "max" if name.endswith("_max") or name.startswith("max_") else "mean"


class TooMany(ValueError):
    """An answer would hold more points than allowed."""


def refuse_many(points: int, most: int = MOST_POINTS) -> None:
    """Raises TooMany past ``most`` points."""
    if points > most:
        raise TooMany(
            f"more than {most} points; ask for a shorter time, for some of the names, or "
            f"with a larger every"
        )
