"""Replay of trained rows: each step trains groups of earlier steps too, drawn by seed and step. At
η = 0 it is the plain loop with the same groups, bit for bit, whoever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDict

from benchmarks.runs import synchronous as plain_loop
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.workers.engines import train_engine
from tests.batches import stack, unstack
from tests.orchestration.run.test_run import assert_each_sample_once, assert_equal, trained
from tests.orchestration.runs import TINY, complete, executing, recipe

VERSIONS = 2
REPLAYED = 3
REPLAYING: dict[str, Any] = {
    "algorithm__name": "trajectory_balance",
    "train__replay_groups": REPLAYED,
    "train__replay_versions": VERSIONS,
    "train__steps": 8,
    "checkpoint__every": 3,
}


class Replaying:
    """A train engine that joins rows of its last batches to each batch, as the recipe says."""

    def __init__(self, of: Recipe) -> None:
        self._engine = train_engine(of)
        self._seed = of.seed
        self._steps = list[TensorDict]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train_batch(self, batch: TensorDict, algorithm: Any) -> Any:
        read = ("group", "place", "prompt_ids", "response_ids", *algorithm.loss_reads)
        fresh = unstack(batch.select(*read))
        version = len(self._steps)
        earlier = [row for rows in self._steps[-VERSIONS:] for row in unstack(rows)]
        groups = list(dict.fromkeys(int(row["group"]) for row in earlier))
        drawn = set[int]()
        if groups:
            random = np.random.default_rng([self._seed, version])
            drawn = {*random.choice(groups, min(REPLAYED, len(groups)), replace=False).tolist()}
        self._steps.append(stack(fresh))
        rows = [*fresh, *(row for row in earlier if int(row["group"]) in drawn)]
        return self._engine.train_batch(stack(rows), algorithm)


async def test_a_killed_trainer_draws_the_same_groups_and_the_run_is_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = recipe(TINY, **REPLAYING, pipeline__staleness=0, launch__launcher="process")
    monkeypatch.setattr(plain_loop, "train_engine", Replaying)
    expected = []
    weights = {}
    async for step in plain_loop.synchronous_run(of):
        expected.append((step.reward_mean, step.metrics["loss"]))
        weights = {name: value.clone() for name, value in step.engine.weights()}
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        # past a checkpoint, with two steps to train again, of rows older than the checkpoint
        await watched.until(lambda: len(watched.of("step")) >= 5)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    steps = watched.of("step")
    assert [(step["reward_mean"], step["loss"]) for step in steps] == expected
    assert_equal(trained(of, result), weights)
    assert_each_sample_once(of, watched)
    rows = REPLAYED * of.algorithm.group_size
    assert [step.get("replayed_rows", 0) for step in steps] == [0, *[rows] * 7]
    assert watched.of("ledger")[-1]["replayed"] == 7 * rows
    assert watched.of("ledger")[-1]["replayed_tokens"] >= 7 * rows


async def test_replayed_rows_are_past_the_bound_of_fresh_ones_and_within_their_own(
    tmp_path: Path,
) -> None:
    of = recipe(TINY, **REPLAYING, algorithm__options={"beta": 1.0})
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    replaying = [step for step in watched.of("step") if "replayed_rows" in step]
    assert len(replaying) == 7
    bound = of.pipeline.staleness + VERSIONS
    for step in replaying:
        assert 1 <= step["replayed_staleness_mean"] <= step["replayed_staleness_max"] <= bound
    assert max(step["replayed_staleness_max"] for step in replaying) > of.pipeline.staleness
