"""Runs whose engines get their weights from the trainer by torch.distributed: the same results,
also after kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.workers.engines import weight_publisher
from stages.weights.transport.depot import Depot
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    synchronous,
    trained,
)
from tests.orchestration.runs import MOCK, TINY, complete, executing, recipe


@pytest.mark.parametrize("launcher", ["inline", "process"])
async def test_with_bound_zero_it_is_the_synchronous_run_bit_for_bit(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes read the trainer's memory, as it is on their node; the inline run receives each
    version, as on another."""
    received: list[int] = []
    if launcher == "inline":
        receive = Depot._receive_into
        monkeypatch.setattr("stages.weights.transport.depot.is_here", lambda *_: False)
        monkeypatch.setattr(
            Depot,
            "_receive_into",
            lambda *of: (received.append(of[1].published.version), receive(*of)),
        )  # type: ignore[attr-defined]
    of = recipe(TINY, pipeline__staleness=0, sync__transport="network", launch__launcher=launcher)
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    assert received == (list(range(1, of.train.steps + 1)) if launcher == "inline" else [])
    assert_nothing_left(watched.run)


async def test_several_replicas_follow_a_trainer_of_several_ranks_and_any_of_them_may_be_killed(
    tmp_path: Path,
) -> None:
    """A rank that sends, then a replica that receives; with bound zero nothing is generated until
    the version that the dead trainer had published is sent by its successor, so that it must be
    published again."""
    of = recipe(
        TINY,
        pipeline__staleness=0,
        train__dp=2,
        train__steps=8,
        rollout__workers=2,
        sync__transport="network",
        launch__launcher="process",
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        for number, worker in enumerate(("update-0", "rollout-1")):
            await watched.until(lambda: len(watched.of("step")) >= 3 * number + 2)  # noqa: B023
            assert watched.run.supervisor is not None
            os.kill(watched.run.supervisor.pids()[worker], signal.SIGKILL)
            await watched.until(
                lambda worker=worker: (
                    [w["worker"] for w in watched.of("worker") if w["change"] == "died"][-1:]
                    == [worker]
                )
            )
        result = await work
    assert result.state == "finished", result.reason
    assert [w["worker"] for w in watched.of("worker") if w["change"] == "died"] == [
        "update-0",
        "rollout-1",
    ]
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    last = {sync["worker"] for sync in watched.of("sync") if sync["version"] == of.train.steps}
    assert last >= {"update-0", "rollout-0", "rollout-1"}
    assert all(
        sync["gap_max"] < sync["gap_max_limit"] for sync in watched.of("sync") if "gap_max" in sync
    )


def test_an_address_that_is_not_the_trainers_is_refused_with_its_name(tmp_path: Path) -> None:
    network = {"sync__transport": "network", "pipeline__serve": "192.0.2.1"}
    with pytest.raises(RecipeError, match=r'pipeline\.serve = "192\.0\.2\.1": cannot be listened'):
        recipe(MOCK, **network)
    recorded = recipe(MOCK, sync__transport="network").model_dump()
    recorded["pipeline"]["serve"] = "192.0.2.1"
    moved = Recipe.recorded(recorded)
    with pytest.raises(OSError, match=r"serve = '192\.0\.2\.1': nothing can be served there"):
        weight_publisher(moved, tmp_path, secret=b"sixteen or more bytes", route="192.0.2.8")


def test_it_is_not_for_engines_that_share_the_trainers_device() -> None:
    with pytest.raises(
        RecipeError,
        match=r"sync.transport = \"network\": is between separate "
        r"devices",
    ):
        recipe(
            TINY,
            sync__transport="network",
            launch__placement="colocated",
            launch__launcher="process",
        )


@pytest.mark.parametrize(("replicas", "at_once"), [(1, 0), (2, 1), (7, 1), (8, 2), (64, 16)])
def test_a_quarter_of_the_replicas_swap_at_the_same_time(replicas: int, at_once: int) -> None:
    of = recipe(MOCK, rollout__workers=replicas, launch__launcher="process")
    assert of.swaps_at_once == at_once
    assert (
        recipe(MOCK, rollout__workers=8, sync__at_once=8, launch__launcher="process").swaps_at_once
        == 0
    )
    assert (
        recipe(MOCK, rollout__workers=8, sync__at_once=5, launch__launcher="process").swaps_at_once
        == 5
    )
