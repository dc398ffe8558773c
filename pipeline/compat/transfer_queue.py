"""The calls that TransferQueue's users know, on a dock: values by key, in partitions. `docs/from-transfer-queue.md` says
what is the same and what is stricter.

    kv_put, kv_batch_put ─▶ bytes into shared memory, once, for all fields ─▶ index: key ─▶ where its fields lie
    kv_batch_get ◀─ copied out ◀─ where do these keys lie? … and asked again: what changed meanwhile is read anew
    kv_list, kv_clear ─▶ index

A process connects once, by :func:`init`, and works through an event loop in a thread of its own, so that the calls and
their async twins can be used from any thread and any loop.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import json
import math
import os
import platform
import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from pipeline.blocks import jagged_parts
from pipeline.columns import Column, ColumnError, Packed, Schema
from pipeline.index.client import REF, FieldsChanged, Index, IndexRefused, RunConfig, worker_name
from pipeline.index.embedded import EmbeddedIndex
from pipeline.index.keys import KeysFound
from pipeline.warehouse.arena import StaleHandle, shared_memory_directory
from pipeline.warehouse.dock import Dock

Tag = dict[str, Any]
Parser = Callable[[dict[str, Any]], Any]
T = TypeVar("T")

INDEX, RUN = "ASYNCDOCK_INDEX", "ASYNCDOCK_RUN"  # where a process that starts a queue tells its children of it
_DEFAULTS: dict[str, Any] = {
    "url": None,  # of the index; None: the one that a parent has started, or one of its own
    "run": None,
    "arena": 1 << 30,  # bytes, of the node's warehouse when this process is the first there
    "directory": None,  # of its arena
    "node": None,
    "serve": "",  # address on which other nodes reach this node's warehouse, when this process is the first there
    "secret": b"",
    "tls_certificate": "",  # PEM files: inside TLS, when they are given
    "tls_key": "",
    "tls_authority": "",
    "timeout": 30.0,  # seconds, of a call to the index
    "room_timeout": 600.0,  # seconds that a put waits while the warehouse is full
}
_TRANSFER_QUEUES_OWN = ("controller", "backend", "metrics")

# Fields are stored as bytes, and what they are is kept by the index for each partition: they become known one by one, while
# the columns of a run, which its nodes agree on, stay as they are.
MAX_FIELDS = 63  # of a partition: the index keeps a key's fields as bits of two 32-bit words
_BYTES = Schema([Column.ragged(f"field{bit}", torch.uint8) for bit in range(MAX_FIELDS)], most=MAX_FIELDS)
_RECORD = np.dtype([("fields", "<u8"), ("block", "<u4"), ("slot", "<u4"), ("low", "<u4"), ("high", "<u2")])
_KNOWN_PARTITIONS = 1024
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass
class KVBatchMeta:
    """What a put has put: keys with their tags, and the fields that all of them have now."""

    keys: list[str] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have same length, but got {len(self.keys)} and {len(self.tags)}")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("Got duplicated keys.")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise ValueError("Got duplicated fields.")
        self.tags, self.extra_info = copy.deepcopy(self.tags), copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _at(self, positions: Sequence[int]) -> KVBatchMeta:
        keys, tags = [self.keys[i] for i in positions], [self.tags[i] for i in positions]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """These keys alone, in this order."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError("Contain duplicate keys.")
        places = {key: i for i, key in enumerate(self.keys)}
        if missing := set(keys_to_select) - set(places):
            raise RuntimeError(f"Keys {missing} not found in current batch.")
        return self._at([places[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Put keys and tags into the order of ``indexes``, in place."""
        if len(indexes) != self.size:
            raise ValueError(f"indexes: {len(indexes)} of them do not match the batch size {self.size}")
        if len(set(indexes)) != len(indexes):
            raise ValueError("Contain duplicate indexes.")
        ordered = self._at(indexes)
        self.keys, self.tags = ordered.keys, ordered.tags

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """``chunks`` parts of neighbouring keys, whose sizes differ by one at most."""
        return [self._at(part.tolist()) for part in np.array_split(np.arange(self.size), chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """One batch of several of the same partition and fields; what their ``extra_info`` says must not contradict."""
        data = [part for part in data if part is not None and part.size]
        if not data:
            return cls()
        first = data[0]
        extra: dict[str, Any] = {}
        for part in data:
            if part.fields is not None and set(part.fields) != set(first.fields or ()):
                raise ValueError("Field names do not match for concatenation.")
            if part.partition_id != first.partition_id:
                raise ValueError("Partition do not match for concatenation.")
            for name, told in (part.extra_info or {}).items():
                if not _equal(extra.setdefault(name, told), told):
                    raise ValueError(
                        f"KVBatchMeta.concat: extra_info key '{name}' has conflicting values across chunks."
                    )
        keys, tags = [key for part in data for key in part.keys], [tag for part in data for tag in part.tags]
        return cls(keys, tags, first.partition_id, first.fields, extra or None)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


# ── fields and bytes ──


@dataclass(frozen=True)
class _Field:
    """What all values of a field have in common: ``dtype`` (None: JSON), and the shape of a row after its first dimension,
    in which rows may differ (None: rows are scalars)."""

    name: str
    dtype: torch.dtype | None
    inner: tuple[int, ...] | None

    @property
    def kind(self) -> str:
        if self.dtype is None:
            return "json"
        shape = "" if self.inner is None else " " + ",".join(["*", *map(str, self.inner)])
        return str(self.dtype).removeprefix("torch.") + shape

    @classmethod
    def parse(cls, name: str, kind: str) -> _Field:
        dtype, _, shape = kind.partition(" ")
        inner = tuple(int(size) for size in shape.split(",")[1:]) if shape else None
        return cls(name, None if dtype == "json" else _DTYPES[dtype], inner)

    @property
    def nbytes(self) -> int:
        """Of one step along a row's first dimension; of the row, when it is a scalar."""
        return 1 if self.dtype is None else self.dtype.itemsize * math.prod(self.inner or ())


@dataclass(frozen=True)
class _Fields:
    """The fields of a partition, in the order in which they came; a field's bit is its place. ``packed`` is what the index
    keeps: a line of JSON for each."""

    packed: str = ""

    @cached_property
    def by_name(self) -> dict[str, tuple[int, _Field]]:
        lines = enumerate(map(json.loads, self.packed.splitlines()))
        return {name: (bit, _Field.parse(name, kind)) for bit, (name, kind) in lines}

    def names(self, mask: int) -> list[str]:
        return [name for name, (bit, _) in self.by_name.items() if mask >> bit & 1]

    def joined(self, encoded: Sequence[tuple[_Field, Packed]], partition: str) -> tuple[_Fields, dict[int, Packed]]:
        """These fields and those of ``encoded`` that are new, and its values by bit. Raises ColumnError for values that are
        not of their field's kind, and cannot become so without a change."""
        new = [found for found, _ in encoded if found.name not in self.by_name]
        if len(self.by_name) + len(new) > MAX_FIELDS:
            name = new[MAX_FIELDS - len(self.by_name)].name
            raise IndexRefused(
                f"field {name} is one too many: a partition has at most {MAX_FIELDS}; join some of them, or put them into "
                "another partition"
            )
        fields = self
        if new:
            fields = _Fields(self.packed + "".join(json.dumps([found.name, found.kind]) + "\n" for found in new))
        values = {}
        for found, value in encoded:
            bit, known = fields.by_name[found.name]
            values[bit] = value if known == found else _converted(value, found, known, partition)
        return fields, values


def _converted(packed: Packed, found: _Field, known: _Field, partition: str) -> Packed:
    """``packed`` in the dtype of its field, where no value changes by that. Raises ColumnError otherwise."""
    told = ""
    if found.dtype is not None and known.dtype is not None and found.inner == known.inner:
        values = packed.values.view(found.dtype)
        if values.is_complex() == known.dtype.is_complex:
            out = values.to(known.dtype)
            back = out.to(found.dtype).view(torch.uint8)
            if torch.equal(back, packed.values):
                assert packed.offsets is not None
                return Packed(out.view(torch.uint8), packed.offsets // found.nbytes * known.nbytes)
            at = int((back != packed.values).nonzero()[0, 0]) // found.dtype.itemsize
            told = f": {values[at].item()} would become {out[at].item()}"
    raise ColumnError(
        f"field {found.name!r}: takes {known.kind}, got {found.kind}; convert it first, or name another field (partition "
        f"{partition!r} keeps {known.kind} until its last key is cleared{told})"
    )


def _encoded(name: str, value: Any, rows: int) -> tuple[_Field, Packed]:
    """What kind of field ``value`` is, and its ``rows`` rows as bytes."""
    value = _tensor(name, value)
    if not isinstance(value, torch.Tensor):
        texts = [_json(f"field {name!r}", item).encode() for item in _items(name, value)]
        _check_rows(name, len(texts), rows)
        values = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        return _Field(name, None, None), Packed(values, _ends([len(text) for text in texts]))
    parts = jagged_parts(value)
    if parts is not None and parts[2] is None and int(parts[1][0]) == 0:
        flat, steps = parts[0], parts[1].to("cpu", torch.int64)
        found = _Field(name, value.dtype, tuple(flat.shape[1:]))
    elif value.is_nested:
        unbound = value.unbind()
        shapes = {tuple(part.shape[1:]) for part in unbound}
        if len(shapes) != 1 or unbound[0].dim() == 0:
            raise ColumnError(
                f"field {name!r}: rows differ beyond their first dimension ({shapes}); pad or flatten them"
            )
        flat, steps = torch.cat(unbound), _ends([len(part) for part in unbound])
        found = _Field(name, value.dtype, shapes.pop())
    else:
        flat, length = value, value.shape[1] if value.dim() > 1 else 1
        steps = torch.arange((value.shape[0] if value.dim() else 0) + 1) * length
        found = _Field(name, value.dtype, tuple(value.shape[2:]) if value.dim() > 1 else None)
    _check_rows(name, len(steps) - 1, rows)
    if found.nbytes == 0:
        raise ColumnError(f"field {name!r}: rows of shape {list(value.shape[1:])} hold nothing; leave the field out")
    flat = flat.detach().cpu().reshape(-1).contiguous()
    return found, Packed(flat.view(torch.uint8), steps * found.nbytes)


def _ends(lengths: Sequence[int]) -> torch.Tensor:
    """Offsets of rows of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return torch.from_numpy(offsets)


def _tensor(name: str, value: Any) -> Any:
    """``value`` as a tensor, when it is an array of numbers or a list of tensors or arrays; anything else as it is."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufc":
            raise TypeError(f"field {name!r}: an array of {value.dtype} cannot be stored; give value.tolist()")
        native = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])
        try:
            return torch.from_numpy(native)
        except TypeError as error:
            raise TypeError(f"field {name!r}: {error}; convert it first") from None
    if isinstance(value, torch.Tensor):
        return value
    items = value.tolist() if isinstance(value, NonTensorStack) else value
    if not isinstance(items, list) or not items or not all(map(_is_numbers, items)):
        return value
    tensors = [_tensor(name, item) for item in items]
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ColumnError(
            f"field {name!r}: rows of {sorted({str(t.dtype) for t in tensors})}; convert them to one dtype"
        )
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    try:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    except RuntimeError:
        shapes = sorted({tuple(tensor.shape[1:]) for tensor in tensors})
        raise ColumnError(
            f"field {name!r}: rows differ beyond their first dimension ({shapes}); pad or flatten them"
        ) from None


def _is_numbers(item: Any) -> bool:
    return isinstance(item, torch.Tensor | np.ndarray) or (isinstance(item, np.generic) and item.dtype.kind in "biufc")


def _items(name: str, value: Any) -> list[Any]:
    if isinstance(value, NonTensorStack | NonTensorData):
        items = value.tolist()
        return items if isinstance(items, list) else [items]
    if isinstance(value, list | tuple):
        return list(value)
    raise TypeError(
        f"field {name!r}: a {type(value).__name__} cannot be stored; give a tensor, or a list of JSON values"
    )


def _check_rows(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(f"field {name!r} has {found} rows for {rows} keys; give one row for each key")


def _json(what: str, value: Any) -> str:
    """Raises TypeError for what does not come back as it was: nothing is pickled, and nothing changes its type, except that
    numpy's scalars become Python's."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        same = _same(json.loads(text), value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: {value!r:.80} cannot be stored ({error}); make it a tensor or a JSON value") from None
    if not same:
        raise TypeError(
            f"{what}: {value!r:.80} would come back as {json.loads(text)!r:.80}; give lists and string keys"
        )
    return text


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(map(_same, one, other))
    return bool(one == other)


def _decoded(found: _Field, packed: Packed) -> Any:
    """A tensor [B] of scalars, a jagged nested tensor [B, j, …], or a stack of JSON values."""
    if found.dtype is None:
        return NonTensorStack(*map(json.loads, packed.texts()))
    values = packed.values.view(found.dtype)
    if found.inner is None:
        return values
    assert packed.offsets is not None
    return torch.nested.nested_tensor_from_jagged(values.view(-1, *found.inner), packed.offsets // found.nbytes)


# ── the queue ──


class _Queue:
    """This process's connection."""

    def __init__(self, conf: Mapping[str, Any]) -> None:
        self.conf, self.pid = dict(conf), os.getpid()
        self.noted = False  # as the queue of a Ray cluster, by this process
        self._server: EmbeddedIndex | None = None
        self._fields: dict[str, _Fields] = {}  # by partition, as they were last heard of
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="transfer-queue", daemon=True).start()
        if self.conf["url"] is None:
            home = Path(tempfile.mkdtemp(prefix="asyncdock-"))
            self._server = EmbeddedIndex(home)
            self._server.start()
            self.conf |= {"url": self._server.url, "run": self.conf["run"] or f"queue-{uuid.uuid4().hex[:8]}"}
            os.environ[INDEX], os.environ[RUN] = self._server.url, self.conf["run"]
        self.conf["run"] = self.conf["run"] or "transfer-queue"
        self.directory = Path(self.conf["directory"] or shared_memory_directory() / f"dock-{self.conf['run']}")
        self.call(self._open())
        atexit.register(self.close)

    async def _open(self) -> None:
        conf = self.conf
        self.index = Index(conf["url"], conf["run"], timeout=conf["timeout"])
        await self.index.init(RunConfig(()), {})
        tls = None
        if conf["tls_certificate"]:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=conf["tls_authority"])
            tls[0].load_cert_chain(conf["tls_certificate"], conf["tls_key"])

        def dock(warehouse: str) -> Dock:
            options = {"node": conf["node"], "secret": conf["secret"], "room_timeout": conf["room_timeout"], "tls": tls}
            worker = worker_name("queue", 0)
            return Dock(self.index, _BYTES, worker=worker, directory=self.directory, warehouse=warehouse, **options)

        self.dock = dock("local")
        found = await self.index.warehouses()
        near = sorted(w.name for w in found if w.node == self.dock.node and not w.leaving)
        if near:
            self.dock = dock(near[0])
            await self.dock.enter()
        else:
            self.dock = dock("local" if not found else f"local-{uuid.uuid4().hex[:6]}")
            await self.dock.join(conf["arena"])
            if conf["serve"]:
                await self.dock.serve(conf["serve"])

    def submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        atexit.unregister(self.close)
        if sys.is_finalizing() or self.pid != os.getpid():
            return
        if self.noted:
            _withdraw(self.conf)

        async def end() -> None:
            await self.dock.close()
            await self.index.close()

        self.call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._server is not None:
            self._server.stop()
            shutil.rmtree(self._server.directory, ignore_errors=True)
            shutil.rmtree(self.directory, ignore_errors=True)
            for name in (INDEX, RUN):
                os.environ.pop(name, None)

    def _learned(self, partition: str, packed: str) -> _Fields:
        known = self._fields.get(partition)
        if known is None or known.packed != packed:
            while len(self._fields) >= _KNOWN_PARTITIONS:
                del self._fields[next(iter(self._fields))]
            known = self._fields[partition] = _Fields(packed)
        return known

    async def put(
        self, keys: list[str], partition: str, fields: Mapping[str, Any], tags: Sequence[Tag] | None
    ) -> KVBatchMeta:
        if len(set(keys)) != len(keys):
            raise ValueError("Got duplicated keys.")
        sent = tags and [_tags(each) for each in tags]
        encoded = [_encoded(name, value, len(keys)) for name, value in fields.items()]
        deadline = time.monotonic() + self.index.timeout
        while True:
            heard = self._fields.get(partition)
            known = heard or self._learned(partition, await self.index.key_fields(partition))
            try:
                grown, values = known.joined(encoded, partition)
            except (ColumnError, IndexRefused):
                if heard is None:
                    raise
                self._fields.pop(partition, None)  # others may have cleared the partition since
                continue
            put = partial(
                self.index.put_keys,
                partition=partition,
                keys=keys,
                known=len(known.packed),
                fields=grown.packed,
                bits=sum(1 << bit for bit in values),
                tags=sent,
            )
            rows = {f"field{bit}": value for bit, value in values.items()} or None
            try:
                reply = await self.dock.writer.store(put, rows, np.arange(len(keys)))
                break
            except FieldsChanged:  # other processes have put into this partition, or cleared it, since it was heard of
                self._fields.pop(partition, None)
                if time.monotonic() > deadline:
                    raise
        return KVBatchMeta(
            keys=list(keys),
            tags=[_told(tag) for tag in reply.tags],
            partition_id=partition,
            fields=sorted(self._learned(partition, reply.fields).names(reply.held)),
        )

    async def get(self, keys: list[str], partition: str, select: Sequence[str] | None) -> TensorDict:
        """Rows may be replaced or cleared, and their bytes used again, while they are copied: so they are looked up before
        and after, until both say the same."""
        deadline = time.monotonic() + self.index.timeout
        reply = await self.index.look_up_keys(partition, keys)
        while True:
            stale: StaleHandle | None = None
            try:
                out = await self._copied(keys, partition, select, reply)
            except StaleHandle as caught:
                stale = caught
            before, reply = reply, await self.index.look_up_keys(partition, keys)
            if reply == before:
                if stale is not None:
                    raise stale
                return out
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"partition {partition!r}: keys {keys[:3]}… changed while they were read, again and again"
                )

    async def _copied(
        self, keys: list[str], partition: str, select: Sequence[str] | None, reply: KeysFound
    ) -> TensorDict:
        entries = [entry for entry in reply.entries if entry]
        if missing := [key for key, entry in zip(keys, reply.entries, strict=True) if not entry]:
            raise ValueError(f"keys or partition were not found! partition {partition!r} has no keys {missing[:10]}")
        records = np.frombuffer(b"".join(entry[6:] for entry in entries), _RECORD)
        fields = self._learned(partition, reply.fields.decode()).by_name
        held = {
            name: np.flatnonzero(records["fields"] >> np.uint64(bit) & np.uint64(1))
            for name, (bit, _) in fields.items()
        }  # each field is in one record of a key
        complete = [name for name, at in held.items() if len(at) == len(keys)]
        names = complete if select is None else list(dict.fromkeys(select))
        if not names or (lacking := [name for name in names if name not in complete]):
            told = lacking if names else "any field"
            raise ValueError(
                f"Some fields are not ready in all the requested keys! {told} is not there for each of them"
            )
        refs = self._places(records, reply.places)
        together: dict[bytes, list[str]] = {}
        for name in names:
            together.setdefault(held[name].tobytes(), []).append(name)
        out = {}
        for at, members in together.items():
            columns = [f"field{fields[name][0]}" for name in members]
            packed = await self.dock.gather(refs[np.frombuffer(at, np.int64)], columns)
            for name, column in zip(members, columns, strict=True):
                copied = Packed(packed[column].values.clone(), packed[column].offsets.clone())  # type: ignore[union-attr]
                out[name] = _decoded(fields[name][1], copied)
        return TensorDict({name: out[name] for name in names}, batch_size=[len(keys)])

    @staticmethod
    def _places(records: np.ndarray, places: Sequence[Sequence[int]]) -> np.ndarray:
        table = np.array(sorted(map(tuple, places)), np.int64).reshape(-1, 3)
        at = np.searchsorted(table[:, 0], records["block"])
        found = table[np.minimum(at, len(table) - 1)] if len(table) else np.zeros((len(records), 3), np.int64)
        if (found[:, 0] != records["block"]).any():
            raise StaleHandle("these keys lay on a warehouse that was lost; put them again")
        refs = np.empty(len(records), REF)
        refs["block"], refs["slot"] = records["block"], records["slot"]
        begin = records["low"].astype(np.int64) | records["high"].astype(np.int64) << 32
        refs["place"] = found[:, 1] << 48 | found[:, 2] + begin
        return refs

    async def partitions(self, partition: str | None) -> dict[str, dict[str, Tag]]:
        found = await self.index.list_keys(partition)
        return {name: {key: _told(tags) for key, tags in keys.items()} for name, keys in found.items()}

    async def clear(self, keys: list[str], partition: str) -> None:
        if not await self.index.clear_keys(partition, keys):
            self._learned(partition, "")


def _tags(tags: Tag) -> dict[str, str]:
    if not isinstance(tags, Mapping) or not all(isinstance(tag, str) for tag in tags):
        raise TypeError(f"tags: {tags!r:.80} is no dict whose keys are strings; give one for each key")
    return {tag: _json(f"tag {tag!r}", value) for tag, value in tags.items()}


def _told(tags: Mapping[Any, Any]) -> Tag:
    """A tag as the index keeps it."""
    return {tag.decode() if isinstance(tag, bytes) else tag: json.loads(value) for tag, value in tags.items()}


# ── the calls ──

# TransferQueue's calls name no connection, so a process has one.
_queue: _Queue | None = None


# ── in a Ray cluster ──
# A worker of Ray inherits the environment of its node's raylet, which knows nothing of a queue that the driver opens after
# ray.init. So a driver notes its queue in the cluster's key-value store, and every process of the cluster looks there first.

_RAY_KEY, _RAY_NAMESPACE = b"queue", b"asyncdock.transfer_queue"


def _ray() -> Any:
    """Ray, when this process is part of a cluster."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and getattr(ray, "is_initialized", bool)() else None


def _noted() -> dict[str, str] | None:
    """The cluster's queue: ``url``, ``run``, and the ``node`` of the process that noted it."""
    if _ray() is None:
        return None
    from ray.experimental.internal_kv import _internal_kv_get

    noted = _internal_kv_get(_RAY_KEY, namespace=_RAY_NAMESPACE)
    return None if noted is None else json.loads(noted)


def _has_ended(noted: Mapping[str, str]) -> bool:
    """Whether the server of a queue that was opened on this node is gone."""
    if not noted["url"].startswith("unix://") or noted["node"] != platform.node():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(urlsplit(noted["url"]).path) != 0


def _found() -> dict[str, str]:
    """URL and run of the queue that this process belongs to; empty when it may open one. Raises RuntimeError in a worker of
    Ray that cannot reach the cluster's queue, or finds none: one that it opened would be known to no other process, and end
    with the worker."""
    if noted := _noted():
        if noted["url"].startswith("unix://") and noted["node"] != platform.node():
            raise RuntimeError(
                f"the queue of this Ray cluster listens on node {noted['node']!r} alone; open it with "
                "init({'url': 'redis://…'}) there, a server that all nodes reach"
            )
        if not _has_ended(noted):
            return {"url": noted["url"], "run": noted["run"]}
    elif INDEX in os.environ:
        return {"url": os.environ[INDEX], "run": os.environ[RUN]}
    ray = _ray()
    if ray is not None and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        what = "the queue of this Ray cluster has ended" if noted else "this Ray cluster has no queue"
        raise RuntimeError(f"{what}; call init() in the driver, after ray.init(), or give init() a url in each worker")
    return {}


def _note(queue: _Queue, *, chosen: bool) -> None:
    """Note this process's queue as the cluster's, where it has none. Raises RuntimeError when it has another one and this
    process has not chosen its own by a URL."""
    ray = _ray()
    if ray is None or queue.noted or ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        return
    from ray.experimental.internal_kv import _internal_kv_put

    own = {"url": queue.conf["url"], "run": queue.conf["run"], "node": platform.node()}
    put = partial(_internal_kv_put, _RAY_KEY, json.dumps(own).encode(), namespace=_RAY_NAMESPACE)
    noted = _noted() if put(overwrite=False) else None
    if noted is None or _has_ended(noted):
        put(overwrite=True)
        queue.noted = True
    elif not chosen and (noted["url"], noted["run"]) != (own["url"], own["run"]):
        raise RuntimeError(
            f"this Ray cluster has a queue, run {noted['run']!r}, and this process another one, run {own['run']!r}; close() "
            "one of them, or call init() after ray.init(), which finds the cluster's"
        )


def _withdraw(conf: Mapping[str, Any]) -> None:
    """Take back what :func:`_note` noted."""
    if (noted := _noted()) is not None and noted["url"] == conf["url"] and noted["run"] == conf["run"]:
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(_RAY_KEY, namespace=_RAY_NAMESPACE)


# ── the process's connection ──


def init(conf: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Connect this process, once; later calls change nothing. ``conf`` may give ``url`` (of an index: ``redis://``,
    ``rediss://``, ``unix://``), ``run``, ``arena`` (bytes of this node's warehouse), ``directory``, ``node``, ``serve`` (the
    address on which other nodes reach it), ``secret``, the PEM files ``tls_certificate``, ``tls_key`` and ``tls_authority``,
    ``timeout`` and ``room_timeout`` (seconds). Without a URL it is the queue of the Ray cluster that this process is in, or
    the index that a parent process has started, or else one of its own, which ends with this process; a worker of Ray
    opens none of its own. TransferQueue's own sections are accepted and have no effect. Returns what holds."""
    global _queue
    given = {name: value for name, value in (conf or {}).items() if name not in _TRANSFER_QUEUES_OWN}
    if unknown := set(given) - set(_DEFAULTS):
        raise ValueError(f"conf: {sorted(unknown)} is not known; it takes {sorted(_DEFAULTS)}")
    chosen = given.get("url") is not None
    opens = _queue is None or _queue.pid != os.getpid()
    if opens:
        found = {} if chosen else _found()
        _queue = _Queue(_DEFAULTS | found | {name: value for name, value in given.items() if value is not None})
    assert _queue is not None
    try:
        _note(_queue, chosen=chosen)
    except RuntimeError:
        if opens:
            close()
        raise
    return dict(_queue.conf)


def close() -> None:
    """Disconnect. An index that this process has started ends, with all that is in it."""
    global _queue
    if _queue is not None:
        _queue.close()
    _queue = None


def _connected() -> _Queue:
    if _queue is None or _queue.pid != os.getpid():
        if not _found():
            raise RuntimeError("no queue to connect to: call init() first, in this process or in its parent")
        init()
    assert _queue is not None
    return _queue


def _keys(keys: list[str] | str) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list):
        raise TypeError("Only string or list of strings are allowed as `keys`.")
    if not keys:
        raise ValueError("Received an empty list as keys.")
    if not all(isinstance(key, str) for key in keys):
        raise TypeError("Not all elements in `keys` are strings.")
    return keys


def _partition(partition_id: str) -> str:
    if not isinstance(partition_id, str):
        raise TypeError(f"partition_id: takes a string, got {partition_id!r:.80}")
    return partition_id


def _fields(fields: TensorDictBase, parser: Parser | None) -> dict[str, Any]:
    """The fields by name, as ``parser`` gives them back."""
    out = {str(name): fields.get(name) for name in fields.keys()}  # noqa: SIM118
    if parser is None:
        return out
    plain = {name: _plain(name, value) for name, value in out.items()}
    sizes = {name: len(value) for name, value in plain.items()}
    parsed = parser(plain)
    if not isinstance(parsed, dict) or {name: len(value) for name, value in parsed.items()} != sizes:
        raise ValueError(
            "data_parser: it must return the dict that it was given, with all fields and their numbers of rows"
        )
    return parsed


def _plain(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _items(name, value)
    return list(value.unbind()) if value.is_nested else value


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put the fields and the tag of one key. A dict gives the row itself: a tensor or a numpy array of any shape, or a JSON
    value."""
    return _connected().call(_put_one(key, partition_id, fields, tag, data_parser))


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """:func:`kv_put`, awaited."""
    return await _connected().submit(_put_one(key, partition_id, fields, tag, data_parser))


async def _put_one(
    key: str, partition_id: str, fields: TensorDict | dict[str, Any] | None, tag: Tag | None, parser: Parser | None
) -> KVBatchMeta:
    if fields is None and tag is None:
        raise ValueError("Please provide at least one parameter of fields or tag.")
    if isinstance(fields, dict):
        if any(isinstance(value, torch.Tensor) and value.is_nested for value in fields.values()):
            raise ValueError("Please use (async)kv_batch_put for batch operation")
        row = {
            name: _tensor(name, value) if isinstance(value, np.ndarray | np.generic) else value
            for name, value in fields.items()
        }
        rows = {
            name: value.unsqueeze(0) if isinstance(value, torch.Tensor) else NonTensorStack(value)
            for name, value in row.items()
        }
        fields = TensorDict(rows, batch_size=[1])
    elif fields is not None and not isinstance(fields, TensorDict):
        raise ValueError("`fields` can only be dict or TensorDict")
    return await _put(_keys([key]), partition_id, fields, None if tag is None else [tag], parser)


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[Tag] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put fields (a TensorDict of one row for each key) and tags (one for each key) of several keys, in one atomic step.
    Fields come beside those that the keys have, or replace them; tags are joined with those that they have."""
    return _connected().call(_put(_keys(keys), partition_id, fields, tags, data_parser))


async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[Tag] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """:func:`kv_batch_put`, awaited."""
    return await _connected().submit(_put(_keys(keys), partition_id, fields, tags, data_parser))


async def _put(
    keys: list[str], partition_id: str, fields: TensorDict | None, tags: list[Tag] | None, parser: Parser | None
) -> KVBatchMeta:
    if fields is None and tags is None:
        raise ValueError("Please provide at least one parameter of `fields` or `tags`.")
    if fields is not None and not isinstance(fields, TensorDictBase):
        raise TypeError(
            f"fields: takes a TensorDict, got {type(fields).__name__}; give TensorDict(fields, batch_size=[{len(keys)}])"
        )
    if fields is not None and (not fields.batch_size or fields.batch_size[0] != len(keys)):
        raise ValueError(
            f"`keys` with length {len(keys)} does not match the `fields` TensorDict with batch_size {fields.batch_size}"
        )
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"keys with length {len(keys)} does not match length of tags {len(tags)}")
    partition = _partition(partition_id)
    return await _connected().put(keys, partition, {} if fields is None else _fields(fields, parser), tags)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> TensorDict:
    """The rows of ``keys``, in this order: the fields that all of them have, or ``select_fields``. Raises ValueError for a
    key or a field that is not there."""
    return _connected().call(_get(keys, partition_id, select_fields))


async def async_kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """:func:`kv_batch_get`, awaited."""
    return await _connected().submit(_get(keys, partition_id, select_fields))


async def _get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None) -> TensorDict:
    select = [select_fields] if isinstance(select_fields, str) else select_fields
    return await _connected().get(_keys(keys), _partition(partition_id), select)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """The rows that ``meta`` tells of, with its fields or ``select_fields`` of them."""
    return _connected().call(_get_by_meta(meta, select_fields))


async def async_kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """:func:`kv_batch_get_by_meta`, awaited."""
    return await _connected().submit(_get_by_meta(meta, select_fields))


async def _get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None) -> TensorDict:
    if meta.partition_id is None:
        raise ValueError("Must provide partition_id in the input KVBatchMeta.")
    select = [select_fields] if isinstance(select_fields, str) else select_fields
    if select is not None and not set(select) <= set(meta.fields or ()):
        missing = [name for name in select if name not in (meta.fields or ())]
        raise ValueError(f"select_fields: {missing} not found among the fields of the metadata, {meta.fields}")
    return await _get(meta.keys, meta.partition_id, meta.fields if select is None else select)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """Partition → key → tag, of one partition or of all; keys in the order in which they came."""
    return _connected().call(_list(partition_id))


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """:func:`kv_list`, awaited."""
    return await _connected().submit(_list(partition_id))


async def _list(partition_id: str | None) -> dict[str, dict[str, Tag]]:
    return await _connected().partitions(None if partition_id is None else _partition(partition_id))


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Forget keys, with their fields and tags; their bytes are free at once. Keys that are not there are passed over."""
    _connected().call(_clear(keys, partition_id))


async def async_kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """:func:`kv_clear`, awaited."""
    await _connected().submit(_clear(keys, partition_id))


async def _clear(keys: list[str] | str, partition_id: str) -> None:
    await _connected().clear(_keys(keys), _partition(partition_id))
