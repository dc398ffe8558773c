"""A resume where what the run has recorded is not there: it refuses, and removes nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.checkpoints import base_models
from orchestration.checkpoints.recorded import recorded_version
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.lock import RunError
from stages.model.load import load_model
from tests.orchestration.run.test_damaged import contents
from tests.orchestration.runs import MOCK, TINY, complete, recipe

OF = recipe(MOCK, train__steps=4, checkpoint__every=2, checkpoint__keep=2)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended") / "run"
    asyncio.run(complete(Execution(RunFolder.create(OF, folder))))
    return folder


def event(version: int) -> str:
    return (
        json.dumps(
            {"id": f"{version}-0", "time": 1.0, "kind": "checkpoint", "data": {"version": version}}
        )
        + "\n"
    )


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def unmounted(folder: Path) -> None:
    moved(folder)
    folder.mkdir()


def linked(folder: Path) -> None:
    moved(folder)
    folder.symlink_to("/not/mounted")


def older(folder: Path) -> None:
    shutil.rmtree(folder / "step-00000004")


@pytest.mark.parametrize("away", [moved, unmounted, linked, older])
@pytest.mark.parametrize("source", ["metrics", "index", "summary"])
async def test_a_recorded_checkpoint_that_is_away_is_neither_made_up_nor_begun_without(
    away: Callable[[Path], None], source: str, ended: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    if source != "index":
        shutil.rmtree(run / "index")
    if source == "metrics":
        (run / "metrics.jsonl").write_text(event(2) + "torn\n" + event(4))
    if source == "summary":
        saved = run / "checkpoints" / "step-00000004" / "model"
        (run / "summary.json").write_text(json.dumps({"checkpoint": str(saved)}))
    assert recorded_version(run) == 4
    away(run / "checkpoints")
    before = contents(run)
    with pytest.raises(RunError, match="mount") as refused:
        Execution(RunFolder.resume(run, ["train.steps=6"]))
    assert str(run / "checkpoints") in str(refused.value)
    assert contents(run) == before
    if away is linked:
        (run / "checkpoints").unlink()
    version = 2 if away is older else 0
    assert RunFolder.resume(run, ["train.steps=6"], start_version=version).begins == version, (
        "by a flag it does"
    )


async def test_a_run_that_has_recorded_none_begins_again_and_one_that_is_put_back_goes_on(
    ended: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    moved(run / "checkpoints")
    shutil.rmtree(run / "index")
    assert recorded_version(run) == 0
    fresh = RunFolder.resume(run)
    assert fresh.begins == 0
    fresh.close()
    shutil.rmtree(run)
    shutil.copytree(ended, run)
    watched, result = await complete(Execution(RunFolder.resume(run, ["train.steps=6"])))
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == [5, 6]


# ── the folder of the base model ──


async def run_of_a_folder(tmp_path: Path) -> tuple[Path, Path]:
    """A run of two steps and the folder of its base model."""
    base = tmp_path / "base"
    for part in load_model("tiny", dtype=torch.float32, seed=3):
        part.save_pretrained(base)
    of = recipe({**TINY, "model": {"source": str(base)}}, train__steps=2, checkpoint__every=1)
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert (tmp_path / "run" / base_models.FILE).is_file()
    return tmp_path / "run", base


async def test_the_base_model_may_move_and_its_bytes_may_not_change(tmp_path: Path) -> None:
    run, base = await run_of_a_folder(tmp_path)
    there = tmp_path / "another disk"
    base.rename(there)
    with pytest.raises(RunError, match=f"model.source: {base} is not there; .*--set model.source="):
        Execution(RunFolder.resume(run, ["train.steps=3"]))
    config: dict[str, Any] = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}, indent=2))
    with pytest.raises(RunError, match=r"is not .* elsewhere: 'config.json' has other bytes"):
        Execution(RunFolder.resume(run, ["train.steps=3", f"model.source={there}"]))
    (there / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (there / ".cache").mkdir()
    (there / ".cache" / "download").write_text("of a download")
    watched, result = await complete(
        Execution(RunFolder.resume(run, ["train.steps=3", f"model.source={there}"]))
    )
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == [3]
    third = tmp_path / "third"
    there.rename(third)
    assert Execution(
        RunFolder.resume(run, ["train.steps=4", f"model.source={third}"])
    ).recipe.model.source == str(third)


async def test_files_that_were_never_recorded_are_compared_where_both_are_there(
    tmp_path: Path,
) -> None:
    run, base = await run_of_a_folder(tmp_path)
    (run / base_models.FILE).unlink()
    shutil.copytree(base, tmp_path / "copy")
    changes = ["train.steps=3", f"model.source={tmp_path / 'copy'}"]
    RunFolder.resume(run, changes).close()
    (run / base_models.FILE).unlink()
    shutil.move(tmp_path / "copy", tmp_path / "away")
    with pytest.raises(
        RunError,
        match=r"cannot be compared with .* whose files the run has not "
        r"recorded",
    ):
        Execution(RunFolder.resume(run, ["train.steps=3", f"model.source={tmp_path / 'away'}"]))
