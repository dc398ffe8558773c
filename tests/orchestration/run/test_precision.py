"""Whole runs in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.engines.torch.rollout import TorchRolloutEngine
from tests.orchestration.runs import TINY, complete, recipe


@pytest.mark.parametrize("precision", ["model", "mixed"])
async def test_a_bfloat16_run_with_the_defaults_goes_to_its_end(
    tmp_path: Path, precision: str
) -> None:
    of = recipe(TINY, model__dtype="bfloat16", train__precision=precision)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert not [
        reported
        for reported in watched.of("worker")
        if reported["change"] in ("died", "kept its weights")
    ]
    swaps = [sync for sync in watched.of("sync") if sync["worker"] == "rollout-0"]
    assert swaps[-1]["version"] == of.train.steps
    for sync in swaps:
        assert 0 <= sync["gap_mean"] < sync["gap_mean_limit"] / 1.5, "each was probed"
        assert 0 <= sync["gap_q95"] < sync["gap_q95_limit"] / 1.5


async def test_a_run_that_the_probe_has_ended_goes_on_with_another_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's logprobs are 0.005 too large: how far they lie from the trainer's otherwise
    depends on the CPU."""
    score = TorchRolloutEngine.score

    async def shifted(*arguments: Any, **options: Any) -> torch.Tensor:
        return await score(*arguments, **options) + 0.005

    monkeypatch.setattr(TorchRolloutEngine, "score", shifted)
    of = recipe(
        TINY,
        model__dtype="bfloat16",
        sync__probe_tolerance=1e-6,
        launch__max_restarts=0,
        checkpoint__every=1,
    )
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert "sync.probe_tolerance is 1e-06" in result.reason
    with pytest.raises(
        RecipeError,
        match=r"model.dtype = \"float32\": cannot change in a resumed "
        r"run: the checkpoint",
    ):
        Execution(RunFolder.resume(tmp_path / "run", ["model.dtype=float32"]))
    resumed = Execution(RunFolder.resume(tmp_path / "run", ["sync.probe_tolerance=0.05"]))
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    limits = {
        (sync["gap_mean_limit"], sync["gap_q95_limit"])
        for sync in watched.of("sync")
        if "gap_mean" in sync
    }
    assert limits == {(0.05 / 5, 0.05)}
