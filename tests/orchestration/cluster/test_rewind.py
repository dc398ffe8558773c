"""Steps since the checkpoint whose samples were lost with a node: the run goes on from the
checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from benchmarks.runs.synchronous import synchronous_run
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.workers.engines import train_engine
from tests.orchestration.runs import TINY, executing, recipe


async def test_a_run_whose_steps_cannot_be_replayed_ends_with_the_weights_of_the_plain_loop(
    tmp_path: Path,
) -> None:
    of = recipe(
        TINY,
        pipeline__staleness=0,
        launch__launcher="process",
        train__steps=12,
        checkpoint__every=3,
    )
    weights = {}
    async for step in synchronous_run(of):
        weights = {name: value.clone() for name, value in step.engine.weights()}
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        # past a checkpoint, with two steps to replay
        await watched.until(lambda: bool(watched.of("checkpoint")))
        newest = watched.of("checkpoint")[-1]["version"]
        await watched.until(lambda: len(watched.of("step")) >= newest + 2)
        assert watched.run.supervisor is not None
        index = watched.run.supervisor.index
        os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
        for record in await index.warehouses():
            await index.lose_warehouse(record.number)
        result = await work
    assert result.state == "finished", result.reason
    rewound = [event["version"] for event in watched.of("worker") if event["change"] == "rewound"]
    assert len(rewound) == 1
    assert rewound[0] >= newest > 0
    # of each step its last event
    groups = {step["step"]: step["groups"] for step in watched.of("step")}
    assert sorted(group for of_step in groups.values() for group in of_step) == list(range(12 * 4))
    assert result.checkpoint is not None
    engine = train_engine(of)
    result.checkpoint.load_into(engine)
    for name, value in engine.weights():
        assert torch.equal(value, weights[name]), name
