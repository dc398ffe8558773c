"""A node that does not have the run's newest checkpoint does not begin with the weights of version
0."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.checkpoint import CheckpointMissing
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.run.run_index import GivenIndex
from orchestration.state.documents import CHECKPOINT_REPORTED
from pipeline.index.client import Index
from tests.orchestration.runs import MOCK, recipe


async def test_an_older_checkpoint_or_none_is_refused_where_the_run_has_a_newer_one(
    tmp_path: Path,
) -> None:
    await Execution(
        RunFolder.create(
            recipe(MOCK, train__steps=4, checkpoint__every=2, checkpoint__keep=2), tmp_path / "run"
        )
    ).execute()
    folder = tmp_path / "run" / "checkpoints"
    newest = checkpoint.latest_of_run(folder, 4)
    assert newest is not None
    assert newest.version == 4
    with pytest.raises(
        CheckpointMissing,
        match=r"newest is of version 5, and .* none newer than that of version "
        r"4 below",
    ):
        checkpoint.latest_of_run(folder, 5)
    with pytest.raises(
        CheckpointMissing, match=f"has none below {tmp_path / 'none'}; set checkpoint.url, mount "
    ):
        checkpoint.latest_of_run(tmp_path / "none", 1)
    assert checkpoint.latest_of_run(tmp_path / "none", 0) is None, "the run has none"


async def test_a_run_whose_folder_is_elsewhere_fails_instead_of_beginning_again(
    index: Index, tmp_path: Path
) -> None:
    """As after a restart of a machine whose disk with the run's folder is not mounted."""
    of = recipe(MOCK, train__steps=4, checkpoint__every=2, launch__launcher="inline")

    def execution() -> Execution:
        folder = RunFolder.of_service(of, tmp_path / "run", index.run)
        return Execution(folder, GivenIndex(index.url))

    first = execution()
    assert (await first.execute()).state == "finished"
    assert await CHECKPOINT_REPORTED.get(index) == 4
    shutil.rmtree(first.folder.shared)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    result = await execution().execute()
    assert result.state == "failed"
    assert "the run's newest is of version 4, and this node" in result.reason


async def test_a_worker_without_the_checkpoint_ends_with_the_reason(tmp_path: Path) -> None:
    """A rollout engine or a rank on another node, whose folder is not the run's."""
    of = recipe(MOCK, train__steps=6, checkpoint__every=2)
    run = Execution(RunFolder.create(of, tmp_path / "run"))
    await run.execute()
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "kept")
    resumed = Execution(RunFolder.resume(tmp_path / "run", ["train.steps=8"]))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    result = await resumed.execute()
    assert result.state == "failed"
    assert (
        "CheckpointMissing: checkpoint: the run's newest is of version 6, and this node"
        in result.reason
    )
