"""Runs whose flow is another one: groups that are dropped, stages of a recipe's own, several
optimizer steps a batch."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.flow import Drop, UserStage
from tests.orchestration import scores
from tests.orchestration.run.test_run import assert_equal, assert_nothing_left, synchronous, trained
from tests.orchestration.runs import MOCK, TINY, Watched, complete, executing, recipe

HERE = "tests.orchestration.run.test_flow"
PAIRS: dict[str, Any] = {**MOCK, "reward": {"functions": [{"name": f"{scores.HERE}:parity"}]}}
PAIRS["algorithm"] = {"group_size": 2, "options": {"drop_equal": True}}
PAIRS["rollout"] = {
    **MOCK["rollout"],
    "mock": {"time_scale": 0.02, "median_tokens": 16},
}  # few reach max_tokens: both lengths are common


class Judge(UserStage):
    """Slow enough to be killed at work."""

    factor: float = 1.0
    pause: float = 0.0

    needs: ClassVar = {"response_ids": "int64 ragged", "given": "text"}
    makes: ClassVar = {"length": "float32", "twice": "int64 ragged"}

    async def process(self, rows: Any) -> dict[str, Any]:
        await asyncio.sleep(self.pause)
        assert len(rows.completions) == len(rows.prompts) == len(rows["response_ids"])
        lengths = torch.tensor([float(len(row)) for row in rows["response_ids"]])
        return {
            "length": lengths * self.factor,
            "twice": [torch.cat([row, row]) for row in rows["response_ids"]],
        }


class Sieve(UserStage):
    """Drops groups, and makes nothing. A plain method: it runs in a thread."""

    takes = "groups"
    needs = ("length",)

    def process(self, rows: Any) -> Any:
        shortest = float(rows["length"].min())
        return Drop("one is short") if shortest < 45 else {}


class Wrong(UserStage):
    needs = ("response_ids",)
    makes: ClassVar = {"length": "float32"}

    async def process(self, rows: Any) -> Any:
        return {"lenght": torch.zeros(len(rows["response_ids"]))}


def assert_filled(of: Any, watched: Watched) -> int:
    """Every step has all of its groups, each once, within the bound; the ledger adds up.

    Returns the dropped samples.
    """
    steps = watched.of("step")
    assert [step["step"] for step in steps] == list(range(1, of.train.steps + 1))
    for step in steps:
        assert len(step["groups"]) == of.train.groups_per_step
        assert step["staleness_max"] <= of.pipeline.staleness
    groups = [group for step in steps for group in step["groups"]]
    assert len(set(groups)) == len(groups)
    for ledger in watched.of("ledger"):
        for unit in ("", "_tokens", "_turns"):
            parts = ("trained", "filtered", "in_flight")
            closed = sum(ledger.get(f"{part}{unit}", 0) for part in parts)
            assert ledger.get(f"generated{unit}", 0) == closed, ledger
    last = watched.of("ledger")[-1]
    assert sum(last.get("dropped", {}).values()) * of.algorithm.group_size == last["filtered"]
    return int(last["filtered"])


@pytest.mark.parametrize("staleness", [0, 2])
async def test_groups_with_equal_rewards_are_dropped_and_replaced(
    staleness: int, tmp_path: Path
) -> None:
    of = recipe(PAIRS, pipeline__staleness=staleness)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert assert_filled(of, watched) > 0
    assert set(watched.of("ledger")[-1]["dropped"]) == {"equal rewards"}
    assert all(step["reward_std"] > 0 for step in watched.of("step"))
    assert_nothing_left(watched.run)
    if staleness == 0:  # the mock's tokens do not depend on what is decoded with them
        expected, weights = await synchronous(of)
        assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
        assert_equal(trained(of, result), weights)


STAGES: list[dict[str, Any]] = [
    {"use": f"{HERE}:Judge", "workers": 2, "factor": 3.0, "pause": 0.01},
    {"use": f"{HERE}:Sieve"},
]


async def test_a_judge_feeds_a_reward_and_a_sieve_drops_while_their_workers_are_killed(
    tmp_path: Path,
) -> None:
    of = recipe(
        {**MOCK, "stages": STAGES},
        reward__functions=[{"name": f"{scores.HERE}:judged"}],
        launch__launcher="process",
        train__steps=10,
        pipeline__lease_seconds=3.0,
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        for stage in ("judge", "sieve", "flow"):
            seen = len(watched.of("step"))
            await watched.until(lambda seen=seen: len(watched.of("step")) > seen)  # type: ignore[misc]
            os.kill(pid_of(watched, f"{stage}-0"), signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert assert_filled(of, watched) > 0
    assert set(watched.of("ledger")[-1]["dropped"]) == {"one is short"}
    restarted = {
        event["worker"] for event in watched.of("worker") if event["change"] == "restarted"
    }
    assert {"judge-0", "sieve-0", "flow-0"} <= restarted
    assert {event["stage"] for event in watched.of("stage")} >= {
        "judge",
        "sieve",
        "reward",
        "advantage",
        "update",
    }
    assert_nothing_left(watched.run)


def pid_of(watched: Watched, worker: str) -> int:
    return int(
        [
            event["pid"]
            for event in watched.of("worker")
            if event["worker"] == worker and event.get("pid")
        ][-1]
    )


async def test_a_stage_that_returns_another_column_ends_the_run_with_its_name(
    tmp_path: Path,
) -> None:
    of = recipe(
        {**MOCK, "stages": [{"use": f"{HERE}:Wrong"}]},
        reward__functions=[{"name": f"{scores.HERE}:short"}],
    )
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert "stage 'wrong' returned {'lenght'" in result.reason
    assert "wanted is a dict with the columns ['length']" in result.reason


async def test_mini_batches_and_epochs_make_one_version_of_each_batch_and_replay_alike(
    tmp_path: Path,
) -> None:
    options = {"epochs": 2, "mini_batches": 2}
    of = recipe(TINY, pipeline__staleness=0, algorithm__options=options)
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert [step["version"] for step in watched.of("step")] == list(range(1, of.train.steps + 1))
    assert_equal(trained(of, result), weights)
    plain = (await synchronous(recipe(TINY, pipeline__staleness=0)))[1]
    assert any(not torch.equal(plain[name], weights[name]) for name in plain)


async def test_a_run_interpolates_by_the_versions_of_tokens(tmp_path: Path) -> None:
    options = {"proximal": "interpolated", "correction": "truncate"}
    of = recipe(MOCK, pipeline__staleness=2, rollout__on_update="cut", algorithm__options=options)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert all("weight_mean" in step for step in watched.of("step"))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"stages": [{"use": f"{HERE}:Nothing"}]},
            'stages.0.use = "tests.orchestration.run.test_flow:Nothing"',
        ),
        (
            {"stages": [{"use": f"{scores.HERE}:parity"}]},
            "derive its class from stages.flow.UserStage",
        ),
        ({"stages": [{"use": f"{HERE}:Judge", "facto": 1.0}]}, "did you mean 'factor'?"),
        ({"stages": [{"use": f"{HERE}:Judge", "factor": "much"}]}, "stages.0.factor"),
        ({"stages": [{"use": f"{HERE}:Judge"}]}, "makes 'length' and 'twice', which nothing reads"),
        ({"stages": [{"use": f"{HERE}:Sieve"}]}, "needs the column 'length', which no stage makes"),
        ({"stages": [{"workers": 2}]}, "stages.0.use: is missing"),
        (
            {"algorithm": {"group_size": 4, "options": {"mini_batches": 5}}},
            "more than the 4 groups of a step",
        ),
        ({"algorithm": {"group_size": 1}}, "use a value >= 2"),
    ],
)
def test_what_is_wrong_with_stages_is_a_problem_of_the_recipe(
    changes: dict[str, Any], found: str
) -> None:
    with pytest.raises(RecipeError) as error:
        recipe({**MOCK, **changes})
    assert found in str(error.value)


def test_an_evaluation_would_score_without_the_stages() -> None:
    with pytest.raises(
        RecipeError,
        match=r"evaluate\.every.* without the stage that makes length "
        r"and twice",
    ):
        recipe(
            {**MOCK, "stages": STAGES},
            reward__functions=[{"name": f"{scores.HERE}:judged"}],
            evaluate__every=2,
        )
