"""The guard's state machine: what is an alarm, when, and how often."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.guard.guard import Guard, GuardOptions
from orchestration.guard.rules import METRICS, TRENDS, WARM_UP
from orchestration.words import words
from pipeline.data.events import AlarmEvent, StageEvent, StepEvent, SyncEvent

GROUPS = 8
ROWS = 64


def step(number: int, **metrics: Any) -> StepEvent:
    """The step after ``number`` others of an ordinary run, but for ``metrics``."""
    noise = random.Random(number)
    usual = {
        "gap_mean_0": 1e-7,
        "gap_mean_1": 0.1 * noise.uniform(0.8, 1.25),
        "entropy": 3.0 - 0.01 * number + noise.uniform(-0.05, 0.05),
        "ess": noise.uniform(0.93, 0.99),
        "clip_fraction": noise.uniform(0.02, 0.1),
        "grad_norm": noise.uniform(0.4, 0.8),
        "equal_groups": noise.choice([0.0, 0.125, 0.25]),
        "distinct_responses": noise.uniform(0.8, 1.0),
        "kl_reference": 0.2 * noise.uniform(0.8, 1.25),
    }
    fields = {
        "reward_mean": 0.4 + noise.uniform(-0.05, 0.05),
        "response_length_mean": noise.uniform(90, 110),
    }
    fields |= {name: metrics.pop(name) for name in list(metrics) if name in fields}
    return StepEvent(
        step=number + 1,
        version=number + 1,
        rows=ROWS,
        groups=list(range(GROUPS)),
        tokens_generated=0,
        tokens_trained=0,
        tokens_filtered=0,
        metrics=usual | metrics,
        **fields,
    )


def alarms(steps: Iterable[StepEvent | SyncEvent | StageEvent], **options: Any) -> list[AlarmEvent]:
    guard = Guard(GuardOptions(**{"gap_limit": 2e-4, **options}))
    return [alarm for event in steps for alarm in guard.observe(event)]


def run(length: int = 40, **at_twenty: Any) -> list[StepEvent]:
    return [step(number, **(at_twenty if number >= 20 else {})) for number in range(length)]


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("gap_mean_0", {"gap_mean_0": 0.01}),
    ("gap_mean_1", {"gap_mean_1": 1.5}),
    ("entropy", {"entropy": 0.5}),
    ("entropy", {"entropy": 6.0}),
    ("ess", {"ess": 0.3}),
    ("clip_fraction", {"clip_fraction": 0.7}),
    ("grad_norm", {"grad_norm": 30.0}),
    ("equal_groups", {"equal_groups": 1.0}),
    ("distinct_responses", {"distinct_responses": 1 / ROWS}),
    ("kl_reference", {"kl_reference": 4.0}),
    ("response_length_mean", {"response_length_mean": 20.0}),
    ("response_length_mean", {"response_length_mean": 900.0}),
]


@pytest.mark.parametrize(("metric", "wrong"), WRONG)
def test_a_metric_that_goes_wrong_is_one_alarm_at_its_first_step(
    metric: str, wrong: dict[str, Any]
) -> None:
    (alarm,) = alarms(run(**wrong))
    # steps of which the median is judged
    judged = {rule.metric: rule.steps for rule in TRENDS}
    assert (alarm.metric, alarm.step) == (metric, 21 + judged.get(metric, 1) // 2)
    assert alarm.reason.startswith(f"{words(metric)}: ")
    assert len(alarm.look) > 40
    assert alarm.value == next(iter(wrong.values()))
    assert alarms(run(**wrong), off=[metric]) == []


@pytest.mark.parametrize(
    "single",
    [
        {"ess": 0.3},
        {"clip_fraction": 0.7},
        {"mask_fraction": 0.95},
        {"grad_norm": 30.0},
        {"response_length_mean": 900.0},
    ],
)
def test_a_single_step_far_off_is_no_alarm(single: dict[str, float]) -> None:
    """A few tokens carry it, and the gradient is clipped."""
    usual = {"mask_fraction": 0.02}
    assert (
        alarms(step(number, **(single if number % 10 == 9 else usual)) for number in range(40))
        == []
    )


@pytest.mark.parametrize(
    ("metric", "borne", "past"), [("ess", 0.04, 0.01), ("mask_fraction", 0.88, 0.93)]
)
def test_a_metric_that_was_always_past_its_limit_is_an_alarm(
    metric: str, borne: float, past: float
) -> None:
    """Nothing changes, so no trend says it."""
    assert alarms(step(number, **{metric: borne}) for number in range(40)) == []
    (alarm,) = alarms(step(number, **{metric: past}) for number in range(40))
    assert alarm.metric == metric


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_an_ordinary_run_has_no_alarm(begin: int) -> None:
    assert alarms(step(begin % 100 + number) for number in range(60)) == []


def test_an_alarm_comes_again_only_after_the_metric_was_usual() -> None:
    pattern = [number in range(10, 15) or number in (20, 30, 31) for number in range(40)]
    found = alarms(
        step(number, kl_reference=9.0 if is_bad else 0.2) for number, is_bad in enumerate(pattern)
    )
    assert [alarm.step for alarm in found] == [11, 21, 31]


numbers = st.one_of(
    st.floats(0, 1),
    st.floats(0, 1e9),
    st.sampled_from([0.0, 1.0, float("nan"), float("inf"), None]),
)
metric_values = st.fixed_dictionaries(
    {}, optional={rule.metric: numbers for rule in TRENDS} | {"equal_groups": numbers}
)


@settings(deadline=None, max_examples=60)
@given(st.lists(metric_values, min_size=1, max_size=40))
def test_whatever_is_measured_alarms_are_of_known_metrics_and_depend_on_the_past_alone(
    values: list[Any],
) -> None:
    steps = [step(number, **metrics) for number, metrics in enumerate(values)]
    found = alarms(steps)
    assert {alarm.metric for alarm in found} <= set(METRICS)
    assert len({(alarm.metric, alarm.step) for alarm in found}) == len(found), (
        "at most one for each step"
    )
    half = len(steps) // 2
    assert [alarm for alarm in found if alarm.step <= half] == alarms(steps[:half])
    lasting: dict[str, int] = {}
    for alarm in found:
        before = lasting.setdefault(alarm.metric, -2)
        assert alarm.step > before + 1, (
            "an alarm lasts; two in a row have a usual step between them"
        )
        lasting[alarm.metric] = alarm.step


def test_rewards_that_are_learned_to_the_end_are_no_alarm_and_those_that_break_are() -> None:
    shares = [0.0] * 10 + [0.125, 0.25, 0.25, 0.5, 0.375, 0.625, 0.75, 0.875, 0.875] + [1.0] * 20
    rewards = [min(1.0, 0.3 + 0.04 * number) for number in range(len(shares))]
    learned = [
        step(n, equal_groups=s, reward_mean=r)
        for n, (s, r) in enumerate(zip(shares, rewards, strict=True))
    ]
    assert alarms(learned) == []
    broken = [
        step(number, equal_groups=1.0 if number >= 12 else 0.25, reward_mean=0.4 * (number < 12))
        for number in range(20)
    ]
    assert [(alarm.metric, alarm.step) for alarm in alarms(broken)] == [("equal_groups", 13)]


def test_rewards_that_never_differed_are_one_alarm() -> None:
    (alarm,) = alarms(step(number, equal_groups=1.0, reward_mean=0.0) for number in range(30))
    assert (alarm.metric, alarm.step) == ("equal_groups", WARM_UP)
    assert "first 8 steps" in alarm.reason


def test_one_text_is_no_alarm_where_few_texts_are_usual() -> None:
    yes_or_no = [
        step(number, distinct_responses=(1 + number % 2) / ROWS) for number in range(2, 40)
    ]
    found = alarms([step(1, distinct_responses=2 / ROWS), *yes_or_no])
    assert found == []
    assert [alarm.step for alarm in alarms([step(0, distinct_responses=1 / ROWS)])] == [1], (
        "at the first step it is"
    )


def test_gaps_at_equal_weights_are_held_to_the_limits_of_the_newest_probe() -> None:
    def swap(limit: float) -> SyncEvent:
        return SyncEvent(
            worker="rollout-0", version=1, bytes=1, gap_mean=limit / 10, gap_mean_limit=limit
        )

    assert alarms([step(0, gap_mean_0=0.01)], gap_limit=0.0) == [], "no limit is known"
    assert [
        one.metric for one in alarms([swap(0.004), step(1, gap_mean_0=0.01)], gap_limit=0.0)
    ] == ["gap_mean_0"]
    assert alarms([swap(0.1), step(1, gap_mean_0=0.01)]) == [], "as in bfloat16"
    resumed = step(0, gap_mean_resumed=0.1)
    assert alarms([resumed]) == [], "the recipe keeps the KV cache"
    (alarm,) = alarms([resumed], rebuilds=True)
    assert alarm.metric == "gap_mean_resumed"
    assert "KV cache" in alarm.look


def test_a_probe_that_moves_to_its_limit_is_an_alarm() -> None:
    def swap(version: int, share: float) -> SyncEvent:
        return SyncEvent(
            worker="rollout-0", version=version, bytes=1, gap_mean=share * 0.1, gap_mean_limit=0.1
        )

    (alarm,) = alarms(swap(version, 0.05 if version < 20 else 0.97) for version in range(1, 30))
    assert (alarm.metric, alarm.step) == ("probe_share", 20)


def test_a_skipped_step_is_not_judged() -> None:
    assert (
        alarms(
            [
                *run(20),
                StepEvent.of({**step(20).wire(), "skipped": "loss is not finite", "ess": 0.0}),
            ]
        )
        == []
    )


def told(worker: str = "environment-0", **trajectories: float) -> StageEvent:
    numbers = dict.fromkeys(("busy", "waiting_input", "waiting_room", "other", "wall"), 0.0)
    counts = dict.fromkeys(("rows", "tokens", "parked", "queue_depth", "in_flight"), 0)
    return StageEvent(
        stage="environment", worker=worker, **numbers, **counts, trajectories=trajectories
    )


def test_an_environment_that_always_fails_is_an_alarm_and_one_that_fails_often_is_none() -> None:
    failing = [told(turns=n, ended_failed=n, ended_done=0, open=4) for n in range(0, 100, 4)]
    (alarm,) = alarms(failing)
    assert (alarm.metric, alarm.step, alarm.value) == ("failed_environments", 0, 1.0)
    assert "32 of 32 trajectories" in alarm.reason
    (alarm,) = alarms([told(turns=100, ended_failed=100, ended_done=1)])  # all before it is told
    assert "100 of 101 trajectories" in alarm.reason
    often = [told(turns=n, ended_dropped=n - n // 4, ended_done=n // 4) for n in range(0, 100, 4)]
    assert alarms(often) == []


def test_a_program_that_goes_back_at_every_turn_is_an_alarm_and_one_that_does_at_times_is_none() -> (
    None
):
    ordinary = [step(number) for number in range(3)]
    back = [told(turns=4 * n, branches=3 * n, ended_done=n) for n in range(0, 100, 4)]
    (alarm,) = alarms([*ordinary, *back])
    assert (alarm.metric, alarm.step, alarm.value) == ("branches", 3, 1.0)
    assert alarms([told(turns=4 * n, branches=n, ended_done=n) for n in range(0, 100, 4)]) == []


def test_a_worker_that_begins_again_is_judged_by_its_own_trajectories() -> None:
    events = [told(turns=n, ended_done=n, ended_failed=0) for n in (0, 40, 80)]
    events += [told(turns=n, ended_failed=n) for n in (2, 20)]
    assert alarms(events) == []
    (alarm,) = alarms([*events, told(turns=34, ended_failed=34)])
    lacking = [told(turns=40, ended_done=40), told(turns=40, ended_failed=40)]
    assert [alarm.metric for alarm in alarms(lacking)] == ["failed_environments"]
    assert alarm.metric == "failed_environments"
