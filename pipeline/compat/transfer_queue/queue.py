"""A process's connection to a queue: the index, the warehouse, and an event loop in a thread.

put ─▶ bytes into shared memory, once, for all fields ─▶ index: key ─▶ where its fields lie
get ◀─ copied out ◀─ where do these keys lie? … asked again after the copy: what changed meanwhile is read again
"""

from __future__ import annotations

import atexit
import os
import shutil
import ssl
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from pipeline.compat.loop_thread import LoopThread
from pipeline.compat.transfer_queue import discovery
from pipeline.compat.transfer_queue.batch_meta import KVBatchMeta, Tag
from pipeline.compat.transfer_queue.fields import (
    MAX_FIELDS,
    Fields,
    decode_field,
    decode_tags,
    encode_field,
    encode_tags,
)
from pipeline.data.arena import StaleHandle, shared_memory_directory
from pipeline.data.columns import Column, ColumnError, Packed, Schema
from pipeline.index.claims import REF
from pipeline.index.client import Index, RunConfig, worker_name
from pipeline.index.embedded import EmbeddedIndex
from pipeline.index.errors import FieldsChanged, IndexRefused
from pipeline.index.keys import KeysFound
from pipeline.warehouse.dock import Dock

DEFAULTS: dict[str, Any] = {
    "url": None,  # of the index; None: the one that a parent process has started, or a new one
    "run": None,
    "arena": 1 << 30,  # bytes, of the node's warehouse when this process is the first there
    "directory": None,  # of its arena
    "node": None,
    # address on which other nodes reach this node's warehouse, when this process is the first there
    "serve": "",
    "secret": b"",
    "tls_certificate": "",  # PEM files: inside TLS, when they are given
    "tls_key": "",
    "tls_authority": "",
    "timeout": 30.0,  # seconds, of a call to the index
    "room_timeout": 600.0,  # seconds that a put waits while the warehouse is full
}
_SCHEMA = Schema(
    [Column.ragged(f"field{bit}", torch.uint8) for bit in range(MAX_FIELDS)], most=MAX_FIELDS
)
_RECORD = np.dtype(
    [("fields", "<u8"), ("block", "<u4"), ("slot", "<u4"), ("low", "<u4"), ("high", "<u2")]
)
_KNOWN_PARTITIONS = 1024


class Queue(LoopThread):
    """The connection of a process, with ``conf`` as :data:`DEFAULTS`."""

    def __init__(self, conf: Mapping[str, Any]) -> None:
        self.conf = dict(conf)
        self.pid = os.getpid()
        self.announced = False  # as the queue of a Ray cluster, by this process
        self._server: EmbeddedIndex | None = None
        self._fields: dict[str, Fields] = {}  # by partition, as last read
        super().__init__("transfer-queue")
        if self.conf["url"] is None:
            home = Path(tempfile.mkdtemp(prefix="asyncdock-"))
            self._server = EmbeddedIndex(home)
            self._server.start()
            self.conf |= {
                "url": self._server.url,
                "run": self.conf["run"] or f"queue-{uuid.uuid4().hex[:8]}",
            }
            os.environ[discovery.INDEX], os.environ[discovery.RUN] = (
                self._server.url,
                self.conf["run"],
            )
        self.conf["run"] = self.conf["run"] or "transfer-queue"
        self.directory = Path(
            self.conf["directory"] or shared_memory_directory() / f"dock-{self.conf['run']}"
        )
        self.call(self._open())
        atexit.register(self.close)

    async def _open(self) -> None:
        conf = self.conf
        self.index = Index(conf["url"], conf["run"], timeout=conf["timeout"])
        await self.index.init(RunConfig(()), {})
        tls = None
        if conf["tls_certificate"]:
            tls = (
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
                ssl.create_default_context(cafile=conf["tls_authority"]),
            )
            tls[0].load_cert_chain(conf["tls_certificate"], conf["tls_key"])

        def dock(warehouse: str) -> Dock:
            options = {
                "node": conf["node"],
                "secret": conf["secret"],
                "room_timeout": conf["room_timeout"],
                "tls": tls,
            }
            worker = worker_name("queue", 0)
            return Dock(
                self.index,
                _SCHEMA,
                worker=worker,
                directory=self.directory,
                warehouse=warehouse,
                **options,
            )

        self.dock = dock("local")
        warehouses = await self.index.warehouses()
        near = sorted(w.name for w in warehouses if w.is_near(conf["node"]) and not w.leaving)
        if near:
            self.dock = dock(near[0])
            await self.dock.warehouses.enter()
        else:
            self.dock = dock("local" if not warehouses else f"local-{uuid.uuid4().hex[:6]}")
            await self.dock.join(conf["arena"])
            if conf["serve"]:
                await self.dock.serve(conf["serve"])

    def close(self) -> None:
        atexit.unregister(self.close)
        if sys.is_finalizing() or self.pid != os.getpid():
            return
        if self.announced:
            discovery.withdraw(self.conf)

        async def end() -> None:
            await self.dock.close()
            await self.index.close()

        self.call(end())
        self.stop()
        if self._server is not None:
            self._server.stop()
            shutil.rmtree(self._server.directory, ignore_errors=True)
            shutil.rmtree(self.directory, ignore_errors=True)
            for name in (discovery.INDEX, discovery.RUN):
                os.environ.pop(name, None)

    def _fields_of(self, partition: str, packed: str) -> Fields:
        known = self._fields.get(partition)
        if known is None or known.packed != packed:
            while len(self._fields) >= _KNOWN_PARTITIONS:
                del self._fields[next(iter(self._fields))]
            known = self._fields[partition] = Fields(packed)
        return known

    async def put(
        self, keys: list[str], partition: str, fields: Mapping[str, Any], tags: Sequence[Tag] | None
    ) -> KVBatchMeta:
        if len(set(keys)) != len(keys):
            raise ValueError("Got duplicated keys.")
        sent = tags and [encode_tags(each) for each in tags]
        encoded = [encode_field(name, value, len(keys)) for name, value in fields.items()]
        deadline = time.monotonic() + self.index.timeout
        while True:
            cached = self._fields.get(partition)
            known = cached or self._fields_of(partition, await self.index.key_fields(partition))
            try:
                grown, values = known.joined(encoded, partition)
            except (ColumnError, IndexRefused):
                if cached is None:
                    raise
                # another process may have cleared the partition since
                self._fields.pop(partition, None)
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
            except FieldsChanged:  # another process has put into this partition, or cleared it
                self._fields.pop(partition, None)
                if time.monotonic() > deadline:
                    raise
        return KVBatchMeta(
            keys=list(keys),
            tags=[decode_tags(tag) for tag in reply.tags],
            partition_id=partition,
            fields=sorted(self._fields_of(partition, reply.fields).names(reply.held)),
        )

    async def get(
        self, keys: list[str], partition: str, select: Sequence[str] | None
    ) -> TensorDict:
        """Return the rows of ``keys``. They may be replaced or cleared, and their bytes used again,
        while they are copied: so they are looked up before and after, until both say the same."""
        deadline = time.monotonic() + self.index.timeout
        reply = await self.index.look_up_keys(partition, keys)
        while True:
            stale: StaleHandle | None = None
            try:
                out = await self._copied(keys, partition, select, reply)
            except StaleHandle as caught:
                stale = caught
            before = reply
            reply = await self.index.look_up_keys(partition, keys)
            if reply == before:
                if stale is not None:
                    raise stale
                return out
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"partition {partition!r}: keys {keys[:3]}… changed while they were read, "
                    f"again and again"
                )

    async def _copied(
        self, keys: list[str], partition: str, select: Sequence[str] | None, reply: KeysFound
    ) -> TensorDict:
        entries = [entry for entry in reply.entries if entry]
        if missing := [key for key, entry in zip(keys, reply.entries, strict=True) if not entry]:
            raise ValueError(
                f"keys or partition were not found! partition {partition!r} has no "
                f"keys {missing[:10]}"
            )
        records = np.frombuffer(b"".join(entry[6:] for entry in entries), _RECORD)
        fields = self._fields_of(partition, reply.fields.decode()).by_name
        # Each field is in one record of a key.
        bits = {name: np.uint64(bit) for name, (bit, _) in fields.items()}
        held = {
            name: np.flatnonzero(records["fields"] >> bit & np.uint64(1))
            for name, bit in bits.items()
        }
        complete = [name for name, at in held.items() if len(at) == len(keys)]
        names = complete if select is None else list(dict.fromkeys(select))
        if not names or (lacking := [name for name in names if name not in complete]):
            missed = lacking if names else "any field"
            raise ValueError(
                f"Some fields are not ready in all the requested keys! {missed} is not there for "
                f"each of them"
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
                out[name] = decode_field(fields[name][1], copied)
        return TensorDict({name: out[name] for name in names}, batch_size=[len(keys)])

    @staticmethod
    def _places(records: np.ndarray, places: Sequence[Sequence[int]]) -> np.ndarray:
        table = np.array(sorted(map(tuple, places)), np.int64).reshape(-1, 3)
        at = np.searchsorted(table[:, 0], records["block"])
        block_places = (
            table[np.minimum(at, len(table) - 1)]
            if len(table)
            else np.zeros((len(records), 3), np.int64)
        )
        if (block_places[:, 0] != records["block"]).any():
            raise StaleHandle("these keys lay on a warehouse that was lost; put them again")
        refs = np.empty(len(records), REF)
        refs["block"], refs["slot"] = records["block"], records["slot"]
        begin = records["low"].astype(np.int64) | records["high"].astype(np.int64) << 32
        refs["place"] = block_places[:, 1] << 48 | block_places[:, 2] + begin
        return refs

    async def partitions(self, partition: str | None) -> dict[str, dict[str, Tag]]:
        partitions = await self.index.list_keys(partition)
        return {
            name: {key: decode_tags(tags) for key, tags in keys.items()}
            for name, keys in partitions.items()
        }

    async def clear(self, keys: list[str], partition: str) -> None:
        if not await self.index.clear_keys(partition, keys):
            self._fields_of(partition, "")
