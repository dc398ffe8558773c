"""Whole runs of a model with experts whose trainer follows the rollouts' choices."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.problems import RecipeError
from orchestration.recipe.sizes.planner import plan
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    synchronous,
    trained,
)
from tests.orchestration.runs import TINY, complete, executing, recipe

REPLAY: dict[str, Any] = {"model__source": "tiny-moe", "train__router": "replay"}


async def test_with_bound_zero_a_killed_trainer_replays_the_choices_bit_for_bit(
    tmp_path: Path,
) -> None:
    """The steps since the checkpoint are made again with the choices that the warehouse has."""
    of = recipe(TINY, **REPLAY, pipeline__staleness=0, launch__launcher="process")
    expected, weights = await synchronous(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        # past a checkpoint, with two steps to replay
        await watched.until(lambda: len(watched.of("step")) >= 5)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    for step in watched.of("step"):
        assert step["gap_max"] < 1e-4
        assert step["routing_agreement"] > 0.99
    assert_equal(trained(of, result), weights)


async def test_parked_responses_bring_the_choices_of_all_their_parts(tmp_path: Path) -> None:
    of = recipe(TINY, **REPLAY, pipeline__staleness=2, rollout__budget=2)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert all(0.5 < step["routing_agreement"] <= 1 for step in watched.of("step"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__source": "tiny"}, "is for a model with experts"),
        ({"rollout__engine": "vllm"}, "needs Triton"),
        ({"rollout__engine": "mock"}, "returns none"),
        ({"external__stages": ["rollout"]}, "'rollout' is not run by them"),
    ],
)
def test_what_does_not_go_with_replay_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        RecipeError,
        match=rf'train.router = "replay": .*{reason}.*set train.router '
        rf"= \'own\'",
    ):
        recipe(TINY, **REPLAY | changes)


def test_the_plan_has_room_for_the_choices() -> None:
    own, replay = (
        plan(recipe(TINY, **REPLAY | {"train__router": router})) for router in ("own", "replay")
    )
    assert replay.arena_bytes > own.arena_bytes
