"""Files of a checkpoint that are not as they were written: they are named, and nothing is trained
on them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
import xxhash

from api.cli.results.checkpoint import verify
from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.checkpoint import CheckpointUnusable
from orchestration.checkpoints.recorded import set_newer_aside
from orchestration.checkpoints.store import CheckpointStore
from orchestration.recipe.models import tokenizer_of
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.lock import RunError
from orchestration.workers.engines import train_engine
from stages.model import manifest
from stages.model.load import load_model
from stages.model.manifest import FilesDamaged
from tests.orchestration.run.test_run import assert_equal, synchronous, trained
from tests.orchestration.runs import TINY, complete, recipe

OF = recipe(TINY, pipeline__staleness=0, train__steps=4, checkpoint__every=1, checkpoint__keep=2)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def shards(newest: Path) -> Path:
    (file,) = (newest / "train").glob("*.distcp")
    return file


FAULTS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "a bit of the optimizer's state": (shards, flip),
    "a bit of its metadata": (lambda newest: newest / "train" / ".metadata", flip),
    "a cut model": (
        lambda newest: newest / "model" / "model.safetensors",
        lambda path: os.truncate(path, 1000),
    ),
    "a bit of the model": (lambda newest: newest / "model" / "model.safetensors", flip),
    "another config": (
        lambda newest: newest / "model" / "config.json",
        lambda path: path.write_text("{}") and None,
    ),
    "no tokenizer": (lambda newest: newest / "model" / "tokenizer.json", Path.unlink),
    "an empty state": (lambda newest: newest / "run.json", lambda path: os.truncate(path, 0)),
    "cut digests": (lambda newest: newest / "digests.json", lambda path: os.truncate(path, 100)),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended") / "run"
    asyncio.run(complete(Execution(RunFolder.create(OF, folder))))
    return folder


def before(newest: Path) -> Path:
    """The other checkpoint: not always the one of the step before, as one at a time is written."""
    (other,) = (path for path in checkpoint.whole(newest.parent) if path != newest)
    return other


def version_of(path: Path) -> int:
    return checkpoint.version_of(path.name)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.lock"
    }


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_resume_names_the_damaged_file_and_the_way_on(
    fault: str, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    newest, (of_newest, damage) = run / "checkpoints" / "step-00000004", FAULTS[fault]
    damage(of_newest(newest))
    as_it_was = contents(run)
    with pytest.raises(RunError) as refused:
        Execution(RunFolder.resume(run, ["train.steps=5"]))
    assert str(of_newest(newest)) in str(refused.value)
    earlier = before(newest)
    assert f"`asyncdock resume {run} --from {version_of(earlier)}` goes on from" in str(
        refused.value
    )
    assert contents(run) == as_it_was, "a refusal changes nothing"
    with pytest.raises(typer.Exit) as verified:
        verify(run)
    assert verified.value.exit_code == 1
    listed = capsys.readouterr().out
    assert f"{earlier}: whole (" in listed
    assert f"{newest}: damaged\n  " in listed
    resumed = Execution(RunFolder.resume(run, ["train.steps=5"], start_version=version_of(earlier)))
    assert resumed.folder.begins == version_of(earlier)
    aside = newest.with_name("aside-step-00000004")
    assert {
        Path(name).relative_to(newest): text
        for name, text in as_it_was.items()
        if str(newest) in name
    } == {Path(name).relative_to(aside): text for name, text in contents(aside).items()}


async def test_a_run_goes_on_before_a_damaged_checkpoint_as_if_it_had_never_been(
    ended: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    flip(shards(run / "checkpoints" / "step-00000004"))
    start = version_of(before(run / "checkpoints" / "step-00000004"))
    watched, result = await complete(
        Execution(RunFolder.resume(run, ["train.steps=6"], start_version=start))
    )
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == list(range(start + 1, 7))
    longer = OF.model_copy(update={"train": OF.train.model_copy(update={"steps": 6})})
    _, weights = await synchronous(longer)
    assert_equal(trained(longer, result), weights)
    with pytest.raises(RunError, match=r"version 7: .* it has: [2-5], 6 \(0: none of them\)"):
        Execution(RunFolder.resume(run, ["train.steps=7"], start_version=7))


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_is_damaged_later_is_found_by_the_ranks_that_load_it(
    ranks: int, tmp_path: Path
) -> None:
    """After the resume has looked at all files.

    Each rank verifies what it reads, and the run ends at once.
    """
    changes = {"train__dp": ranks, "launch__launcher": "process" if ranks > 1 else "inline"}
    await complete(
        Execution(
            RunFolder.create(
                recipe(TINY, train__steps=2, checkpoint__every=1, **changes), tmp_path / "run"
            )
        )
    )
    resumed = Execution(RunFolder.resume(tmp_path / "run", ["train.steps=4"]))
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    shard = sorted((newest / "train").glob("*.distcp"))[-1]
    flip(shard)
    watched, result = await complete(resumed)
    assert result.state == "failed"
    assert (
        f"CheckpointUnusable: checkpoint: {shard} is damaged: its xxh3 digest is " in result.reason
    )
    assert f"asyncdock resume {tmp_path / 'run'} --from 1" in result.reason
    assert not watched.of("step")
    assert not [worker for worker in watched.of("worker") if worker["change"] == "restarted"]


def written(folder: Path, version: int = 1, value: float = 0.0) -> checkpoint.Checkpoint:
    """A checkpoint; ``value`` is added to one weight."""
    engine = train_engine(OF)
    with torch.no_grad():
        next(iter(engine.model.parameters())).view(-1)[0] += value  # type: ignore[attr-defined]
    writer = checkpoint.Writer(engine)
    writer.copy()
    writer.write(checkpoint.begin(folder, version))
    return checkpoint.finish(
        folder, tokenizer_of(OF), version, {"counters": {}, "remake": []}, keep=9
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_that_is_not_finite_is_neither_written_nor_loaded(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = written(tmp_path / "run" / "checkpoints")
    with pytest.raises(BaseException, match="are not finite") as refused:  # torch's is no Exception
        written(good.path.parent, 2, value)
    unusable = checkpoint.unusable_state(refused.value)
    assert unusable is not None
    assert "step-00000002 is not written" in str(unusable)
    assert "goes on from the checkpoint of version 1" in str(unusable)
    with monkeypatch.context() as patch:
        # as older versions have written them
        patch.setattr(checkpoint, "not_finite", lambda state: None)
        bad = written(good.path.parent, 2, value)
    with pytest.raises(
        CheckpointUnusable, match=f"{bad.path / 'train'} has values of 'model.* that are not finite"
    ):
        bad.load_into(train_engine(OF))
    good.load_into(train_engine(OF))


def test_the_digests_are_those_of_the_files_and_an_older_checkpoint_without_them_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = written(tmp_path)
    files = json.loads((made.path / "digests.json").read_text())["files"]
    found = {
        path.relative_to(made.path).as_posix(): path
        for path in made.path.rglob("*")
        if path.is_file()
    }
    assert files.keys() == found.keys() - {"digests.json"}
    for name, digest in files.items():
        content = found[name].read_bytes()
        assert digest == {"bytes": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
    (made.path / "digests.json").unlink()
    made.verify()
    made.load_into(train_engine(OF))
    verify(made.path)
    assert "not verified: it has no digests" in capsys.readouterr().out


def test_a_damaged_model_is_refused_by_what_loads_it_and_a_copy_of_it_is_not_verified(
    tmp_path: Path,
) -> None:
    """So do served checkpoints, references and runs that begin with one."""
    model = written(tmp_path).model
    load_model(str(model), dtype=torch.float32, seed=0)
    flip(model / "model.safetensors")
    with pytest.raises(FilesDamaged, match=f"{model / 'model.safetensors'} is damaged"):
        load_model(str(model), dtype=torch.float32, seed=0)
    shutil.copytree(model, tmp_path / "copy")
    load_model(str(tmp_path / "copy"), dtype=torch.float32, seed=0)


def test_one_that_was_damaged_at_its_url_is_not_copied_from_there(tmp_path: Path) -> None:
    local = tmp_path / "run" / "checkpoints"
    remote = tmp_path / "remote"
    there = tmp_path / "there" / "checkpoints"
    remote.mkdir()
    store = CheckpointStore(str(remote))
    for version in (1, 2):
        store.push(written(local, version).path, keep=9)
    flip(remote / "step-00000002" / "model" / "model.safetensors")
    with pytest.raises(
        CheckpointUnusable,
        match=r"remote/step-00000002 is damaged, "
        r".*model.safetensors",
    ) as refused:
        checkpoint.newest(there, str(remote))
    assert "--from 1" in str(refused.value)
    assert not checkpoint.whole(there)
    digests, damages = store.verify("step-00000002")
    assert digests == manifest.read(local / "step-00000002")
    assert len(damages) == 1
    assert "model/model.safetensors is damaged" in damages[0]
    assert store.verify("step-00000001")[1] == []
    part = checkpoint.newest(there, str(remote), 2, ["train"])
    assert part is not None, "its other part is whole"
    assert sorted(path.name for path in part.path.iterdir()) == [
        "digests.json",
        "run.json",
        "train",
    ]


def test_a_copy_at_the_url_is_not_removed_to_make_the_same_one(tmp_path: Path) -> None:
    """The disk may not give the files a second time."""
    made = written(tmp_path / "run" / "checkpoints")
    remote = tmp_path / "remote"
    remote.mkdir()
    store = CheckpointStore(str(remote))
    store.push(made.path, keep=1)
    flip(shards(made.path))
    store.push(made.path, keep=1)
    assert store.verify("step-00000001")[1] == []


def test_versions_at_the_url_are_set_aside_with_those_here(tmp_path: Path) -> None:
    out = tmp_path / "run"
    remote = tmp_path / "remote"
    remote.mkdir()
    store = CheckpointStore(str(remote))
    for version in (1, 2, 3):
        store.push(written(out / "checkpoints", version).path, keep=9)
    set_newer_aside(out, str(remote), 1)
    assert store.names() == ["step-00000001"]
    names = ["aside-step-00000002", "aside-step-00000003", "step-00000001"]
    for folder in (remote, out / "checkpoints"):
        assert sorted(path.name for path in folder.iterdir()) == names
    set_aside = written(out / "checkpoints", 2)
    assert checkpoint.set_aside(set_aside.path).name == "aside-step-00000002-2", (
        "none replaces another"
    )
