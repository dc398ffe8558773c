"""Distributed checkpoints that somebody else has written: read as data, or refused with the file
and what it names."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from orchestration.checkpoints import shards
from orchestration.checkpoints.shards import METADATA, ShardsRefused


class Marks:
    """A pickle of it makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def state() -> dict[str, Any]:
    return {
        "model": {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)},
        "step": 3,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "train"), no_dist=True)
    return tmp_path / "train"


def loaded(folder: Path) -> dict[str, Any]:
    found = {
        "model": {name: torch.zeros_like(value) for name, value in state()["model"].items()},
        "step": 0,
    }
    with warnings.catch_warnings(action="ignore"):
        shards.load(found, shards.Reader(folder), no_dist=True)
    return found


def changed(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Let ``change`` write into the metadata, or return another object in its place."""
    path = folder / METADATA
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))


def place_of(metadata: Metadata, name: str) -> Any:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == name)


def test_it_is_what_torch_reads(folder: Path) -> None:
    metadata = shards.read_metadata(folder)
    by_torch = pickle.loads((folder / METADATA).read_bytes())
    for part in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(metadata, part) == getattr(by_torch, part)
    found = loaded(folder)
    assert found["step"] == 3
    assert all(torch.equal(found["model"][name], value) for name, value in state()["model"].items())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("where", ["whole", "planner_data", "storage_meta", "a name"])
def test_a_pickle_in_the_metadata_is_not_executed(
    folder: Path, tmp_path: Path, where: str, protocol: int
) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    marks = Marks(tmp_path / "marker")
    match where:
        case "whole":
            metadata = marks
        case "a name":
            metadata.state_dict_metadata["x"] = (marks,)
        case _:
            setattr(metadata, where, marks)
    (folder / METADATA).write_bytes(pickle.dumps(metadata, protocol))
    refused = (
        r"train/\.metadata names (posix\.mkdir|\w+\._reconstructor), which no checkpoint "
        r"holds"
    )
    with pytest.raises(ShardsRefused, match=refused):
        shards.read_metadata(folder)
    with pytest.raises(ShardsRefused):
        shards.Reader(folder).read_metadata()
    assert not (tmp_path / "marker").exists()


OPCODES = {
    "an attribute of a known module": b"ctorch\nload\n.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x07os.path\x93.",
    "a class of metadata's module": b"ctorch.distributed.checkpoint.metadata\nos\n.",
    "builtins": b"cbuiltins\neval\n(V1\ntR.",
    "a registered extension": b"\x82\x01.",
    "a reference outside": b"Pname\n.",
    "an instance": b"(ios\nsystem\n.",
    "nothing": b"",
    "no pickle": b"{}",
    "deep": b"(" * 100_000 + b"l" * 100_000 + b".",
    "a number": b"I1\n.",
}


@pytest.mark.parametrize("content", OPCODES.values(), ids=OPCODES.keys())
def test_what_is_no_metadata_is_refused(folder: Path, content: bytes) -> None:
    (folder / METADATA).write_bytes(content)
    with pytest.raises(ShardsRefused, match=r"train/\.metadata"):
        shards.read_metadata(folder)


def test_a_pickle_changes_no_class_of_this_process(folder: Path) -> None:
    """BUILD with a pair sets attributes of any object that a name gives: here, of a class."""
    content = b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n(N(dVsize\nI1\nstb."
    assert any(opcode.name == "BUILD" for opcode, *_ in pickletools.genops(content))
    (folder / METADATA).write_bytes(content)
    with pytest.raises(ShardsRefused):
        shards.read_metadata(folder)
    assert "size" not in vars(TensorStorageMetadata)


@pytest.mark.parametrize(
    "name", ["../elsewhere", "/etc/passwd", "__0_0.distcp/../x", "a.distcp", "", "__0_0.distcp\n"]
)
def test_a_shard_is_a_file_beside_it(folder: Path, name: str) -> None:
    def change(metadata: Metadata) -> None:
        place_of(metadata, "model.a").relative_path = name

    changed(folder, change)
    with pytest.raises(CheckpointException, match="which is no shard beside it"):
        loaded(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("offset", -1), ("length", 1 << 70), ("offset", "0"), ("length", True)]
)
def test_sizes_are_counts(folder: Path, field: str, value: object) -> None:
    changed(folder, lambda metadata: setattr(place_of(metadata, "model.a"), field, value))
    with pytest.raises(CheckpointException, match="is damaged"):
        loaded(folder)


def test_a_tensor_that_the_metadata_calls_bytes_is_not_unpickled(
    folder: Path, tmp_path: Path
) -> None:
    """torch's planner loads bytes with weights_only=False."""
    shard = folder / "__0_0.distcp"
    content = io.BytesIO()
    torch.save(Marks(tmp_path / "marker"), content)
    begins = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(content.getvalue())

    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.a"] = BytesStorageMetadata()
        place = place_of(metadata, "model.a")
        place.offset = begins
        place.length = len(content.getvalue())
        metadata.storage_data[MetadataIndex("model.a")] = place

    changed(folder, change)
    with pytest.raises(CheckpointException, match=r"value of 'model\.a' names posix\.mkdir"):
        loaded(folder)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["step", "model.a"])
def test_a_shard_with_a_pickle_is_not_executed(folder: Path, tmp_path: Path, name: str) -> None:
    shard = folder / "__0_0.distcp"
    content = io.BytesIO()
    torch.save(Marks(tmp_path / "marker"), content)
    begins = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(content.getvalue())

    def change(metadata: Metadata) -> None:
        place = place_of(metadata, name)
        place.offset = begins
        place.length = len(content.getvalue())

    changed(folder, change)
    with pytest.raises(CheckpointException, match=r"names posix\.mkdir"):
        loaded(folder)
    assert not (tmp_path / "marker").exists()
