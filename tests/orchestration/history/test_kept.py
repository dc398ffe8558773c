"""What a run's file keeps of its events: all that happened, little by the clock, and the totals as
they were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.history.detail import DETAIL, MOST_BYTES, OLD
from orchestration.history.events_file import METRICS, MetricsFile, read_metrics
from orchestration.history.kept import Kept
from orchestration.history.lines import line_of
from orchestration.history.totals import RunTotals
from pipeline.data.events import Event, order

HOUR = 3600.0
BEGIN = 1_700_000_000.0


def event(time: float, kind: str, number: int = 0, **data: Any) -> Event:
    return Event(f"{int(1000 * (BEGIN + time))}-{number}", BEGIN + time, kind, data)


def stage(time: float, worker: str, wall: float, number: int = 0) -> Event:
    spent = {
        "busy": wall / 3,
        "waiting_input": wall / 3,
        "waiting_room": 0.0,
        "other": wall / 3,
        "wall": wall,
    }
    counts = {
        "rows": int(10 * wall),
        "tokens": int(1000 * wall),
        "parked": 0,
        "queue_depth": 3,
        "in_flight": 12,
    }
    return event(
        time, "stage", number, stage=worker.partition("-")[0], worker=worker, **spent, **counts
    )


def swap(time: float, worker: str, version: int, number: int = 0) -> Event:
    gaps = {
        "gap_max": 0.1234567891,
        "gap_mean": 0.000012345678,
        "gap_tokens": 18,
        "gap_max_limit": 0.5,
    }
    spent = {"publish_seconds": 0.0, "exposed_seconds": 0.0123456789, "hidden_seconds": 0.3}
    return event(
        time, "sync", number, worker=worker, version=version, bytes=1 << 20, **spent, **gaps
    )


def by_clock(workers: int, seconds: float, at: float = 0.0) -> list[Event]:
    """What ``workers`` controllers report each half second, whatever the number of steps."""
    found = []
    for tick in range(int(2 * seconds)):
        for number in range(workers):
            time = at + tick / 2 + number / 1000
            worker = f"rollout-{number}"
            found.append(stage(time, worker, 1.0 + tick / 2))
            span = {"name": "claim", "start": BEGIN + time, "seconds": 0.25, "rows": 8}
            found.append(
                event(time, "span", 1, stage="rollout", worker=worker, spans=[span] * 3, left_out=0)
            )
    return found


@pytest.mark.parametrize("workers", [5, 300])
def test_a_file_grows_by_a_megabyte_an_hour_at_most_whatever_the_number_of_workers(
    tmp_path: Path, workers: int
) -> None:
    seconds = HOUR if workers < 100 else HOUR / 15
    kept = Kept()
    written = sum(
        len(line_of(each)) for given_ in by_clock(workers, seconds) for each in kept.of(given_)
    )
    first = sum(len(line_of(stage(0, f"rollout-{number}", 1.0))) for number in range(workers))
    assert (written - first) * HOUR / seconds < 1e6


def test_detail_is_the_newest_minutes_and_bounded(tmp_path: Path) -> None:
    events = by_clock(8, 900)
    with MetricsFile(tmp_path / METRICS) as file:
        for each in events:
            file.event(each)
    sizes = [(tmp_path / name).stat().st_size for name in (OLD, DETAIL)]
    assert all(0 < size <= MOST_BYTES for size in sizes)
    ids = [each.id for each in read_metrics(tmp_path / METRICS, detail=True)]
    assert len(ids) == len(set(ids))
    assert ids == sorted(ids, key=order)
    assert {each.id for each in events[-4000:]} <= set(ids), "the last minutes are whole"
    assert len(ids) < len(events)


def test_steps_of_many_workers_take_little(tmp_path: Path) -> None:
    """20 steps a second, with the events of a swap for each of 16 replicas."""
    metrics = {f"metric_{number}": 1 / (number + 3) for number in range(24)}
    steps = 2000
    size = 0
    kept = Kept()
    for step in range(steps):
        at = step / 20
        counts = {
            "tokens_generated": 1000 * step,
            "tokens_trained": 999 * step,
            "tokens_filtered": 7,
        }
        data = {
            "step": step + 1,
            "version": step + 1,
            "rows": 64,
            "groups": list(range(8 * step, 8 * step + 8)),
            **counts,
        }
        made = [event(at, "step", **data, **metrics)]
        made += [
            swap(at + (1 + number) / 1000, f"rollout-{number}", step + 1) for number in range(16)
        ]
        made.append(event(at + 0.03, "ledger", generated=64 * step, trained=64 * step, in_flight=0))
        size += sum(len(line_of(each)) for given_ in made for each in kept.of(given_))
    size += sum(len(line_of(each)) for each in kept.rest())
    assert size / steps < 1500


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), count=st.integers(1, 300))
def test_totals_are_those_of_all_events(seed: int, count: int) -> None:
    """Workers that begin again, clocks that are set back, ids of one millisecond, checkpoints: the
    sums are the same."""
    draw = random.Random(seed)
    given_ = list[Event]()
    walls = dict[str, float]()
    at = 0.0
    version = 0
    ids = 0
    for _ in range(count):
        ids += draw.choice([0, 1, 1, 700, 30_000])
        at += draw.choice([0.0, 0.5, 0.5, 30.0, -100.0, 90.0])
        worker = f"rollout-{draw.randrange(3)}"
        kind = draw.choice(
            ["stage", "stage", "stage", "sync", "sync", "step", "checkpoint", "worker", "ledger"]
        )
        if kind == "stage":
            walls[worker] = walls.get(worker, 0.0) + 0.5
            made = stage(at, worker, walls[worker])
        elif kind == "sync":
            version += 1
            made = swap(at, worker, version)
        elif kind == "worker":
            walls.pop(worker, None)
            made = event(at, "worker", stage="rollout", worker=worker, change="restarted", pid=3)
        elif kind == "ledger":
            counts = ("generated", "trained", "filtered", "remade", "in_flight")
            counted = {
                name: len(given_) for name in (*counts, *(f"{name}_tokens" for name in counts))
            }
            made = event(at, "ledger", **counted, redelivered=0)
        else:
            made = event(
                at,
                kind,
                version=version,
                step=version,
                path="",
                requested=False,
                rows=1,
                groups=[1],
                tokens_generated=1,
                tokens_trained=1,
                tokens_filtered=1,
            )
        given_.append(Event(f"{ids}-{len(given_)}", made.time, made.kind, made.data))
    kept = Kept()
    found = [each for one in given_ for each in kept.of(one)]
    found += kept.rest()
    keys = [order(each.id) for each in found]
    assert keys == sorted(set(keys)), "ids grow"
    other = ("step", "checkpoint", "worker")
    assert [e for e in found if e.kind in other] == [e for e in given_ if e.kind in other]
    all_ = RunTotals()
    some = RunTotals()
    for each in given_:
        all_.apply(each)
    for each in found:
        some.apply(each)
    assert some.ledger == all_.ledger
    assert some.published_bytes == all_.published_bytes
    assert some.sync_seconds == pytest.approx(all_.sync_seconds)
    assert {name: worker.totals for name, worker in some.workers.items()} == {
        name: pytest.approx(worker.totals) for name, worker in all_.workers.items()
    }


def test_what_waited_when_a_runner_was_killed_is_given_again(tmp_path: Path) -> None:
    """The next runner reads the index a minute further back; what was kept is not kept twice."""
    stream = [stage(0, "rollout-0", 1.0), swap(0.1, "rollout-0", 1)]
    for number in range(1, 40):
        stream += [
            stage(number, "rollout-0", 1.0 + number),
            swap(number + 0.1, "rollout-0", number + 1),
        ]
        stream.append(event(number + 0.2, "step", step=number + 1, version=number + 1))
    killed = MetricsFile(tmp_path / METRICS)
    for each in stream[:60]:
        killed.event(each)
    killed._file.close()  # and nothing else
    with MetricsFile(tmp_path / METRICS) as file:
        for each in (one for one in stream if order(one.id) > order(file.after)):
            file.event(each)
    found = list(read_metrics(tmp_path / METRICS))
    assert [each.data["step"] for each in found if each.kind == "step"] == list(range(2, 41))
    assert sum(each.data["bytes"] for each in found if each.kind == "sync") == 40 << 20
    assert [each.data["wall"] for each in found if each.kind == "stage"][-1] == 40.0
