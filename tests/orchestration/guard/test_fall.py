"""The alarm of a reward that falls: on recorded runs that lost what they had learned, and on those
that did not."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.guard.fall import FallJudge
from orchestration.guard.guard import Guard, GuardOptions
from pipeline.data.events import StepEvent
from tests.sources import ROOT

MEASURED = ROOT / "docs" / "measurements"


def alarms(rewards: Sequence[float], sensitivity: float = 8.0) -> list[int]:
    """The steps at which the guard says that the reward of a run with ``rewards`` falls."""
    guard = Guard(GuardOptions(sensitivity=sensitivity))
    found = []
    for number, reward in enumerate(rewards, start=1):
        event = StepEvent(
            step=number,
            version=number,
            rows=64,
            groups={},
            loss=0.0,
            reward_mean=reward,
            reward_std=0.1,
            staleness_mean=0.0,
            staleness_p95=0,
            staleness_max=0,
            response_length_mean=100.0,
            tokens_generated=6400,
            tokens_trained=6400,
            tokens_filtered=0,
            seconds=1.0,
        )
        found += [alarm.step for alarm in guard.observe(event) if alarm.metric == "reward_mean"]
    return found


def half_lost(rewards: Sequence[float]) -> int | None:
    """The first step at which the mean of five is below the half of what had been gained."""
    means = [statistics.fmean(rewards[at : at + 5]) for at in range(len(rewards) - 4)]
    for at, mean in enumerate(means):
        gain = max(means[: at + 1]) - means[0]
        if gain >= 0.2 and mean < means[0] + gain / 2:
            return at + 5
    return None


def recorded(name: str) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads((MEASURED / name).read_text())["trials"]
    return trials


def test_each_run_that_collapsed_without_weights_had_an_alarm_before() -> None:
    """Samples of eight versions, unweighted: all three seeds lose half of what they had learned,
    the runs beside them do not."""
    collapsed = 0
    for trial in recorded("staleness-eager.json"):
        at = half_lost(trial["reward"])
        found = alarms(trial["reward"])
        if at is None:
            assert found == [], trial["recipe"]
        else:
            collapsed += 1
            assert found, trial["recipe"]
            assert found[0] <= at, trial["recipe"]
    assert collapsed == 3


@pytest.mark.parametrize(
    "name",
    ["learning-tiny.json", "learning-quickstart.json", "learning-precision.json"],
)
def test_runs_that_learn_have_none(name: str) -> None:
    for trial in recorded(name):
        assert alarms(trial["reward"]) == [], (trial["recipe"], trial["staleness"], trial["seed"])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([0.005, 0.02, 0.05, 0.15]))
def test_noise_is_no_fall(seed: int, noise: float) -> None:
    draw = random.Random(seed)
    flat = [draw.gauss(0.4, noise) for _ in range(100)]
    rising = [draw.gauss(0.1 + 0.6 * min(1, step / 50), noise) for step in range(100)]
    assert alarms(flat) == []
    assert alarms(rising) == []


def test_the_noise_of_a_long_run_is_no_fall() -> None:
    """The highest of a thousand noisy means is far above their level by chance alone."""
    alarmed = 0
    for seed in range(20):
        draw = random.Random(seed)
        levels = (0.1 + 0.6 * min(1, step / 50) for step in range(1000))
        alarmed += bool(alarms([draw.gauss(level, 0.15) for level in levels]))
    assert alarmed <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_in_large_noise_is_clear_in_a_longer_mean(seed: int) -> None:
    """Single steps differ by as much as the fall, so that a mean of five says nothing."""
    draw = random.Random(seed)
    rise = [0.1 + 0.7 * min(1, step / 40) for step in range(60)]
    found = alarms([level + draw.gauss(0, 0.13) for level in [*rise, *[0.25] * 24]])
    assert len(found) == 1
    assert len(rise) < found[0] <= len(rise) + 16


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.sampled_from([0.0, 1.0, 8.0]))
def test_whatever_the_rewards_are_an_alarm_names_what_is_lost(
    rewards: list[float], sensitivity: float
) -> None:
    judge = FallJudge(sensitivity)
    for number, reward in enumerate(rewards, start=1):
        found = judge.of_reward(number, reward)
        assert (found is None) == (number < 10)
        if found is not None and found[0]:
            _, _, _, mean, highest, _, reason = found
            assert highest is not None
            assert mean < highest
            assert reason.endswith("of what had been gained")


def test_a_fall_is_one_alarm_until_half_of_it_is_made_up_for() -> None:
    draw = random.Random(0)
    rise = [step / 40 for step in range(40)]
    fall = [1 - step / 40 for step in range(24)]
    again = [0.4 + step / 40 for step in range(24)]
    levels = [*rise, *[1.0] * 20, *fall, *again, *[1.0] * 10, *fall]
    found = alarms([level + draw.gauss(0, 0.02) for level in levels])
    assert len(found) == 2
    a_third_lost = 60 + 40 / 3
    assert a_third_lost < found[0] <= a_third_lost + 4
    second = len(levels) - len(fall) + 40 / 3
    assert second < found[1] <= second + 4
