"""Runs whose rollout engine has a model that drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.runs import TINY, complete, recipe

# Few rows, which are longer than the text that they are rewarded for; at this learning rate the model
# that drafts stays the policy.
DRAFTED: dict[str, Any] = {
    "rollout__max_rows": 8,
    "rollout__max_tokens": 24,
    "rollout__draft_model": "tiny",
    "algorithm__group_size": 4,
    "train__groups_per_step": 2,
    "train__steps": 3,
    "train__learning_rate": 1e-12,
    "pipeline__staleness": 1,
}


@pytest.mark.parametrize("cost", [0.1, 1.0])
async def test_a_run_counts_what_its_model_drafts(
    cost: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cost``: 1.0 is what it is taken to be, as both models are equally large."""
    if cost < 1.0:
        monkeypatch.setattr("stages.engines.torch.draft_model.cost_of", lambda *_: cost)
    of = recipe(TINY, launch__launcher="inline", **DRAFTED)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    counts = [event["drafts"] for event in watched.of("stage") if event.get("drafts")]
    drafted = max((each["drafted_tokens"] for each in counts), default=0)
    held = max((each["held_tokens"] for each in counts), default=0)
    if cost == 1.0:  # of earlier responses to the prompt alone
        assert held < 100
    else:
        assert held > 0.8 * drafted > 200
