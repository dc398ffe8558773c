"""A run forecasts its own steps, and takes the smallest staleness bound that keeps its busiest
stage busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.simulation import live
from orchestration.simulation.bound import choose_bound
from orchestration.simulation.forecast import Forecast
from tests.orchestration.runs import MOCK, complete, recipe

# generation and training need 0.3 s each; the longest responses need as long alone
BALANCED: dict[str, Any] = {
    "rollout__mock": {
        "row_rate": 100.0,
        "saturation_rows": 16,
        "median_tokens": 16.0,
        "sigma": 0.8,
        "prefill_rate": 1e6,
    },
    "rollout__max_rows": 16,
    "rollout__max_tokens": 32,
    "train__mock": {"step_seconds": 0.3, "token_seconds": 0.0},
    "train__groups_per_step": 8,
}


def found(tokens_per_second: float, generation: float, training: float) -> Forecast:
    return Forecast(tokens_per_second, 1.0, generation, generation, training, 0.0, 1.0, 1, 1, 100.0)


def test_the_smallest_bound_that_holds_or_is_as_fast_as_the_fastest() -> None:
    slow = found(80, 0.7, 0.8)
    held = found(97, 0.7, 0.96)
    fast = found(100, 0.7, 0.99)
    assert choose_bound([(1, slow), (2, held), (3, fast)]) == 2
    assert choose_bound([(1, held), (2, fast)]) == 1
    none_holds = [(1, found(80, 0.5, 0.5)), (2, found(99.5, 0.6, 0.6)), (3, found(100, 0.6, 0.6))]
    assert choose_bound(none_holds) == 2


async def test_a_run_raises_its_bound_and_steps_have_their_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS", 2.0)
    monkeypatch.setattr(live, "SHARE", 1.0)
    of = recipe(MOCK, **BALANCED, pipeline__staleness="auto", train__steps=30, checkpoint__every=30)
    assert (of.pipeline.staleness, of.pipeline.staleness_min, of.first_slack) == (4, 1, 1)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished"
    forecasts = watched.of("forecast")
    steps = watched.of("step")
    assert forecasts
    assert forecasts[0]["before"] == 1
    assert max(one["bound"] for one in forecasts) >= 2, (
        "with one step ahead the longest responses are waited for"
    )
    change = next(one for one in forecasts if one["bound"] > one["before"])
    assert "keeps the busiest stage busy is" in change["reason"]
    assert max(step["staleness_max"] for step in steps if step["step"] < change["step"]) <= 1
    assert max(step["staleness_max"] for step in steps) <= 4
    assert "predicted_seconds" not in steps[0]
    assert 0.1 < steps[-1]["predicted_seconds"] < 3.0
    assert steps[-1]["predicted_staleness"] > 0


async def test_a_fixed_bound_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SECONDS", 1.0)
    of = recipe(MOCK, **BALANCED, pipeline__staleness=1, train__steps=12, checkpoint__every=12)
    watched, _ = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert watched.of("forecast")
    assert {(one["bound"], one["before"]) for one in watched.of("forecast")} == {(1, 1)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"pipeline__staleness": 2, "pipeline__staleness_min": 3},
            r"staleness_min = 3: is above pipeline\.staleness = 2",
        ),
        (
            {"pipeline__staleness": "auto", "pipeline__window": 3},
            r"staleness_min = 1: lets nothing overlap with pipeline\.window = 3: .*set >= 2",
        ),
        (
            {"pipeline__staleness": "auto", "external__stages": ["update"]},
            r"staleness_min = 1: needs training and generation by the run's own workers",
        ),
        ({"pipeline__staleness": "automatic"}, r"pipeline\.staleness = \"automatic\""),
    ],
)
def test_what_cannot_be_decided_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        recipe(MOCK, **changes)
