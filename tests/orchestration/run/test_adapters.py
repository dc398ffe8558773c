"""Whole runs that train adapters: what is published, replayed, saved and refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from orchestration.recipe.sizes.planner import plan
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.engines.torch.decoding.weights import DecoderWeights
from stages.model.load import load_model
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    synchronous,
    trained,
)
from tests.orchestration.runs import TINY, complete, executing, recipe

LORA: dict[str, Any] = {
    "model__lora": {"rank": 4},
    "train__learning_rate": 1e-2,
    "pipeline__staleness": 0,
    "algorithm__options": {"kl_coef": 0.1},
}

DENSE: dict[str, Any] = {
    "reward__functions": [{"name": "tests.orchestration.scores:early_letters"}]
}


async def test_with_bound_zero_a_killed_trainer_ends_as_the_plain_loop_bit_for_bit(
    tmp_path: Path,
) -> None:
    """With the base as the reference, in the trainer; and the run is resumed for two steps more."""
    of = recipe(TINY, **LORA, launch__launcher="process")
    expected, weights = await synchronous(recipe(TINY, **LORA, train__steps=8))
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        # past a checkpoint, with two steps to replay
        await watched.until(lambda: len(watched.of("step")) >= 5)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected[:6]
    assert max(step["kl_reference"] for step in watched.of("step")) > 0
    assert not any(worker["worker"].startswith("reference") for worker in watched.of("worker"))
    swaps = [sync for sync in watched.of("sync") if sync["worker"] == "rollout-0"]
    whole = plan(of).parameters
    adapters = plan(of).trained_parameters
    assert whole is not None and adapters is not None  # noqa: PT018
    assert {sync["bytes"] for sync in swaps} == {4 * adapters}
    assert adapters < 0.25 * whole
    assert all(sync["gap_max"] < sync["gap_max_limit"] for sync in swaps), "each was probed"
    watched, result = await complete(
        Execution(RunFolder.resume(tmp_path / "run", ["train.steps=8"]))
    )
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")][-2:] == expected[6:]
    assert_equal(trained(watched.run.recipe, result), weights)
    assert_exported(result.checkpoint)


def assert_exported(checkpoint: Any) -> None:
    """peft opens the adapters, and with them the base is the merged model of the checkpoint."""
    base, _ = load_model("tiny", dtype=torch.float32, seed=0)
    before = base.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone()
    merged = load_file(checkpoint.model / "model.safetensors")
    of_peft = (
        PeftModel.from_pretrained(base, checkpoint.path / "adapter").merge_and_unload().state_dict()
    )
    for name, value in merged.items():
        assert torch.allclose(value, of_peft[name], atol=1e-6), name
    assert not torch.equal(before, merged["model.layers.0.self_attn.q_proj.weight"])
    saved = sum(path.stat().st_size for path in (checkpoint.path / "train").iterdir())
    assert saved < 3 * 4 * 77_184, "of the base nothing but its name"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_adapters_that_were_not_delivered_are_refused(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderWeights, "install", lambda weights, prepared: [])
    of = recipe(
        TINY, **LORA, **DENSE, model__dtype=dtype, launch__max_restarts=0, sync__timeout=30.0
    )
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert "the engine's logprobs" in result.reason


async def test_in_bfloat16_every_swap_is_within_the_limits(tmp_path: Path) -> None:
    of = recipe(TINY, **{**LORA, "pipeline__staleness": 1}, model__dtype="bfloat16")
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    swaps = [sync for sync in watched.of("sync") if sync["worker"] == "rollout-0"]
    assert swaps[-1]["version"] == of.train.steps
    assert all(0 <= sync["gap_mean"] < sync["gap_mean_limit"] for sync in swaps)
    assert not [
        worker
        for worker in watched.of("worker")
        if worker["change"] in ("died", "kept its weights")
    ]


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
async def test_ranks_train_adapters(dp: int, tp: int, tmp_path: Path) -> None:
    few = {**LORA, "train__steps": 3, **DENSE}
    of = recipe(TINY, **few, train__dp=dp, train__tp=tp, launch__launcher="process")
    expected, _ = await synchronous(recipe(TINY, **few))
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    found = [(step["reward_mean"], step["loss"]) for step in watched.of("step")]
    assert found[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    assert_exported(result.checkpoint)
