"""The autoscaling policy, simulated; and one run that follows its load."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.runs.autoscale import SMOKE, arm_of
from benchmarks.runs.executed import executed
from orchestration.recipe.problems import RecipeError
from orchestration.supervise.autoscale import PATIENCE, AutoscalePolicy, Load, Window
from pipeline.data.events import Event
from tests.orchestration.runs import MOCK, recipe


def load(rollouts: float, need: float) -> Load:
    """Of a run whose trainer is kept busy by ``need`` rollouts that are always busy."""
    return Load(math.ceil(rollouts), busy=min(rollouts, need), waits=max(0.0, 1 - rollouts / need))


def simulate(
    policy: AutoscalePolicy, rollouts: int, needs: list[float], noise: list[float]
) -> list[int]:
    """The number of rollouts after each window, with the ``needs`` of the windows and errors of
    what is measured."""
    numbers = []
    for need, error in zip(needs, noise, strict=True):
        seen = load(rollouts, need)
        busy = min(1.0, max(0.0, seen.busy / rollouts - error))
        waits = max(0.0, seen.waits + error)
        rollouts = policy.decide(rollouts, Load(rollouts, rollouts * busy, waits))
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
    """Never so few that the trainer waits for more than a tenth, nor more than needed but for what
    stays free."""
    numbers = simulate(
        AutoscalePolicy(1, 16), begin, [need for need in needs for _ in range(PHASE)], noise
    )
    for phase, need in enumerate(needs):
        settled = numbers[phase * PHASE + 3 * PATIENCE : (phase + 1) * PHASE]
        for number in settled:
            assert load(number, need).waits < 0.15
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
        after = policy.decide(begin, Load(begin, begin * busy, waits))
        assert least <= after <= least + more
        assert after <= max(2 * begin, least)


def duration(
    needs: list[float], decide: Callable[[int, Load], int], rollouts: int, window: float = 4.0
) -> float:
    """Seconds of a run whose steps take a second each when samples are there, and as many rollouts
    as ``needs`` has for a step make its samples in a second. Rollouts are at most two steps ahead,
    and a new one works a second after it is asked for."""
    tick = 0.01
    now = 0.0
    done = 0.0
    ahead = 0.0
    asked = rollouts
    busy = waits = 0.0
    begun = deque[int](maxlen=100)
    while done < len(needs):
        begun.append(asked)
        rollouts = min(asked, begun[0])
        made = min(
            tick * rollouts / needs[min(int(done + ahead), len(needs) - 1)], 2 + tick - ahead
        )
        busy += made * needs[min(int(done + ahead), len(needs) - 1)]
        trained = min(tick, ahead + made)
        waits = waits + tick - trained
        done = done + trained
        ahead = ahead + made - trained
        now = now + tick
        if now % window < tick:
            asked = decide(asked, Load(rollouts, busy / window, waits / window))
            busy = waits = 0.0
    return now


@pytest.mark.parametrize(("least", "most"), [(1.6, 4.8), (2.6, 10.4), (3.2, 6.4)])
def test_it_is_within_a_tenth_of_the_best_fixed_number_while_the_load_changes_twice(
    least: float, most: float
) -> None:
    """It begins with one rollout, and may be slower in the windows after the begin and after the
    change to more."""
    needs = [need for need in (least, most, least) for _ in range(30)]
    best = min(duration(needs, lambda asked, _: asked, number) for number in range(1, 13))
    assert best == pytest.approx(len(needs), rel=0.01)
    assert duration(needs, AutoscalePolicy(1, 16).decide, 1) < 1.1 * best


def test_a_lull_of_one_window_ends_no_worker() -> None:
    numbers = simulate(AutoscalePolicy(1, 8), 4, [3.2, 1.0, 3.2, 1.0, 1.0, 3.2], [0.0] * 6)
    assert numbers == [4] * 6


def test_many_waiting_rollouts_are_not_added_to_while_the_trainer_waits_for_another_stage() -> None:
    """A slow reward lets both wait."""
    policy = AutoscalePolicy(1, 8)
    assert [policy.decide(4, Load(4, busy=1.2, waits=0.5)) for _ in range(5)] == [4] * 5


def test_rollouts_that_do_not_come_are_asked_for_and_no_more_than_are_needed() -> None:
    """Two work, and two more are on their way, or have no host: what the two do is known, and is no
    reason for more."""
    policy = AutoscalePolicy(1, 16)
    assert [policy.decide(4, load(2, 3.8)) for _ in range(PATIENCE + 1)] == [4] * (PATIENCE + 1)
    assert policy.decide(4, load(2, 9.0)) == 4, (
        "double of those that work, not of those that were asked for"
    )
    assert [policy.decide(4, load(2, 1.0)) for _ in range(PATIENCE)] == [4, 4, 2], (
        "too many were asked for"
    )


@given(before=st.integers(1, 8), joins=st.floats(0, 1), need=st.floats(1.0, 16.0))
def test_a_window_in_which_rollouts_join_has_the_need_of_any_other(
    before: int, joins: float, need: float
) -> None:
    after = 2 * before
    mean = before * joins + after * (1 - joins)
    if after <= need:
        assert load(mean, need).busy / (1 - load(mean, need).waits) == pytest.approx(need)


def report(stage: str, worker: str, wall: float, **spent: float) -> Event:
    data = {
        "stage": stage,
        "worker": worker,
        "wall": wall,
        "busy": 0.0,
        "waiting_input": 0.0,
        "rows": 1,
        **spent,
    }
    return Event(id="1-0", kind="stage", time=0.0, data=data)


def test_a_window_has_the_times_since_the_one_before_it() -> None:
    window = Window()
    window.add(report("update", "update-0", 100.0, waiting_input=90.0))
    window.add(report("rollout", "rollout-0", 100.0, busy=10.0))
    assert window.load() is None
    window.add(report("update", "update-0", 110.0, waiting_input=92.0))
    window.add(report("rollout", "rollout-0", 110.0, busy=20.0))
    window.add(report("rollout", "rollout-1", 1.0, busy=0.0))
    window.add(report("rollout", "rollout-1", 6.0, busy=5.0))  # it has joined in the middle
    assert window.load() == Load(2, busy=pytest.approx(1.5), waits=pytest.approx(0.2))
    window.add(report("update", "update-0", 2.0, waiting_input=1.0))  # restarted
    window.add(report("update", "update-0", 12.0, waiting_input=6.0))
    window.add(report("rollout", "rollout-0", 120.0, busy=25.0))
    assert window.load() == Load(1, busy=pytest.approx(5 / 12), waits=pytest.approx(0.5)), (
        "rollout-1 has left"
    )


def test_the_wait_for_the_first_step_is_in_no_window() -> None:
    window = Window()
    window.add(report("update", "update-0", 1.0, waiting_input=1.0, rows=0))
    window.add(report("rollout", "rollout-0", 1.0, busy=1.0))
    window.add(report("update", "update-0", 20.0, waiting_input=20.0, rows=0))
    window.add(report("rollout", "rollout-0", 20.0, busy=20.0))
    window.add(report("update", "update-0", 21.0, waiting_input=20.0))
    assert window.load() is None
    window.add(report("rollout", "rollout-0", 31.0, busy=31.0))
    window.add(report("update", "update-0", 32.0, waiting_input=22.0))
    assert window.load() == Load(1, busy=pytest.approx(1.0), waits=pytest.approx(2 / 11))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (
            {"launch__autoscale": {"max": 4}, "rollout__workers": 5},
            r"launch\.autoscale\.max = 4: and min = 1 leave out",
        ),
        (
            {"launch__autoscale": {"max": 4}, "pipeline__staleness": 0},
            r"launch\.autoscale\.max = "
            r"4: has no effect",
        ),
        (
            {"launch__autoscale": {"max": 4}, "external__stages": ["rollout"]},
            r"has no rollout workers to scale",
        ),
    ],
)
def test_recipes_without_a_number_to_follow_are_refused(
    changes: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(RecipeError, match=wrong):
        recipe(MOCK, **changes)


async def test_a_run_follows_its_load_and_its_rollouts_share_the_work(tmp_path: Path) -> None:
    """More response tokens, more workers, of which none takes what others have room for."""
    events = await executed(SMOKE.recipe(0), tmp_path / "run")
    arm = arm_of(0, events)
    assert max(arm.numbers) > arm.numbers[0] == SMOKE.least
    assert (
        max(
            e.data["in_flight"]
            for e in events
            if e.kind == "stage" and e.data["stage"] == "rollout"
        )
        <= SMOKE.rows
    )
