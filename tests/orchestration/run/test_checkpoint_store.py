"""Checkpoints at a URL: on a real S3 server, and in a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints import store as stores
from orchestration.checkpoints.store import CheckpointStore, StoreRefused
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.model import manifest
from stages.model.manifest import FilesDamaged
from stages.parallel.layout import RankCoordinates
from tests.orchestration.run.test_run import assert_equal, synchronous, trained
from tests.orchestration.runs import MOCK, TINY, complete, recipe
from tests.ranks import on_ranks
from tests.servers import s3_server
from tests.stages.engines.torch.test_sharded import assert_same_state
from tests.stages.sharded import OPTIONS, algorithm, model_of, share, whole_state

FILES = {
    "model/model.safetensors": b"m" * 5000,
    "model/config.json": b"{}",
    "train/.metadata": b"x",
    "train/a": b"y",
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server():
        yield "s3://bucket/runs"


@pytest.fixture(params=["s3", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    (tmp_path / "mounted").mkdir()
    return str(tmp_path / "mounted")


def written(folder: Path, version: int) -> Path:
    """A checkpoint of ``version`` in ``folder``, of files that no engine reads."""
    found = folder / f"step-{version:08d}"
    state = {"version": version, "counters": {}, "remake": []}
    for name, content in {**FILES, "run.json": json.dumps(state).encode()}.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_bytes(content)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_checkpoint_comes_back_as_it_was_and_in_parts(url: str, tmp_path: Path) -> None:
    store = CheckpointStore(url)
    here = tmp_path / "here"
    there = tmp_path / "there"
    for version in (2, 4, 6):
        store.push(written(here, version), keep=2)
    assert store.names() == ["step-00000004", "step-00000006"]
    found = checkpoint.newest(there, url, 6, ["model"])
    assert found is not None
    assert found.version == 6
    assert {name.partition("/")[0] for name in contents(found.path)} == {"model", "run.json"}
    other = checkpoint.newest(there, url, 6, ["train"])
    assert other is not None
    assert contents(other.path) == contents(here / "step-00000006"), (
        "the parts of two engines of one machine"
    )
    store.push(written(here, 8), keep=2)
    newer = checkpoint.newest(there, url, 8, ["train"])
    assert newer is not None
    store.push(written(here, 10), keep=2)
    assert checkpoint.newest(there, url, 8, ["train"]) == newer, (
        "what is here is not looked for there"
    )
    newest = checkpoint.newest(there, url, 9, ["model"])
    assert newest is not None
    assert [path.name for path in checkpoint.whole(there)] == ["step-00000006", newest.path.name], (
        "no part of older ones"
    )


def test_what_is_not_whole_is_no_checkpoint(url: str, tmp_path: Path) -> None:
    store = CheckpointStore(url)
    here = tmp_path / "here"
    store.push(written(here, 2), keep=9)
    store.push(written(here, 4), keep=9)
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    files.rm_file(f"{root}/step-00000004/files.json")  # its writer was killed
    assert checkpoint.newest(tmp_path / "a", url).version == 2  # type: ignore[union-attr]
    files.pipe_file(f"{root}/step-00000002/model/model.safetensors", b"m" * 4999)
    with pytest.raises(OSError, match=r"model\.safetensors has 4999 bytes of 5000"):
        store.pull("step-00000002", tmp_path / "b")
    assert checkpoint.latest(tmp_path / "b") is None
    store.push(here / "step-00000002", keep=9)  # again, in the place of the damaged one
    assert contents(store.pull("step-00000002", tmp_path / "b")) == contents(here / "step-00000002")


def test_one_that_is_removed_while_it_is_read_is_left_for_a_newer_one(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/removed"
    store = CheckpointStore(url)
    pull = CheckpointStore.pull
    store.push(written(tmp_path, 2), keep=1)

    def late(self: CheckpointStore, name: str, *arguments: object) -> Path:
        if name == "step-00000002":
            store.push(written(tmp_path, 4), keep=1)
        return pull(self, name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointStore, "pull", late)
    found = checkpoint.newest(tmp_path / "there", url, 1, ["model"])
    assert found is not None
    assert found.version == 4


def test_a_store_that_refuses_is_tried_again_and_then_named(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = written(tmp_path, 2)
    tries = [0]
    push = CheckpointStore._push

    def flaky(self: CheckpointStore, folder: Path) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError("503")
        push(self, folder)

    monkeypatch.setattr(CheckpointStore, "_push", flaky)
    CheckpointStore(f"{bucket}/flaky").push(here, keep=1)
    assert tries == [3]
    tries[0] = -1000
    monkeypatch.setattr(stores, "PUSH_SECONDS", 0.3)
    with pytest.raises(
        StoreRefused,
        match=r"step-00000002 cannot be copied to checkpoint\.url = s3://.* "
        r"\(OSError: 503\)",
    ):
        CheckpointStore(f"{bucket}/flaky").push(here, keep=1)
    monkeypatch.setattr(CheckpointStore, "_push", push)
    with pytest.raises(StoreRefused, match="bucket does not exist"):
        CheckpointStore("s3://none/runs").push(here, keep=1)


def saved_apart(
    ranks: RankCoordinates, disks: str, url: str, environment: dict[str, str]
) -> dict[str, Any]:
    """A step, and a checkpoint of it in which each rank writes to a disk of its own; its state."""
    os.environ.update(environment)
    engine = TorchTrainEngine(model_of("llama"), parallel=Sharded(ranks), **OPTIONS)
    engine.train_batch(share(ranks), algorithm())
    state = whole_state(engine)
    writer = checkpoint.Writer(engine, ranks.rank, url)
    writer.copy()
    partial = Path(disks) / str(ranks.rank) / ".step-00000001.partial"
    for part in ("", checkpoint.CRITIC):
        writer.write(partial, part)
    assert (partial / "train").exists() == (ranks.rank == 0), (
        "a shard on another disk was copied, and is not kept there"
    )
    return state


def test_ranks_on_other_disks_copy_their_shards_to_the_url(url: str, tmp_path: Path) -> None:
    """Rank 0's disk and the URL have all of the checkpoint, and ranks of another number go on from
    there."""
    store = CheckpointStore(url)
    here = tmp_path / "0"
    partial = checkpoint.begin(here, 1)
    # by a rank that was killed
    store.stage(written(tmp_path / "killed" / ".step-00000001.partial", 1), "model")
    credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    state = on_ranks(2, 1, saved_apart, str(tmp_path), url, credentials)[0]
    made = checkpoint.finish(
        here, tokenizer_of(recipe(TINY)), 1, {"counters": {}, "remake": []}, keep=1
    )
    shards = {file.name for file in (made.path / "train").glob("*.distcp")}
    assert {name.split("_")[2] for name in shards} == {"0", "1"}
    store.push(made.path, keep=1)
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    assert not files.glob(f"{root}/.step-*")
    pulled = checkpoint.newest(tmp_path / "there", url, 1)
    assert pulled is not None
    assert contents(pulled.path) == contents(made.path)
    assert not partial.exists()
    alone = TorchTrainEngine(model_of("llama", seed=9), **OPTIONS)
    pulled.load_into(alone)
    assert_same_state(whole_state(alone), state)
    critic = checkpoint.Checkpoint(pulled.path / checkpoint.CRITIC, 1, {}, [])
    assert {file.name for file in (critic.path / "train").glob("*.distcp")} == shards
    assert sorted(file.name for file in critic.model.iterdir()) >= ["config.json"]


async def test_a_run_whose_folder_lost_its_checkpoints_goes_on_from_the_url_bit_for_bit(
    bucket: str, tmp_path: Path
) -> None:
    of = recipe(
        TINY, pipeline__staleness=0, train__steps=3, checkpoint__every=2, checkpoint__url=bucket
    )
    _, first = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert first.state == "finished", first.reason
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    watched, result = await complete(
        Execution(RunFolder.resume(tmp_path / "run", ["train.steps=5"]))
    )
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == [4, 5]
    whole = recipe(TINY, pipeline__staleness=0, train__steps=5)
    _, weights = await synchronous(whole)
    assert_equal(trained(whole, result), weights)


async def test_the_url_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    _, begun = await complete(
        Execution(RunFolder.create(recipe(MOCK, checkpoint__url=str(first)), tmp_path / "run"))
    )
    url = str(first / begun.run)
    assert CheckpointStore(url).names() == ["step-00000003", "step-00000006"]
    _, result = await complete(Execution(RunFolder.resume(tmp_path / "run", ["train.steps=7"])))
    assert result.run != begun.run
    assert CheckpointStore(url).names() == ["step-00000006", "step-00000007"], (
        "it has the folder of the first run"
    )
    await complete(
        Execution(RunFolder.resume(tmp_path / "run", ["train.steps=8", "checkpoint.url="]))
    )
    assert CheckpointStore(url).names()[-1] == "step-00000007"
    watched, _ = await complete(
        Execution(RunFolder.resume(tmp_path / "run", ["train.steps=9", f"checkpoint.url={second}"]))
    )
    assert [step["step"] for step in watched.of("step")] == [9]
    names = CheckpointStore(str(second / begun.run)).names()
    assert names == ["step-00000008", "step-00000009"], (
        "with the one that it begins with, for other machines"
    )


async def test_a_place_that_cannot_be_written_fails_the_run_before_it_works(
    bucket: str, tmp_path: Path
) -> None:
    watched, result = await complete(
        Execution(
            RunFolder.create(recipe(MOCK, checkpoint__url="s3://none/runs"), tmp_path / "run")
        )
    )
    assert result.state == "failed"
    assert "checkpoint.url: s3://none/runs/mock-test-" in result.reason
    assert "check that its folder or bucket exists" in result.reason
    assert not watched.of("worker")
    absent = recipe(MOCK, checkpoint__url=str(tmp_path / "nowhere"))
    _, result = await complete(Execution(RunFolder.create(absent, tmp_path / "other")))
    assert "FileNotFoundError" in result.reason, "what is not mounted is not made"


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("s4://bucket", "cannot be used .Protocol not known: s4"),
        ("sftp://alice:secret@host/runs", r'"sftp://\*\*\*@host/runs": may hold a password'),
    ],
)
def test_other_urls_are_refused(url: str, wrong: str) -> None:
    with pytest.raises(RecipeError, match=rf"checkpoint\.url = .*{wrong}"):
        recipe(MOCK, checkpoint__url=url)


def test_a_relative_path_is_of_the_folder_in_which_the_run_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe(MOCK, checkpoint__url="x").with_absolute_paths().checkpoint.url == str(
        tmp_path / "x"
    )
    assert (
        recipe(MOCK, checkpoint__url="s3://b/x").with_absolute_paths().checkpoint.url == "s3://b/x"
    )
    assert recipe(MOCK).with_absolute_paths().checkpoint.url == ""


# ── lists that somebody else has written ──

OUTSIDE = [
    "../outside",
    "/tmp/outside",
    "model/../../outside",
    "./model/a",
    "model//a",
    "",
    "model/a\n",
    "..",
    "a\0b",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_out_of_its_checkpoint_is_refused(
    name: str, url: str, tmp_path: Path
) -> None:
    store = CheckpointStore(url)
    here = tmp_path / "here"
    store.push(written(here, 2), keep=9)
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    listed = json.loads(files.cat_file(f"{root}/step-00000002/files.json"))
    files.pipe_file(f"{root}/step-00000002/files.json", json.dumps({**listed, name: 1}).encode())
    with pytest.raises(FilesDamaged, match=r"files\.json names .*, which"):
        store.pull("step-00000002", tmp_path / "there")
    assert contents(tmp_path / "there").keys() <= {".pull.lock"}
    digests = {"files": {name: {"bytes": 1, "xxh3": "0"}}}
    with pytest.raises(FilesDamaged, match=r"digests\.json names .*, which"):
        manifest.parse(json.dumps(digests).encode(), "digests.json")


@pytest.mark.parametrize("size", [-1, "1", 1.5, None, True])
def test_a_size_that_is_none_is_refused(size: object, url: str, tmp_path: Path) -> None:
    store = CheckpointStore(url)
    store.push(written(tmp_path / "here", 2), keep=9)
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    files.pipe_file(
        f"{root}/step-00000002/files.json", json.dumps({"model/config.json": size}).encode()
    )
    with pytest.raises(FilesDamaged, match="as the size of a file"):
        store.pull("step-00000002", tmp_path / "there")


def test_a_file_that_is_larger_than_listed_is_not_copied(url: str, tmp_path: Path) -> None:
    store = CheckpointStore(url)
    store.push(written(tmp_path / "here", 2), keep=9)
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    files.pipe_file(f"{root}/step-00000002/model/config.json", b"x" * 100_000)
    with pytest.raises(OSError, match=r"model/config\.json has 100000 bytes of 2"):
        store.pull("step-00000002", tmp_path / "there")
    assert not any("config.json" in name for name in contents(tmp_path / "there"))


def test_folders_with_other_names_are_no_checkpoints(url: str, tmp_path: Path) -> None:
    store = CheckpointStore(url)
    store.push(written(tmp_path / "here", 2), keep=9)
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    for name in ("step-x", "step-99999999999999999999999", "step-00000003 ", "step-1"):
        files.makedirs(f"{root}/{name}", exist_ok=True)
        files.pipe_file(f"{root}/{name}/files.json", b"{}")
        (tmp_path / "here" / name).mkdir()
        (tmp_path / "here" / name / "run.json").write_text("{}")
    assert store.names() == ["step-00000002"]
    assert [path.name for path in checkpoint.whole(tmp_path / "here")] == ["step-00000002"]
