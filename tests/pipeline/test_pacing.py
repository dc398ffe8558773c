"""Groups enter as late as the trainer allows: no fresher samples cost no throughput."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median

import pytest

from benchmarks.planning.assumed import LognormalLengths
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.simulation.costs import Costs
from orchestration.simulation.forecast import Forecast, forecast
from orchestration.simulation.simulator import Setup
from pipeline.schedule.pacing import MARGIN, STEPS, Pacer
from pipeline.schedule.staleness import StalenessPlan
from tests.orchestration.runs import MOCK, complete, recipe

GROUPS = 16
SIZE = 4
ROWS = 32


def both(
    bound: int,
    balance: float,
    sigma: float,
    window: int = 1,
    *,
    dropped: float = 0.0,
    steps: int = 60,
    **changes: float,
) -> tuple[Forecast, Forecast]:
    """Forecasts with groups that enter early, and late.

    ``balance``: seconds of training over seconds of generation.
    """
    lengths = LognormalLengths(SIZE, 400, median=60, sigma=sigma)
    tokens = sum(sum(lengths(group)) for group in range(640)) / 640 * GROUPS
    costs = Costs(
        row_rate=tokens / ROWS,  # a step is generated in one second
        step_seconds=0.1 * balance,
        token_seconds=0.9 * balance / tokens,
        saturation_rows=ROWS,
        swap_seconds=0.005,
        copy_seconds=0.02,
        between_steps=0.02,
        dropped=dropped,
    )
    plan = StalenessPlan(bound, GROUPS, window)
    setup = Setup(plan, SIZE, steps=steps, max_rows=ROWS, most_rows=ROWS, first_groups=GROUPS)
    setup = replace(setup, **changes)  # type: ignore[arg-type]
    return forecast(setup, costs, lengths), forecast(replace(setup, paced=True), costs, lengths)


@pytest.mark.parametrize("balance", [0.5, 0.8, 1.0, 1.2, 1.5, 2.5, 4.0])
@pytest.mark.parametrize("sigma", [0.3, 1.0])
@pytest.mark.parametrize(("bound", "window"), [(2, 1), (4, 1), (4, 8)])
def test_as_fast_and_nowhere_older(balance: float, sigma: float, bound: int, window: int) -> None:
    early, late = both(bound, balance, sigma, window)
    assert late.tokens_per_second >= 0.99 * early.tokens_per_second
    assert late.staleness_mean <= early.staleness_mean + 0.01
    assert late.staleness_max <= bound
    if balance >= 2.5 and sigma < 1:  # generation has time to spare, also for the longest response
        least = 1.0  # a sample that was made beside a step is one version old
        assert late.staleness_mean - least <= 0.5 * (early.staleness_mean - least)
    if balance >= 4 and bound == 4:
        assert late.staleness_mean <= 0.6 * early.staleness_mean


@pytest.mark.parametrize("changes", [{"dropped": 0.3}, {"replicas": 3}, {"budget": 32}])
def test_as_fast_with_drops_replicas_and_cuts(changes: dict[str, float]) -> None:
    early, late = both(4, 2.0, 0.5, **changes)
    assert late.tokens_per_second >= 0.99 * early.tokens_per_second
    assert late.staleness_mean <= 0.75 * early.staleness_mean


@pytest.mark.parametrize(("failures", "least"), [(1.0, 0.99), (6.0, 0.98), (60.0, 0.9)])
def test_what_failures_of_the_only_replica_cost(failures: float, least: float) -> None:
    """``failures`` an hour, each 30 s long, with steps of 2 s.

    Groups that enter early are a reserve while nothing is generated: each failure costs up to
    ``bound`` - 1 steps more without them.
    """
    early, late = both(4, 2.0, 0.5, failures=failures, steps=3000)
    assert late.tokens_per_second >= least * early.tokens_per_second
    assert late.staleness_mean <= 0.75 * early.staleness_mean


def test_lead_and_step_follow_what_was_seen() -> None:
    """Steps of 10 s, whose groups need 4 s: they enter 4 s and a margin before the next step
    begins."""
    pacer = Pacer(StalenessPlan(3, 2))
    size = 2
    for version in range(STEPS + 1):
        assert pacer.lead == inf
        pacer.see(10.0 * version, version, admitted=(version + 1) * size, done=version * size)
        pacer.see(
            10.0 * version + 0.5, version, admitted=(version + 2) * size, done=(version + 1) * size
        )
        pacer.see(
            10.0 * version + 4.5, version, admitted=(version + 2) * size, done=(version + 2) * size
        )
    assert pacer.lead == MARGIN * 4.0
    begun = 10.0 * STEPS
    due = 10.0 - MARGIN * 4.0
    assert pacer.limit(begun + due - 0.1) == (STEPS + 1) * size
    assert pacer.limit(begun + due + 0.1) == (STEPS + 2) * size
    assert pacer.limit(begun + 100.0) == (STEPS + 4) * size, "the bound ends it"


def test_a_step_that_waited_counts_without_its_wait() -> None:
    pacer = Pacer(StalenessPlan(2, 1))
    now = 0.0
    for version in range(STEPS + 1):
        pacer.see(now, version, admitted=version + 1, done=version)
        # complete 6 s after it could have begun
        pacer.see(now + 6.0, version, admitted=version + 1, done=version + 1)
        now += 7.0
    assert pacer.lead == MARGIN * 6.0
    assert pacer.limit(now - 7.0 + 0.1) == STEPS + 3, (
        "the trainer needs one second: all that the bound allows"
    )


async def test_a_run_whose_trainer_is_the_busiest_trains_fresh_samples(tmp_path: Path) -> None:
    """Five versions may pass; a group takes a fifth of a step."""
    slow = {"step_seconds": 0.6, "token_seconds": 0.0}
    quick = {"median_tokens": 8, "sigma": 0.2, "row_rate": 100.0, "prefill_rate": 1e6}
    of = recipe(
        MOCK,
        pipeline__staleness=5,
        train__steps=14,
        train__mock=slow,
        rollout__mock=quick,
        checkpoint__every=14,
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished"
    steps = watched.of("step")
    assert len(steps) == 14
    assert max(step["staleness_max"] for step in steps[:6]) >= 2, "before the gate has measured"
    assert median(step["staleness_mean"] for step in steps[9:]) <= 2
