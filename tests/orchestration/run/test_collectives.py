"""A rank that dies in a collective call: the others notice, all start again, and nothing is
lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    trained,
)
from tests.orchestration.runs import TINY, complete, executing, recipe

RUN: dict[str, Any] = {
    "model__source": "tiny-moe",
    "pipeline__staleness": 0,
    "train__steps": 4,
    "checkpoint__every": 2,
    "launch__launcher": "process",
}
# of layers, their gradients, and metrics
GATHERS = ["_allgather_base_", "_reduce_scatter_base_", "allgather_"]


@pytest.mark.parametrize(
    ("chosen", "calls"),
    [
        ({"dp": 2, "ep": 2}, [*GATHERS, "alltoall_base_"]),
        (
            {"dp": 1, "tp": 2},
            ["_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"],
        ),
        ({"dp": 1, "pp": 2}, ["send", "recv_"]),
    ],
    ids=str,
)
async def test_a_rank_may_die_in_each_collective_call_and_the_weights_are_those_of_an_undisturbed_run(
    chosen: dict[str, int], calls: list[str], tmp_path: Path
) -> None:
    of_ranks = {f"train__{name}": size for name, size in chosen.items()}
    undisturbed = recipe(TINY, **RUN | of_ranks)
    told, expected = await complete(
        Execution(RunFolder.create(undisturbed, tmp_path / "undisturbed"))
    )
    assert expected.state == "finished", expected.reason
    options = {"calls": calls, "folder": str(tmp_path)}
    engine = {"train__engine": "tests.orchestration.dying:dying", "train__options": options}
    of = recipe(TINY, **RUN | of_ranks | engine, launch__max_restarts=len(calls))
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        result = await work
        assert watched.run.supervisor is not None
        assert watched.run.supervisor.restarts == len(calls)
    assert result.state == "finished", result.reason
    assert all((tmp_path / call).exists() for call in calls)
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    assert [s["reward_mean"] for s in watched.of("step")] == [
        s["reward_mean"] for s in told.of("step")
    ]
    assert_equal(trained(undisturbed, result), trained(undisturbed, expected))
