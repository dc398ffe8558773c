"""Reads torch's distributed checkpoints as data: whoever has written the files, nothing in them is
executed.

    .metadata, a pickle ─▶ an unpickler with names of its own for the few classes it may hold ─▶ plain records
    records ─▶ names, sizes and offsets are looked at ─▶ torch's Metadata ─▶ the shards beside it: tensors and numbers alone

torch's own reader unpickles ``.metadata`` without limits, and its planner loads what that file
calls bytes the same way. Digests do not help: who can write a checkpoint can write its digests,
too.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from stages.engines.protocols import CONTROL
from stages.model.manifest import FilesDamaged

METADATA = ".metadata"
# of a file .metadata; one entry of some 200 bytes for each tensor of each rank
MOST_BYTES = 1 << 30
_SHARD = re.compile(r"__\d+_\d+\.distcp")  # as torch names the files of a rank
# in what torch says of a pickle with other things than tensors
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"


class ShardsRefused(FilesDamaged, ValueError):
    """A file of a distributed checkpoint holds what a checkpoint does not hold.

    The message names the file and it.
    """


class Reader(dcp.FileSystemReader):
    """torch's reader of the distributed checkpoint in a folder, with ``.metadata`` read by
    :func:`read_metadata`."""

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            global_match = _GLOBAL.search(str(error))
            names = f"names {global_match[1]}" if global_match else "is damaged"
            raise ShardsRefused(
                f"a shard in {self.path} {names}, where a checkpoint has tensors alone"
            ) from None


class Planner(dcp.DefaultLoadPlanner):
    """torch's planner, which takes tensors for tensors and numbers for numbers.

    Other objects are not unpickled.
    """

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            number = torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            global_match = _GLOBAL.search(str(error))
            names = f"names {global_match[1]}" if global_match else "is damaged"
            raise ShardsRefused(
                f"the checkpoint's value of {name!r} {names}, where it has a number"
            ) from None
        if not isinstance(number, int | float) or isinstance(self.state_dict[name], torch.Tensor):
            raise ShardsRefused(f"the checkpoint's value of {name!r} is a {type(number).__name__}")
        plain = io.BytesIO()
        torch.save(number, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load(state: dict[str, Any], reader: dcp.FileSystemReader, *, no_dist: bool) -> None:
    """Fill the tensors and numbers of the nested ``state`` from the checkpoint of ``reader``, on
    all ranks unless ``no_dist``; ``state`` also gets the numbers of an algorithm's control that
    are stored. Raises ShardsRefused, and CheckpointException with it."""
    names: Iterable[str] = ()
    with suppress(FilesDamaged, OSError):  # which torch's own reading raises, on all ranks
        names = reader.read_metadata().state_dict_metadata
    stored = (name.partition(".") for name in names)
    state.pop(CONTROL, None)
    if control := {name: 0.0 for part, _, name in stored if part == CONTROL}:
        state[CONTROL] = control
    dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=no_dist)


def read_metadata(folder: Path) -> Metadata:
    """Return what the distributed checkpoint in ``folder`` holds. Raises ShardsRefused."""
    path = folder / METADATA
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ShardsRefused(f"{path} has more than {MOST_BYTES >> 20} MiB")
    try:
        return _Metadata(path).of(_Unpickler(content, path).load())
    except ShardsRefused:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ShardsRefused(
            f"{path} is damaged: it is no metadata of a checkpoint ({error!r:.200})"
        ) from None


class _Record:
    """A stand-in for an object in a pickle: its ``state``, or the ``arguments`` that it would be
    made of."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state = dict[str, Any]()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes records in place of objects.

    No class outside of the file can be called or changed by it: each file has its own stand-ins.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path
        records = [
            (_METADATA, "Metadata"),
            (_METADATA, "TensorStorageMetadata"),
            (_METADATA, "BytesStorageMetadata"),
            (_METADATA, "ChunkStorageMetadata"),
            (_METADATA, "TensorProperties"),
            (_METADATA, "MetadataIndex"),
            (_METADATA, "StorageMeta"),
            (_METADATA, "_MEM_FORMAT_ENCODING"),
            (_FILES, "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
        ]
        self._known = {place: type(place[1], (_Record,), {}) for place in records}
        # where a checkpoint was written to, which nothing here reads
        for library in ("pathlib", "pathlib._local"):
            self._known[library, "PosixPath"] = type("PosixPath", (_Record,), {})

    def find_class(self, module: str, name: str) -> Any:
        if (known := self._known.get((module, name))) is not None:
            return known
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise ShardsRefused(f"{self._path} names {module}.{name}, which no checkpoint holds")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ShardsRefused(f"{self._path} refers to {pid!r:.100} outside of it")


class _Metadata:
    """The maker of torch's objects of the records of ``path``.

    Any error while it does says that the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, record: Any) -> Metadata:
        state = _state(record, "Metadata")
        stored = state["state_dict_metadata"]
        places = state["storage_data"]
        return Metadata(
            state_dict_metadata={_text(name): self._stored(each) for name, each in stored.items()},
            planner_data=_paths(state["planner_data"]),
            storage_data={self._index(key): self._place(each) for key, each in places.items()},
            version=None if state.get("version") is None else _text(state["version"]),
        )

    def _stored(self, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if _kind(record) == "BytesStorageMetadata":
            return BytesStorageMetadata()
        state = _state(record, "TensorStorageMetadata")
        dtype = _state(state["properties"], "TensorProperties")[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{dtype!r:.100} is no dtype")
        chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
        boxes = [
            ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks
        ]
        return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(state["size"]), boxes)

    def _index(self, record: Any) -> MetadataIndex:
        state = _state(record, "MetadataIndex")
        offset = state.get("offset")
        index = state.get("index")
        begins = None if offset is None else _size(offset)
        return MetadataIndex(_text(state["fqn"]), begins, None if index is None else _count(index))

    def _place(self, record: Any) -> _StorageInfo:
        state = _state(record, "_StorageInfo")
        name = _text(state["relative_path"])
        offset = _count(state["offset"])
        length = _count(state["length"])
        if not _SHARD.fullmatch(name):
            raise ShardsRefused(
                f"{self._path} names the file {name!r:.100}, which is no shard beside it"
            )
        if state.get("transform_descriptors"):
            raise ShardsRefused(
                f"{self._path} has {name} read by an extension, which no checkpoint of a run has"
            )
        return _StorageInfo(name, offset, length)


def _kind(record: Any) -> str:
    return type(record).__name__ if isinstance(record, _Record) else ""


def _state(record: Any, kind: str) -> Any:
    if _kind(record) != kind:
        raise TypeError(
            f"it has a {_kind(record) or type(record).__name__} in the place of a {kind}"
        )
    return record.state


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.100} is no name")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise TypeError(f"{value!r:.100} is no count")
    return value


def _size(record: Any) -> torch.Size:
    if _kind(record) != "Size":
        raise TypeError(f"{record!r:.100} is no size")
    (sizes,) = record.arguments
    return torch.Size(_count(each) for each in sizes)


def _paths(planner_data: Mapping[Any, Iterable[Any]]) -> dict[str, tuple[str | int, ...]]:
    """Return where each flat name is in the nested state."""
    paths = {}
    for name, path in planner_data.items():
        if not all(type(part) in (str, int) for part in path):
            raise TypeError(f"{path!r:.100} is no place in a state")
        paths[_text(name)] = tuple(path)
    return paths
