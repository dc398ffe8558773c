"""The autoscaling policy, simulated; and one run that follows its load."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.autoscale import SMOKE, measure
from orchestration.elastic.autoscale import PATIENCE, AutoscalePolicy, Shares, Window
from orchestration.recipe.problems import RecipeError
from pipeline.events import Event
from tests.orchestration.runs import MOCK, recipe


def shares(rollouts: int, need: float) -> Shares:
    """Of a run whose trainer is kept busy by ``need`` rollouts that are always busy."""
    return Shares(waits=max(0.0, 1 - rollouts / need), busy=min(1.0, need / rollouts))


def simulate(policy: AutoscalePolicy, rollouts: int, needs: list[float], noise: list[float]) -> list[int]:
    """The number of rollouts after each window, with the ``needs`` of the windows and errors of what is measured."""
    numbers = []
    for need, error in zip(needs, noise, strict=True):
        seen = shares(rollouts, need)
        rollouts = policy.decide(rollouts, Shares(max(0.0, seen.waits + error), min(1.0, max(0.0, seen.busy - error))))
        numbers.append(rollouts)
    return numbers


PHASE = 20  # windows

NEEDS = st.floats(1.0, 16.0)


@given(
    begin=st.integers(1, 16),
    needs=st.tuples(NEEDS, NEEDS, NEEDS),
    noise=st.lists(st.floats(-0.04, 0.04), min_size=3 * PHASE, max_size=3 * PHASE),
)
def test_it_settles_near_the_need_after_each_change_of_the_load_and_then_stays(
    begin: int, needs: tuple[float, float, float], noise: list[float]
) -> None:
    """Never so few that the trainer waits for more than a tenth, nor more than needed but for what stays free."""
    numbers = simulate(AutoscalePolicy(1, 16), begin, [need for need in needs for _ in range(PHASE)], noise)
    for phase, need in enumerate(needs):
        settled = numbers[phase * PHASE + 3 * PATIENCE : (phase + 1) * PHASE]
        for number in settled:
            assert shares(number, need).waits < 0.15
            assert number <= min(16, math.ceil(need * 1.25) + 1)
        changes = sum(a != b for a, b in itertools.pairwise(settled))
        assert changes <= 1, "it swings"


@given(
    begin=st.integers(1, 30),
    least=st.integers(1, 4),
    more=st.integers(0, 6),
    waits=st.floats(0, 1),
    busy=st.floats(0, 1),
)
def test_the_bounds_hold_and_no_step_is_more_than_double(
    begin: int, least: int, more: int, waits: float, busy: float
) -> None:
    policy = AutoscalePolicy(least, least + more)
    for _ in range(PATIENCE + 1):
        after = policy.decide(begin, Shares(waits, busy))
        assert least <= after <= least + more
        assert after <= max(2 * begin, least)


def test_a_lull_of_one_window_ends_no_worker() -> None:
    numbers = simulate(AutoscalePolicy(1, 8), 4, [3.2, 1.0, 3.2, 1.0, 1.0, 3.2], [0.0] * 6)
    assert numbers == [4] * 6


def test_many_waiting_rollouts_are_not_added_to_while_the_trainer_waits_for_another_stage() -> None:
    """A slow reward lets both wait."""
    policy = AutoscalePolicy(1, 8)
    assert [policy.decide(4, Shares(waits=0.5, busy=0.3)) for _ in range(5)] == [4] * 5


def report(stage: str, worker: str, wall: float, **spent: float) -> Event:
    data = {"stage": stage, "worker": worker, "wall": wall, "busy": 0.0, "waiting_input": 0.0, **spent}
    return Event(id="1-0", kind="stage", time=0.0, data=data)


def test_a_window_has_the_times_since_the_one_before_it() -> None:
    window = Window()
    window.add(report("update", "update-0", 100.0, waiting_input=90.0))
    window.add(report("rollout", "rollout-0", 100.0, busy=10.0))
    assert window.shares() is None
    window.add(report("update", "update-0", 110.0, waiting_input=92.0))
    window.add(report("rollout", "rollout-0", 110.0, busy=20.0))
    window.add(report("rollout", "rollout-1", 1.0, busy=0.0))
    window.add(report("rollout", "rollout-1", 11.0, busy=5.0))
    assert window.shares() == (2, Shares(waits=pytest.approx(0.2), busy=pytest.approx(0.75)))
    window.add(report("update", "update-0", 2.0, waiting_input=1.0))  # restarted
    window.add(report("update", "update-0", 4.0, waiting_input=2.0))
    window.add(report("rollout", "rollout-0", 120.0, busy=25.0))
    assert window.shares() == (1, Shares(waits=pytest.approx(0.5), busy=pytest.approx(0.5))), "rollout-1 has left"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (
            {"launch__autoscale": {"max": 4}, "rollout__workers": 5},
            r"launch\.autoscale\.max = 4: and min = 1 leave out",
        ),
        ({"launch__autoscale": {"max": 4}, "pipeline__staleness": 0}, r"launch\.autoscale\.max = 4: has no effect"),
        ({"launch__autoscale": {"max": 4}, "external__stages": ["rollout"]}, r"has no rollout workers to scale"),
    ],
)
def test_recipes_without_a_number_to_follow_are_refused(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RecipeError, match=wrong):
        recipe(MOCK, **changes)


async def test_a_run_follows_its_load(tmp_path: Path) -> None:
    """More response tokens, more workers."""
    arm = await measure(SMOKE, 0, tmp_path / "run")
    assert max(arm.numbers) > arm.numbers[0] == SMOKE.least
