"""Views and reports show what the events of a run contain."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from api.telemetry.progress import Progress
from api.telemetry.totals import SHARES, shares
from pipeline.events import Event
from tests.api import scripted


def applied(*events: Event) -> Progress:
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    for event in events or scripted.events():
        progress.apply(event)
    return progress


def test_a_whole_run() -> None:
    progress = applied()
    assert progress.ended
    assert progress.steps_done == scripted.STEPS
    assert progress.rewards() == [n / 10 for n in range(scripted.STEPS)]
    assert progress.elapsed == pytest.approx(28)
    assert progress.staleness_max() == scripted.BOUND
    assert progress.restarts == 1
    assert progress.published is not None
    assert progress.swapped is not None
    assert progress.swapped.exposed_seconds == 0.002
    assert list(progress.evaluations) == [0, scripted.STEPS]
    assert any("signal 9" in message for message in progress.messages)


def test_rates_and_time_left_leave_out_the_start() -> None:
    slow = scripted.step(0, seconds=1000.0)
    progress = applied(slow, scripted.step(1), scripted.step(2))
    assert progress.seconds_left == pytest.approx(2.0 * (scripted.STEPS - 3))
    assert progress.tokens_per_second == pytest.approx(1000 / 4)
    assert applied(slow).seconds_left is None
    assert applied(slow).tokens_per_second is None


def test_a_replayed_step_counts_once() -> None:
    progress = applied(scripted.step(0), scripted.step(1), scripted.step(1, reward_mean=0.7))
    assert progress.steps_done == 2
    assert progress.rewards() == [0.0, 0.7]


def test_shares_are_of_the_last_seconds_and_add_up() -> None:
    idle = scripted.stage(0, "rollout-0", 100.0, 0.0, 100.0, 0.0, 0)
    busy = [scripted.stage(n, "rollout-0", 100.0 + n, n * 0.9, 100.0, n * 0.1, 10 * n) for n in range(1, 31)]
    worker = applied(idle, *busy).workers["rollout-0"]
    parts = shares(worker.recent)
    assert set(parts) == set(SHARES)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["busy"] == pytest.approx(0.9)
    assert worker.rate("rows") == pytest.approx(10.0)
    assert shares(worker.totals)["waiting_input"] == pytest.approx(100 / 130)


def test_the_totals_of_a_restarted_worker_go_on() -> None:
    before = scripted.stage(0, "rollout-0", 50.0, 40.0, 10.0, 0.0, 1000)
    after = scripted.stage(1, "rollout-0", 2.0, 1.0, 1.0, 0.0, 6)
    worker = applied(before, after).workers["rollout-0"]
    assert shares(worker.recent)["busy"] == pytest.approx(0.5)
    assert worker.rate("rows") == pytest.approx(3.0)
    assert (worker.totals["wall"], worker.totals["rows"], worker.latest.rows) == (52.0, 1006, 6)


def test_a_run_of_weeks_takes_little_memory() -> None:
    """What is kept grows by some hundred bytes a step, and by no answers of an evaluation."""
    answer = "a long answer " * 10_000

    def events(first: int, last: int) -> Iterator[Event]:
        for number in range(first, last):
            yield scripted.step(number, groups=list(range(64)))
            if number % 10 == 0:
                yield scripted.evaluation(10 + 2 * number, number, 0.5, f"{number} {answer}")

    progress = applied(*events(0, 500))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for event in events(500, 1500):
        progress.apply(event)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(progress.rewards()) == progress.steps_done == 1500
    assert grown < 1000 * 700, grown
