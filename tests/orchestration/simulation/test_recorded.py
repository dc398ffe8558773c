"""Costs measured in a real run are those of its engines, and a forecast from them is as fast as the
run."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.runs.executed import executed
from orchestration.recipe.devices import cores_here
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.simulation.costs import Costs, EngineProfile
from orchestration.simulation.forecast import forecast, setup_of
from orchestration.simulation.mock_costs import mock_costs
from orchestration.simulation.recorded import (
    SMALLER,
    NotMeasured,
    _between,
    _divided,
    _Measured,
    measured_costs,
    recorded_costs,
)
from pipeline.data.events import Event, Kind
from tests.orchestration.runs import MOCK, TINY, recipe

MOST_WAITING = 0.02  # of a run's time
SLOW: dict[str, Any] = {  # steps of half a second, so that the machine's own time weighs little
    "rollout__mock": {
        "row_rate": 60.0,
        "saturation_rows": 16,
        "median_tokens": 24.0,
        "sigma": 0.3,
        "swap_seconds": 0.03,
    },
    "train__mock": {"step_seconds": 0.1, "token_seconds": 2e-4},
    "rollout__max_rows": 16,
    "rollout__max_tokens": 64,
    "train__steps": 8,
}


def waited() -> float:
    """Seconds for which threads of this process had no core though they were ready."""
    found = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            found += int(path.read_text().split()[1])
    return found / 1e9


def judged_where_cores_are_free(
    test: Callable[[Path], Awaitable[None]],
) -> Callable[[Path], Awaitable[None]]:
    """Engines sleep for as long as their options say, so a run that waits for cores besides is
    slower than that. What it takes then says something about the machine: such a run cannot fail
    the test."""

    @functools.wraps(test)
    async def judged(tmp_path: Path) -> None:
        began = time.monotonic()
        before = waited()
        try:
            await test(tmp_path)
        except AssertionError:
            share = (waited() - before) / (time.monotonic() - began)
            if share > MOST_WAITING:
                pytest.skip(f"it waited for cores for {share:.0%} of the time")
            raise

    return judged


@judged_where_cores_are_free
async def test_costs_of_a_run_that_waits_for_generation(tmp_path: Path) -> None:
    of = recipe(MOCK, **SLOW, pipeline__staleness=0)
    events = await executed(of, tmp_path / "run")
    costs, lengths = measured_costs(events, tmp_path / "run")
    options = mock_costs(of)
    assert costs.row_rate == pytest.approx(options.row_rate, rel=0.25), "fitted by simulation"
    assert 0.03 <= costs.swap_seconds < 0.3
    assert 0 < costs.between_steps < 0.5
    assert 0 < costs.restart_seconds < 30
    assert costs.dropped == 0
    assert set(costs.sources.values()) == {"measured in run"}
    measured = [sorted(lengths(group)) for group in range(200)]
    assert {len(group) for group in measured} == {of.algorithm.group_size}
    assert len({tuple(group) for group in measured}) > 8, "drawn from the samples' groups"
    steps = [event for event in events if event.kind == "step"]
    tokens = sum(step.data["rows"] * step.data["response_length_mean"] for step in steps[2:7])
    found = forecast(setup_of(of), costs, lengths)
    assert found.tokens_per_second == pytest.approx(
        tokens / (steps[6].time - steps[1].time), rel=0.1
    )


@judged_where_cores_are_free
async def test_costs_of_a_run_that_waits_for_training(tmp_path: Path) -> None:
    """Generation is busy for half of the time: its rate is the one with which the simulated run's
    is too."""
    slow = {**SLOW, "train__mock": {"step_seconds": 1.2, "token_seconds": 0.0}, "train__steps": 10}
    of = recipe(MOCK, **slow, pipeline__staleness=2)
    events = await executed(of, tmp_path / "run")
    costs, lengths = measured_costs(events, tmp_path / "run")
    assert costs.row_rate == pytest.approx(mock_costs(of).row_rate, rel=0.3)
    found = forecast(setup_of(of), costs, lengths)
    assert found.busiest == "training"
    assert found.step_seconds == pytest.approx(1.25, rel=0.1)


@judged_where_cores_are_free
async def test_a_run_with_smaller_steps_tells_what_a_step_takes_without_tokens(
    tmp_path: Path,
) -> None:
    slow = {**SLOW, "rollout__mock": {**SLOW["rollout__mock"], "sigma": 0.0}}
    slow |= {"train__mock": {"step_seconds": 0.3, "token_seconds": 1e-3}}
    of = recipe(MOCK, **slow, pipeline__staleness=0)
    events = await executed(of, tmp_path / "run")
    EngineProfile(1 / 60, 0.0, 0.0, 0.0, 0.0).write(tmp_path / "run")
    assert measured_costs(events, tmp_path / "run")[0].step_seconds == 0, (
        "all steps have as many tokens"
    )
    fewer = recipe(
        MOCK, **slow, pipeline__staleness=0, train__groups_per_step=of.train.groups_per_step // 2
    )
    await executed(fewer, tmp_path / "run" / SMALLER)
    costs, lengths = measured_costs(events, tmp_path / "run")
    assert costs.step_seconds == pytest.approx(0.3, rel=0.2)
    assert costs.token_seconds == pytest.approx(1e-3, rel=0.3), "prompts are not counted"
    steps = [event for event in events if event.kind == "step"]
    assert forecast(setup_of(of), costs, lengths).step_seconds == pytest.approx(
        (steps[6].time - steps[1].time) / 5, rel=0.1
    )


@pytest.mark.parametrize(("of_response", "of_swap"), [(0.01, 0.2), (0.01, 0.0), (0.0, 0.2)])
def test_what_responses_do_not_explain_is_of_the_swap(of_response: float, of_swap: float) -> None:
    """Fitted as if all were of responses: of two replicas, each of half of them."""
    first = recipe(MOCK, rollout__workers=2)
    runs = [_Measured(first, [], [], {}, 0.0, 1.0, 1.0, None, []) for _ in range(2)]
    groups = first.train.groups_per_step // 2
    runs[1].recipe = recipe(MOCK, rollout__workers=2, train__groups_per_step=groups)
    rows = [groups * 2 * first.algorithm.group_size, groups * first.algorithm.group_size]
    fits = [
        Costs(1.0, 0.0, 0.0, swap_seconds=0.5, response_seconds=of_response + 2 * of_swap / of)
        for of in rows
    ]
    found = _divided(fits, runs)
    assert found.response_seconds == pytest.approx(of_response)
    assert found.swap_seconds == pytest.approx(0.5 + of_swap)


async def test_groups_that_are_dropped_are_measured(tmp_path: Path) -> None:
    failing = {
        "reward__functions": [{"name": "tests.orchestration.rewards.faulty:one_in_ten"}],
        "reward__retries": 0,
        "reward__max_error_share": 1.0,
        "algorithm__group_size": 2,
    }
    of = recipe(MOCK, **{**SLOW, "train__steps": 12}, **failing)
    events = await executed(of, tmp_path / "run")
    costs, lengths = measured_costs(events, tmp_path / "run")
    ledger = [event.data for event in events if event.kind == "ledger"][-1]
    assert ledger["filtered"] > 0
    assert costs.dropped == pytest.approx(
        ledger["filtered"] / (ledger["filtered"] + ledger["trained"]), abs=0.1
    )
    kept = forecast(setup_of(of), replace(costs, dropped=0.0), lengths)
    assert forecast(setup_of(of), costs, lengths).tokens_per_second < kept.tokens_per_second


@judged_where_cores_are_free
async def test_engines_on_one_machine_share_its_cores(tmp_path: Path) -> None:
    """Training waits for a core as long as it did in the run, and longer where more threads
    compute."""
    of = recipe(TINY, train__steps=12)
    events = await executed(of, tmp_path / "run")
    costs, lengths = measured_costs(events, tmp_path / "run")
    assert costs.cores == cores_here()
    shares = [event.data["train_cpu_share"] for event in events if event.kind == "step"]
    assert all(0 < share <= 1 for share in shares)
    steps = [event.data["train_seconds"] for event in events if event.kind == "step"][3:10]
    busier = forecast(setup_of(of), replace(costs, other_threads=8.0 * costs.cores), lengths)
    found = forecast(setup_of(of), costs, lengths)
    assert found.training * found.step_seconds == pytest.approx(fmean(steps), rel=0.2)
    assert busier.step_seconds > 2 * found.step_seconds
    cluster = of.model_copy(update={"launch": of.launch.model_copy(update={"launcher": "ray"})})
    assert measured_costs(events, tmp_path / "run", cluster)[0].cores == 0


def test_time_after_the_last_step_is_none_between_steps() -> None:
    """Reports of the trainer: wall, waited, trained, steps.

    It saves a checkpoint of 9 s after its third step.
    """
    reports = [
        (1.0, 1.0, 0.0, 0),
        (3.0, 1.2, 0.9, 1),
        (5.0, 1.4, 1.8, 2),
        (7.0, 1.6, 2.7, 3),
        (16.0, 1.6, 2.7, 3),
    ]
    between, waited = _between([tuple(report) for report in reports])
    assert between == pytest.approx(0.9)
    assert waited == pytest.approx(0.1)


def test_a_restart_of_the_trainer_takes_nothing_from_the_time_between_steps(tmp_path: Path) -> None:
    """Its clock begins at 0 again: the one of each step is half a second after 1 s of training."""
    of = recipe(MOCK)
    stream = list[Event]()

    def emit(kind: Kind, **data: Any) -> None:
        stream.append(Event(f"{len(stream) + 1}-0", float(len(stream)), kind, data))

    rollout = {"stage": "rollout", "worker": "rollout-0", "in_flight": 8}
    emit("stage", **rollout, wall=1.0, busy=1.0, waiting_input=0.0, tokens=100)
    for number in range(8):
        lived = 1.5 * (number % 4 + 1)
        numbers = {"train_seconds": 1.0, "response_length_mean": 8.0, "rows": 16}
        emit("step", step=number, version=number + 1, groups=[], **numbers)
        trainer = {"stage": "update", "worker": "update-0", "tokens": 0, "in_flight": 0}
        emit("stage", **trainer, wall=lived, busy=lived, waiting_input=0.0)
        emit("stage", **rollout, wall=2.0 + number, busy=2.0, waiting_input=0.0, tokens=200)
    assert _Measured.of(stream, tmp_path, of).between == pytest.approx(0.5)


def test_what_is_lacking_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match=r"holds no recipe\.json; give the folder of a run"):
        recorded_costs(tmp_path)
    Execution(RunFolder.create(recipe(TINY), tmp_path / "run"))
    with pytest.raises(
        NotMeasured, match="0 optimizer steps are too few to measure; let it make 4"
    ):
        recorded_costs(tmp_path / "run")
