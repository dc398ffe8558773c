"""What the views and reports know of a run is what its events said."""

from __future__ import annotations

import pytest

from api.telemetry.progress import SHARES, Progress
from tests.api import scripted


def told(*events: scripted.Recorded) -> Progress:
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    for event in events or scripted.events():
        progress.apply(event)
    return progress


def test_a_whole_run() -> None:
    progress = told()
    assert progress.ended
    assert progress.steps_done == scripted.STEPS
    assert progress.rewards() == [n / 10 for n in range(scripted.STEPS)]
    assert progress.elapsed == pytest.approx(28)
    assert progress.staleness_max() == scripted.BOUND
    assert progress.restarts == 1
    assert progress.published is not None
    assert progress.swapped is not None
    assert progress.swapped["exposed_seconds"] == 0.002
    assert list(progress.evaluations) == [0, scripted.STEPS]
    assert any("signal 9" in message for message in progress.messages)


def test_rates_and_time_left_leave_out_the_start() -> None:
    slow = scripted.step(0, seconds=1000.0)
    progress = told(slow, scripted.step(1), scripted.step(2))
    assert progress.seconds_left == pytest.approx(2.0 * (scripted.STEPS - 3))
    assert progress.tokens_per_second == pytest.approx(1000 / 4)
    assert told(slow).seconds_left is None
    assert told(slow).tokens_per_second is None


def test_a_replayed_step_counts_once() -> None:
    progress = told(scripted.step(0), scripted.step(1), scripted.step(1, reward_mean=0.7))
    assert progress.steps_done == 2
    assert progress.rewards() == [0.0, 0.7]


def test_shares_are_of_the_last_seconds_and_add_up() -> None:
    idle = scripted.stage(0, "rollout-0", 100.0, 0.0, 100.0, 0.0, 0)
    busy = [scripted.stage(n, "rollout-0", 100.0 + n, n * 0.9, 100.0, n * 0.1, 10 * n) for n in range(1, 31)]
    stage = told(idle, *busy).stages["rollout-0"]
    shares = stage.shares()
    assert set(shares) == set(SHARES)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["busy"] == pytest.approx(0.9)
    assert stage.rate("rows") == pytest.approx(10.0)
    assert stage.shares(recent=False)["waiting_input"] == pytest.approx(100 / 130)


def test_a_restarted_worker_begins_anew() -> None:
    before = scripted.stage(0, "rollout-0", 50.0, 40.0, 10.0, 0.0, 1000)
    after = scripted.stage(1, "rollout-0", 2.0, 1.0, 1.0, 0.0, 6)
    stage = told(before, after).stages["rollout-0"]
    assert stage.shares()["busy"] == pytest.approx(0.5)
    assert stage.rate("rows") == pytest.approx(3.0)
