"""An engine's profile is what its options say, and a simulation with it takes the time that
follows."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestration.simulation.costs import Costs, EngineProfile
from orchestration.simulation.engine_profile import profile_engine
from orchestration.simulation.forecast import forecast
from orchestration.simulation.simulator import Setup
from pipeline.schedule.staleness import StalenessPlan
from tests.orchestration.runs import MOCK, TINY, recipe
from tests.stages.engines.mock.test_engines import LoopClock

COSTS = Costs(
    row_rate=100.0, step_seconds=0.5, token_seconds=0.0, saturation_rows=inf, prefill_rate=inf
)


def test_of_an_engine_whose_times_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 5 ms a token; above 8 rows they share what 8 have: 16 take 10 ms.

    A prefill of a token takes 1 ms. The clock is that of the loop, which jumps to the next timer.
    """
    clock = LoopClock()
    monkeypatch.setattr("orchestration.simulation.engine_profile.asyncio.run", clock.run)
    monkeypatch.setattr(
        "orchestration.simulation.engine_profile.time",
        SimpleNamespace(perf_counter=lambda: clock.now),
    )
    options = {
        "row_rate": 200.0,
        "saturation_rows": 8,
        "prefill_rate": 1000.0,
        "median_tokens": 1000.0,
        "sigma": 0.0,
    }
    profile = profile_engine(
        recipe(MOCK, rollout__mock=options, rollout__max_rows=16, rollout__max_tokens=16)
    )
    assert profile.token_seconds + 2 * profile.row_seconds == pytest.approx(0.005)
    assert profile.token_seconds + 16 * profile.row_seconds == pytest.approx(0.010)
    assert profile.prompt_tokens > 1
    profile.write(tmp_path)
    assert EngineProfile.read(tmp_path) == profile
    assert EngineProfile.read(tmp_path / "other") is None


def test_of_a_real_engine() -> None:
    profile = profile_engine(recipe(TINY))
    assert profile.token_seconds > 0
    assert profile.prefill_seconds + profile.prefill_token_seconds > 0


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        ({"row_seconds": 0.01 / 16}, 1.0),  # 50 tokens of 20 ms for 16 rows
        ({"prefill_seconds": 0.1, "prompt_tokens": 1.0}, 0.6),  # 4 groups begin together
        # the prompt of each of 4 groups once
        ({"prefill_token_seconds": 0.01, "prompt_tokens": 5.0}, 0.7),
        ({"response_seconds": 0.02}, 0.8),  # the last one delays nothing
    ],
)
def test_what_stops_decoding_takes_its_time(costs: dict[str, float], seconds: float) -> None:
    """4 groups of 4 rows of 50 tokens at 100 tokens/s: 0.5 s, and what is added; then a step of 0.5
    s."""
    setup = Setup(StalenessPlan(0, 4), 4, 20, max_rows=16, most_rows=16, first_groups=4)
    found = forecast(setup, replace(COSTS, **costs), lambda group: [50] * 4)
    assert found.step_seconds == pytest.approx(seconds + 0.5)


def test_a_parked_response_is_prefilled_again() -> None:
    """Two visits of 25 tokens.

    The second needs a prefill of prompt and 25 tokens for each of 16 rows.
    """
    setup = Setup(StalenessPlan(0, 4), 4, 20, max_rows=16, most_rows=16, first_groups=4, budget=25)
    costs = replace(COSTS, prefill_token_seconds=0.001, prompt_tokens=5.0)
    found = forecast(setup, costs, lambda group: [50] * 4)
    assert found.step_seconds == pytest.approx(0.5 + 0.02 + 16 * 0.03 + 0.5, rel=0.02)
