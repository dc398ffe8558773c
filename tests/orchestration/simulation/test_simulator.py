"""The simulated run keeps the real one's rules, and takes the time that can be worked out by
hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.assumed import LognormalLengths
from orchestration.recipe.schema import Recipe
from orchestration.simulation.costs import Costs
from orchestration.simulation.forecast import forecast, setup_of
from orchestration.simulation.mock_costs import mock_costs, mock_lengths
from orchestration.simulation.simulator import Setup, Simulator, Step
from pipeline.schedule.staleness import StalenessPlan
from tests.orchestration.runs import MOCK, recipe

COSTS = Costs(row_rate=100.0, step_seconds=0.5, token_seconds=0.0, saturation_rows=16)


def simulated(
    plan: StalenessPlan, steps: int = 12, costs: Costs = COSTS, **setup: Any
) -> tuple[Simulator, list[Step]]:
    given = {"group_size": 4, "max_rows": 16, "most_rows": 16, "first_groups": 4, **setup}
    simulator = Simulator(
        Setup(plan, steps=steps, **given),
        costs,
        LognormalLengths(given["group_size"], 200, median=50, sigma=1),
    )
    return simulator, simulator.run()


@settings(max_examples=150, deadline=None)
@given(
    bound=st.integers(0, 4),
    groups=st.integers(1, 6),
    window=st.integers(1, 12),
    replicas=st.integers(1, 5),
    rows=st.sampled_from([4, 8, 16]),
    budget=st.sampled_from([0, 0, 7, 40]),
    cut=st.booleans(),
    at_once=st.integers(0, 2),
    dropped=st.sampled_from([0.0, 0.0, 0.3]),
    failures=st.sampled_from([0.0, 0.0, 200.0]),
    references=st.integers(0, 2),
    colocated=st.booleans(),
    paced=st.booleans(),
    cores=st.sampled_from([0, 0, 2]),
    seed=st.integers(0, 99),
)
def test_each_step_trains_whole_groups_within_the_bound(
    bound: int,
    groups: int,
    window: int,
    replicas: int,
    rows: int,
    dropped: float,
    cores: int,
    **others: Any,
) -> None:
    plan = StalenessPlan(bound, groups, window)
    costs = Costs(
        row_rate=100.0,
        step_seconds=0.3,
        token_seconds=1e-4,
        saturation_rows=8,
        prompt_tokens=5,
        prefill_rate=1000.0,
        prefill_seconds=0.01,
        prefill_token_seconds=1e-4,
        response_seconds=0.002,
        cores=cores,
        other_threads=0.5,
        swap_seconds=0.2,
        copy_seconds=0.1,
        reference_token_seconds=1e-4,
        between_steps=0.02,
        restart_seconds=3.0,
        dropped=dropped,
    )
    simulator, steps = simulated(
        plan,
        8,
        costs,
        replicas=replicas,
        max_rows=rows,
        most_rows=max(rows, 4 * groups),
        first_groups=groups,
        **others,
    )
    assert len(steps) == 8
    for before, step in zip([None, *steps], steps, strict=False):
        assert step.rows == sum(step.staleness.values()) == 4 * groups
        assert min(step.staleness) >= 0
        assert max(step.staleness) <= plan.max_age
        assert before is None or step.at >= before.at + step.train_seconds - 1e-9
    again, same = simulated(
        plan,
        8,
        costs,
        replicas=replicas,
        max_rows=rows,
        most_rows=max(rows, 4 * groups),
        first_groups=groups,
        **others,
    )
    assert same == steps, "the same arguments, the same run"
    assert again.remade_tokens == simulator.remade_tokens


def test_equal_lengths_take_the_time_that_follows_from_the_rates() -> None:
    """η = 0: 4 groups of 4 rows of 50 tokens, 16 at once at 100 tokens/s: 0.5 s, then a step of 0.5
    s. η = 1: beside it."""
    for bound, seconds in ((0, 1.0), (1, 0.5)):
        setup = Setup(StalenessPlan(bound, 4), 4, 20, max_rows=16, most_rows=16, first_groups=4)
        found = forecast(setup, COSTS, lambda group: [50] * 4)
        assert found.step_seconds == pytest.approx(seconds)
        assert found.tokens_per_second == pytest.approx(16 * 50 / seconds)
        assert found.training == pytest.approx(0.5 / seconds)
        assert found.generation == pytest.approx(0.5 / seconds)
        assert found.staleness_max == found.staleness_mean == bound
        assert found.seconds == pytest.approx(20 * seconds + (0.5 if bound else 0.0))


@pytest.mark.parametrize(
    ("cores", "other", "seconds"),
    [(0, 0.0, 0.5), (1, 0.0, 1.0), (2, 0.0, 0.5), (2, 1.0, 0.75), (4, 1.0, 0.5)],
)
def test_engines_that_share_cores_slow_each_other_down(
    cores: int, other: float, seconds: float
) -> None:
    """Generation and training need 0.5 s each, and run beside each other, on a thread each."""
    setup = Setup(StalenessPlan(1, 4), 4, 20, max_rows=16, most_rows=16, first_groups=4)
    found = forecast(
        setup, replace(COSTS, cores=cores, other_threads=other), lambda group: [50] * 4
    )
    assert found.step_seconds == pytest.approx(seconds)
    assert found.training == pytest.approx(1.0)


def test_a_step_slows_down_for_as_long_as_others_compute() -> None:
    """One core: 0.1 s of generation takes 0.2 s beside the first 0.1 s of a step of 0.5 s, the rest
    of which is alone."""
    setup = Setup(StalenessPlan(1, 4), 4, 20, max_rows=16, most_rows=16, first_groups=4)
    found = forecast(setup, replace(COSTS, cores=1), lambda group: [10] * 4)
    assert found.step_seconds == pytest.approx(0.6)


def test_more_rows_than_saturate_share_the_rate() -> None:
    setup = Setup(StalenessPlan(0, 8), 4, 4, max_rows=32, most_rows=32, first_groups=8)
    found = forecast(setup, COSTS, lambda group: [50] * 4)
    assert found.step_seconds == pytest.approx(32 * 50 / (16 * 100) + 0.5)


def test_a_swap_stops_decoding_and_a_rolling_one_only_a_replica() -> None:
    costs = Costs(
        row_rate=100.0, step_seconds=0.01, token_seconds=0.0, saturation_rows=4, swap_seconds=0.25
    )
    plan = StalenessPlan(2, 4)
    times = {}
    for at_once in (0, 1):
        _, steps = simulated(
            plan, 20, costs, replicas=4, max_rows=4, most_rows=4, first_groups=1, at_once=at_once
        )
        times[at_once] = steps[-1].at
    free, _ = simulated(
        plan,
        20,
        replace(costs, swap_seconds=0.0),
        replicas=4,
        max_rows=4,
        most_rows=4,
        first_groups=1,
    )
    assert min(times.values()) > 1.1 * free.steps[-1].at
    assert times[1] < 1.1 * times[0]


def test_stragglers_lost_replicas_and_dropped_groups_cost_time() -> None:
    plan = StalenessPlan(1, 4)
    plain = simulated(StalenessPlan(1, 4))[1][-1].at
    lengths = LognormalLengths(4, 20_000, median=50, sigma=1, stragglers=0.01, times=100)
    slow = Simulator(
        Setup(plan, 4, 12, max_rows=16, most_rows=16, first_groups=4), COSTS, lengths
    ).run()
    assert slow[-1].at > 1.5 * plain
    lost, steps = simulated(plan, failures=720.0, replicas=2, max_rows=8, most_rows=8)
    assert lost.remade_tokens > 0
    assert steps[-1].at > plain
    _, again = simulated(plan, costs=replace(COSTS, dropped=0.5))
    assert again[-1].at > 1.2 * plain


def test_the_mock_engines_lengths_and_costs_are_the_recipes() -> None:
    of = recipe(MOCK, rollout__mock={"time_scale": 0.02, "median_tokens": 12.0})
    lengths = mock_lengths(of)
    costs = mock_costs(of, between_steps=0.0)
    assert len(lengths(3)) == of.algorithm.group_size
    assert lengths(3) == mock_lengths(of)(3) != lengths(4)
    assert max(lengths(3)) <= of.rollout.max_tokens
    assert costs.row_rate == 50.0 / 0.02
    assert costs.sources["row_rate"] == "the mock engines' options"


def test_the_setup_is_the_recipes() -> None:
    of: Recipe = recipe(
        MOCK, rollout__workers=3, pipeline__staleness=2, pipeline__window=2, rollout__budget=8
    )
    setup = setup_of(of)
    assert (setup.replicas, setup.plan.slack, setup.plan.window, setup.budget, setup.at_once) == (
        3,
        1,
        2,
        8,
        1,
    )
    assert setup.most_rows == of.rollout.max_rows
    alone = setup_of(recipe(MOCK, train__groups_per_step=20, algorithm__group_size=4))
    assert alone.most_rows == 80, "one worker takes a whole step's groups"
