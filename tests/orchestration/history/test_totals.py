"""Totals of a run that are handed from one process to another."""

from __future__ import annotations

import json

import pytest

from orchestration.history.totals import RunTotals
from pipeline.data.events import Event
from tests.api import scripted


def totals_of(events: list[Event], totals: RunTotals | None = None) -> RunTotals:
    totals = totals or RunTotals()
    for event in events:
        totals.apply(event)
    return totals


def stage(time: float, wall: float, worker: str = "rollout-0", **more: object) -> Event:
    shares = {
        "busy": wall / 2,
        "waiting_input": wall / 4,
        "waiting_room": wall / 4,
        "other": 0.0,
        "wall": wall,
    }
    counts = {
        "rows": int(wall),
        "tokens": int(10 * wall),
        "parked": 0,
        "queue_depth": 0,
        "in_flight": 0,
    }
    values = {**shares, **counts, **more}
    return scripted.event(time, "stage", stage=worker[:-2], worker=worker, **values)


def answered(time: float, wall: float, **counts: float) -> Event:
    """What an environment worker has told."""
    return stage(time, wall, "environment-0", trajectories=counts)


def drafted(time: float, wall: float, **counts: float) -> Event:
    """What a rollout worker has told whose engine drafts."""
    return stage(time, wall, "rollout-7", drafts=counts)


ALARM = {
    "metric": "ess",
    "value": 0.04,
    "usual": 0.97,
    "limit": 0.1,
    "reason": "ess: 0.04",
    "look": "There.",
}
# A worker that begins again at 20 s, so that its times come from two processes; and what the script
# has not.
EVENTS = [
    *scripted.events(),
    scripted.step(8, rewards={"exact": {"mean": 0.5, "calls": 4.0, "seconds": 0.2}}),
    *(stage(30 + at, wall) for at, wall in enumerate([3.0, 6.0, 1.0, 4.0])),
    answered(34, 3.0, open=2, turns=4, ended_turns=1),
    answered(35, 6.0, open=3, turns=7, ended_turns=2),
    answered(36, 1.0, open=1, turns=2, ended_done=1),
    drafted(37, 2.0, drafted_tokens=9, held_tokens=5),
    drafted(38, 1.0, drafted_tokens=4, held_tokens=1),
    scripted.event(40, "alarm", **ALARM, step=3, version=3),
    scripted.event(41, "prompt", change="epoch", epochs={"sums": 2}),
    scripted.event(42, "prompt", change="too long", skipped=3, cut=1),
    scripted.event(
        43, "worker", stage="rollout", worker="rollout-1", change="restarted", reason="", pid=9
    ),
    scripted.event(
        44,
        "worker",
        stage="host",
        worker="host-a",
        change="ready",
        reason="",
        pid=3,
        node="a",
        host="host-a",
    ),
    scripted.event(50, "state", state="starting", reason=""),  # it was resumed
]


@pytest.mark.parametrize("cut", range(len(EVENTS) + 1))
def test_another_process_goes_on_with_the_same_totals(cut: int) -> None:
    sent = json.dumps(totals_of(EVENTS[:cut]).wire())
    restored = RunTotals.of(json.loads(sent))
    assert restored.wire() == totals_of(EVENTS[:cut]).wire()
    assert {name: worker.recent for name, worker in restored.workers.items()} == {
        name: worker.recent for name, worker in totals_of(EVENTS[:cut]).workers.items()
    }
    gone_on = totals_of(EVENTS[cut:], restored)
    whole = totals_of(EVENTS)
    # it has forgotten where it looked back to in between
    for totals in (gone_on, whole):
        for worker in totals.workers.values():
            worker._recent.clear()
    assert gone_on.wire() == whole.wire()
    assert {name: worker.totals for name, worker in gone_on.workers.items()} == {
        name: worker.totals for name, worker in whole.workers.items()
    }
    assert (gone_on.tokens, gone_on.dropped) == (whole.tokens, whole.dropped)
    counts = {"open": 1, "turns": 9, "ended_turns": 2, "ended_done": 1}
    assert gone_on.trajectories == whole.trajectories == counts
    assert gone_on.drafts == whole.drafts == {"drafted_tokens": 13, "held_tokens": 6}
    assert list(gone_on.alarms) == list(whole.alarms)


def test_every_field_is_sent() -> None:
    """One that is added has to be; the totals above have each of them."""
    totals = totals_of(EVENTS)
    empty = {name for name, value in vars(totals).items() if not value}
    assert vars(totals).keys() <= totals.wire().keys() | empty
    assert empty <= {"reason"}, "the events above say nothing of it"
