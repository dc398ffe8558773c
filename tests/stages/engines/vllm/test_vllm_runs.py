"""Whole runs with real vLLM engines: several replicas follow a trainer of several ranks, by either
transport."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.run.test_end_of_turn import assert_each_token_ends, of_two_ends
from tests.orchestration.run.test_run import assert_each_sample_once, assert_nothing_left
from tests.orchestration.runs import TINY, executing, recipe

pytestmark = pytest.mark.timeout(900)


async def test_each_of_three_end_tokens_ends_a_response(tmp_path: Path) -> None:
    vllm = {"max_model_len": 64, "block_size": 32, "kv_cache_bytes": "64MiB", "enforce_eager": True}
    await assert_each_token_ends(of_two_ends(tmp_path, rollout__engine="vllm", rollout__vllm=vllm))


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
async def test_two_replicas_follow_a_trainer_of_two_ranks_and_one_may_be_killed(
    transport: str, model: Path, tmp_path: Path
) -> None:
    of = recipe(
        TINY,
        model__source=str(model),
        rollout__engine="vllm",
        rollout__workers=2,
        rollout__vllm={
            "max_model_len": 64,
            "block_size": 32,
            "kv_cache_bytes": "64MiB",
            "enforce_eager": True,
        },
        train__dp=2,
        train__steps=8,
        sync__transport=transport,
        launch__launcher="process",
        launch__startup_timeout=300.0,
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 3, timeout=400)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["rollout-1"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert [w["worker"] for w in watched.of("worker") if w["change"] == "died"] == ["rollout-1"]
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    swaps = [sync for sync in watched.of("sync") if sync["worker"].startswith("rollout")]
    assert {sync["worker"] for sync in swaps} == {"rollout-0", "rollout-1"}
    assert all(sync["gap_max"] <= sync["gap_max_limit"] for sync in swaps), (
        "each was probed, and is the trainer's"
    )
    assert [sync["version"] for sync in swaps if sync["worker"] == "rollout-0"][
        -1
    ] == of.train.steps
