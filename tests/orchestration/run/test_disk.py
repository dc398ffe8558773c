"""Runs whose disk is full, or dies under the process that writes a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from orchestration.checkpoints import checkpoint
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import tiny_model
from tests.orchestration.run.test_run import assert_equal, assert_nothing_left, synchronous, trained
from tests.orchestration.runs import MOCK, TINY, complete, executing, recipe

WHOLE = {"model", "train", "digests.json", "run.json"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB at RUN/checkpoints: a checkpoint of the tiny model takes 1.5 MiB."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def in_a_folder_that_is_there(of: Recipe, folder: Path) -> Execution:
    """A new run in ``folder``, in which a disk is mounted already."""
    (folder / "recipe.json").write_text(of.to_json())
    return Execution(RunFolder.resume(folder))


def fill(file: Path) -> None:
    """Write into ``file`` until the disk is full."""
    with file.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(b"x" * 4096)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder), key=lambda name: (not name.startswith("step-"), name))


async def test_a_full_disk_ends_the_run_at_once_with_what_to_do_and_it_goes_on_when_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    of = recipe(
        TINY, pipeline__staleness=0, train__steps=8, checkpoint__every=2, checkpoint__keep=1
    )
    _, weights = await synchronous(of)
    run = in_a_folder_that_is_there(of, tmp_path / "run")
    async with executing(run) as (watched, work):
        await watched.until(lambda: len(watched.of("checkpoint")) >= 1)
        ballast = small_disk / "something-else"
        fill(ballast)
        result = await work
    assert result.state == "failed"
    assert not [worker for worker in watched.of("worker") if worker["change"] == "restarted"]
    version = watched.of("checkpoint")[-1]["version"]
    for part in (
        "update-0: DiskRefused: checkpoint: version",
        str(small_disk),
        f"from the checkpoint of version {version}",
    ):
        assert part in result.reason
    assert names(small_disk) == [f"step-{version:08d}", "something-else"], (
        "a part of a checkpoint takes no room"
    )
    newest = checkpoint.latest(small_disk)
    assert newest is not None
    assert newest.version == version
    ballast.unlink()
    watched, result = await complete(Execution(RunFolder.resume(tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == list(range(version + 1, 9))
    assert_equal(trained(of, result), weights)
    assert_nothing_left(run)


@pytest.fixture
def small_index(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB at RUN/index."""
    folder = tmp_path / "run" / "index"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("launcher", ["inline", "process"])
async def test_an_index_without_room_ends_the_run_with_the_place_and_what_to_do(
    launcher: str, small_index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = recipe(MOCK, train__steps=100_000, launch__launcher=launcher, checkpoint__every=2)
    async with executing(in_a_folder_that_is_there(of, tmp_path / "run")) as (watched, work):
        await watched.until(lambda: len(watched.of("checkpoint")) >= 1)
        fill(small_index / "something-else")
        async with asyncio.timeout(120):
            result = await work
    assert result.state == "failed"
    for part in (str(small_index), "free room there", "resume the run"):
        assert part in result.reason, result.reason
    if launcher == "process":  # inline, workers log here too
        assert "IndexUnwritable" not in "".join(capsys.readouterr()), "the reason alone says it"
    assert_nothing_left(watched.run)
    (small_index / "something-else").unlink()
    before = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert before is not None
    watched, result = await complete(
        Execution(RunFolder.resume(tmp_path / "run", [f"train.steps={before.version + 3}"]))
    )
    assert result.state == "finished", result.reason


async def test_kills_while_checkpoints_are_written_lose_nothing(tmp_path: Path) -> None:
    """kill -9 of the trainer, at a random moment after the folder of a checkpoint appears: in its
    copy, its files, its name, or the removal of the one before."""
    changes = {
        "launch__launcher": "process",
        "launch__max_restarts": 50,
        "checkpoint__keep": 1,
        "checkpoint__every": 1,
    }
    of = recipe(TINY, pipeline__staleness=0, train__steps=14, **changes)
    _, weights = await synchronous(of)
    folder = tmp_path / "run" / "checkpoints"
    moments = random.Random(0)
    killed = 0
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        while not work.done() and killed < 8:
            await asyncio.sleep(0.001)
            if not list(folder.glob(".step-*.partial")):
                continue
            await asyncio.sleep(moments.uniform(0, 0.15))
            before = checkpoint.latest(folder)
            assert watched.run.supervisor is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
            changes_of = [
                worker["change"]
                for worker in watched.of("worker")
                if worker["worker"] == "update-0"
            ]
            starts = changes_of.count("started")  # of processes; this event follows `restarted`
            await watched.until(
                lambda starts=starts: (
                    len(
                        [
                            w
                            for w in watched.of("worker")
                            if (w["worker"], w["change"]) == ("update-0", "started")
                        ]
                    )
                    > starts
                    or work.done()
                )
            )
            killed += 1
            for whole in checkpoint.whole(folder):
                assert {path.name for path in whole.iterdir()} == WHOLE, "a part of one"
            newest = checkpoint.latest(folder)
            assert before is None or (newest is not None and newest.version >= before.version), (
                "what was there is lost"
            )
        result = await work
    assert result.state == "finished", result.reason
    assert killed >= 4, killed
    assert [step["step"] for step in watched.of("step")] == list(range(1, 15))
    assert_equal(trained(of, result), weights)
    assert names(folder) == ["step-00000014"]


async def test_a_checkpoint_of_another_model_ends_a_resume_at_once_with_what_to_do(
    tmp_path: Path,
) -> None:
    of = recipe(TINY, train__steps=3, checkpoint__every=1)
    await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    before, newest = map(
        checkpoint.open_checkpoint, checkpoint.whole(tmp_path / "run" / "checkpoints")[-2:]
    )
    other = TorchTrainEngine(small_model(), learning_rate=1e-3, total_steps=1, threads=1)
    shutil.rmtree(newest.path / "train")
    (newest.path / "digests.json").unlink()
    writer = checkpoint.Writer(other)
    writer.copy()
    writer.write(newest.path)
    other.close()
    watched, result = await complete(
        Execution(RunFolder.resume(tmp_path / "run", ["train.steps=5"]))
    )
    assert result.state == "failed"
    assert (
        f"checkpoint: {newest.path} cannot be loaded into the model of this run (" in result.reason
    )
    assert (
        f"`asyncdock resume {tmp_path / 'run'} --from {before.version}` goes on from"
        in result.reason
    )
    assert "Traceback" not in result.reason
    assert not [worker for worker in watched.of("worker") if worker["change"] == "restarted"]
    watched, result = await complete(
        Execution(RunFolder.resume(tmp_path / "run", start_version=before.version))
    )
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == list(range(before.version + 1, 6))
    assert (newest.path.with_name(f"aside-{newest.path.name}") / "train").is_dir(), (
        "nothing is removed"
    )


def small_model() -> PreTrainedModel:
    config = tiny_model(0).config
    config.hidden_size //= 2
    return type(tiny_model(0))(config)
