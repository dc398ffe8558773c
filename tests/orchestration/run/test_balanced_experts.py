"""Whole runs that balance the load of experts."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.engines.families import write
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.runs import TINY, complete, recipe

BIAS = "e_score_correction_bias"
RATE = 0.5


async def test_moved_biases_reach_the_rollout_engine_with_each_version(tmp_path: Path) -> None:
    """The probe of each swap compares the two engines' logprobs: with the old biases the rollout
    engine would choose other experts."""
    source = write("DeepSeek-V3", tmp_path / "model", torch.float32)
    options = {"model__source": str(source), "train__router_bias_rate": RATE}
    of = recipe(TINY, **options, train__steps=3)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert result.checkpoint is not None
    swaps = [sync for sync in watched.of("sync") if sync["worker"] == "rollout-0"]
    assert swaps[-1]["version"] == 3
    assert not [each for each in watched.of("worker") if each["change"] == "kept its weights"]
    assert max(step["gap_max"] for step in watched.of("step") if not step["staleness_max"]) < 1e-4
    began = load_file(source / "model.safetensors")
    ended = load_file(result.checkpoint.model / "model.safetensors")
    names = [name for name in began if name.endswith(BIAS)]
    assert len(names) == 3, "one layer of four has no experts"
    for name in names:  # an odd number of moves
        moved = (ended[name] - began[name]).abs()
        assert float((moved / RATE - (moved / RATE).round()).abs().max()) < 1e-5
        assert float(moved.min()) > RATE / 2


async def test_the_loss_is_reported_and_evens_the_load(tmp_path: Path) -> None:
    loads = {}
    for coefficient in (0.0, 2.0):
        options = {"model__source": "tiny-moe", "train__router_loss": coefficient}
        of = recipe(TINY, **options, train__steps=12, pipeline__staleness=0)
        watched, result = await complete(
            Execution(RunFolder.create(of, tmp_path / f"run-{coefficient:g}"))
        )
        assert result.state == "finished", result.reason
        steps = watched.of("step")
        assert all(("router_loss" in step) == (coefficient > 0) for step in steps)
        loads[coefficient] = sum(step["max_expert_load"] for step in steps[-4:]) / 4
    assert loads[2.0] < loads[0.0]
