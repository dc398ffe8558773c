"""The guard on single reward functions: which has stopped rising, and which fell."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from orchestration.guard.guard import Guard, GuardOptions
from orchestration.guard.rules import COMPARED_STEPS
from pipeline.data.events import AlarmEvent, StepEvent

ROWS = 64
Figures = Mapping[str, float | None]


def alarms(
    length: int, off: tuple[str, ...] = (), **functions: Callable[[int], Figures]
) -> list[AlarmEvent]:
    """The alarms of ``length`` steps with ``functions``, whose figures a step's number gives."""
    guard = Guard(GuardOptions(off=off))
    return [
        alarm
        for number in range(length)
        for alarm in guard.observe(
            StepEvent(
                step=number,
                version=number + 1,
                rows=ROWS,
                groups=list(range(8)),
                reward_mean=0.5,
                tokens_generated=0,
                tokens_trained=0,
                tokens_filtered=0,
                rewards={name: of_step(number) for name, of_step in functions.items()},
            )
        )
    ]


def scored(seed: int, mean: Callable[[int], float]) -> Callable[[int], Figures]:
    """Scores of 0 and 1 with about this ``mean``."""
    draw = random.Random(seed)

    def of_step(number: int) -> Figures:
        value = min(1.0, max(0.0, mean(number) + draw.gauss(0, 0.02)))
        return {"mean": value, "std": (value - value**2) ** 0.5}

    return of_step


def rising(number: int) -> float:
    return min(1.0, 0.1 + 0.006 * number)


@pytest.mark.parametrize("seed", range(8))
def test_the_function_that_stops_while_the_other_goes_on_is_named_once(seed: int) -> None:
    (alarm,) = alarms(
        140, right=scored(seed, lambda n: min(0.4, rising(n))), short=scored(seed + 1, rising)
    )
    assert alarm.metric == "rewards/right/mean"
    assert 50 + COMPARED_STEPS - 12 <= alarm.step <= 50 + COMPARED_STEPS + 30
    assert "has not risen for 32 steps, while that of short rises" in alarm.reason


def test_one_that_pulls_against_the_other_says_so() -> None:
    def falling(number: int) -> Figures:
        value = rising(number) if number < 60 else 0.46 - 0.004 * (number - 60)
        return {"mean": value, "std": (value - value**2) ** 0.5, "correlation": -0.45}

    first, *_ = alarms(110, right=falling, short=scored(1, rising))
    assert first.metric == "rewards/right/mean"
    assert first.reason.endswith("with the rest of the reward it correlates by -0.45")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "right",
    [
        rising,
        lambda n: min(0.97, 0.1 + 0.03 * n),  # has reached its best score
        lambda n: 0.97,  # from the beginning
        lambda n: 0.02,
        lambda n: 0.5,  # never rose: a finding, not an alarm
    ],
)
def test_a_function_that_rises_or_has_nothing_left_is_no_alarm(
    right: Callable[[int], float], seed: int
) -> None:
    assert alarms(150, right=scored(seed, right), short=scored(seed + 1, rising)) == []


def test_where_all_stand_still_and_with_one_function_there_is_no_alarm() -> None:
    def stops(number: int) -> float:
        return min(0.4, rising(number))

    assert alarms(150, right=scored(0, stops), short=scored(1, stops)) == []
    assert alarms(150, right=scored(0, stops)) == []


def test_a_mean_that_falls_at_once_is_an_alarm_of_its_function() -> None:
    falls = scored(0, lambda n: 0.8 if n < 40 else 0.0)
    (alarm,) = alarms(44, right=falls, short=scored(1, lambda n: 0.5))
    assert (alarm.metric, alarm.step) == ("rewards/right/mean", 40)
    assert "at once, where 0." in alarm.reason
    assert "returns for the newest samples" in alarm.look


def test_it_can_be_turned_off() -> None:
    falls = scored(0, lambda n: 0.8 if n < 40 else 0.0)
    assert alarms(44, ("rewards",), right=falls, short=scored(1, lambda n: 0.5)) == []
