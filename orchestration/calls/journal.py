"""A file of records, each on the disk before its writer goes on; torn ends are cut off.

append ─▶ those that wait ─▶ one frame ─▶ write ─▶ fsync ─▶ written      many writers share a fsync
rewrite ─▶ its turn among them ─▶ a new file of the live records ─▶ takes the place of the old one

    file    magic, 8 bytes │ salt, 8 bytes │ frame │ frame │ …
    frame   mark, bytes, CRC-32 of the payload, CRC-32 of salt and both │ payload: record │ record │ …
    record  bytes of its head, bytes of its blob │ head, msgpack │ blob

A frame follows the one before only when that is on the disk. So a frame that cannot be read is the
torn end of the file when none follows it, and otherwise damage. The salt, whose beginning is the
mark of frames, keeps a client from writing what looks like a frame into a blob.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import structlog

from orchestration.disk import refusal, replacing, sync

log = structlog.get_logger()

MAGIC = b"ADCALLS1"
FILE_HEAD_BYTES = 16
FRAME = struct.Struct("<4sQII")
MARK_BYTES = 4
RECORD = struct.Struct("<IQ")
COMMIT_BYTES = 64 << 20  # of records after which a frame is closed


class JournalDamaged(RuntimeError):
    """A journal cannot be read, and not at its end; the message has file, offset and fix."""


@dataclass(eq=False)
class Record:
    """``head``: msgpack's values; ``blob``: bytes that are read back by :meth:`Journal.read`."""

    head: dict[str, Any]
    blob: bytes | None
    """None once it is in the file."""
    size: int
    offset: int = 0
    """Of the blob, in the file."""
    written: asyncio.Future[None] | None = None
    """Raises OSError where the disk has refused it."""

    def packed(self, blob: bytes) -> bytes:
        head = msgpack.packb(self.head)
        return RECORD.pack(len(head), len(blob)) + head + blob

    async def on_disk(self) -> None:
        """Wait until it is written. Raises OSError."""
        assert self.written is not None
        await asyncio.shield(self.written)


@dataclass(eq=False)
class _Rewrite:
    live: Callable[[], Iterable[Record | None]]
    written: asyncio.Future[None]


@dataclass(eq=False)
class Journal:
    """The journal at ``path``, which is open only while it is read or written. Make it by
    :meth:`open`."""

    path: Path
    _salt: bytes
    size: int
    """Bytes that are on the disk."""
    _pending: deque[Record | _Rewrite] = field(default_factory=deque)
    _committing: asyncio.Task[None] | None = None
    _broken: str = ""

    @classmethod
    def open(cls, path: Path) -> tuple[Journal, list[Record]]:
        """Open or create the journal, cut off its torn end, and return it with its records. Raises
        JournalDamaged, OSError."""
        if not path.exists() or path.stat().st_size < FILE_HEAD_BYTES:
            _create(path)
        with path.open("r+b", buffering=0) as file:
            begin = file.read(FILE_HEAD_BYTES)
            if begin[:8] != MAGIC:
                raise JournalDamaged(
                    f"{path}: offset 0 has {begin[:8]!r} where a journal has {MAGIC!r}; restore "
                    f"the file from a copy, or move it away to lose its calls"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                records, end = _read(path, content, begin[8:])
                total = len(content)
            if end < total:
                log.warning(
                    "the torn end of a journal is cut off", path=str(path), bytes=total - end
                )
                file.truncate(end)
                os.fsync(file.fileno())
            return cls(path, begin[8:], end), records

    def append(self, head: dict[str, Any], blob: bytes = b"") -> Record:
        """Write a record behind those appended before; ``written`` says when it is on the disk."""
        written = asyncio.get_running_loop().create_future()
        written.add_done_callback(_retrieve)
        record = Record(head, blob, len(blob), written=written)
        self._pending.append(record)
        self._start()
        return record

    async def rewrite(self, live: Callable[[], Iterable[Record | None]]) -> None:
        """Drop all records but those that ``live`` returns once all that were appended before are
        written; their order stays. Raises OSError; then the file is as it was."""
        written = asyncio.get_running_loop().create_future()
        self._pending.append(_Rewrite(live, written))
        self._start()
        await written

    def read(self, record: Record) -> bytes:
        """Return the record's blob. Raises OSError."""
        if record.blob is not None:
            return record.blob
        with self.path.open("rb", buffering=0) as file:
            blob = os.pread(file.fileno(), record.size, record.offset)
        if len(blob) < record.size:
            raise OSError(f"{self.path}: ends before offset {record.offset + record.size}")
        return blob

    async def close(self) -> None:
        """Wait until all that was appended is written."""
        while self._committing is not None:
            await asyncio.wait([self._committing])

    def _start(self) -> None:
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit())

    async def _commit(self) -> None:
        try:
            while self._pending:
                if isinstance(self._pending[0], _Rewrite):
                    await self._exchange(self._pending.popleft())  # type: ignore[arg-type]
                else:
                    await self._write()
        finally:
            self._committing = None

    async def _write(self) -> None:
        records = list[Record]()
        nbytes = 0
        while self._pending and nbytes < COMMIT_BYTES:
            record = self._pending[0]
            if isinstance(record, _Rewrite):
                break
            records.append(record)
            nbytes += record.size
            self._pending.popleft()
        try:
            at = await asyncio.to_thread(self._append, records)
        except OSError as error:
            refused = OSError(error.errno, refusal(self.path, nbytes, error))
            for record in records:
                _finish(record.written, refused)
            return
        for record, offset in zip(records, at, strict=True):
            record.offset = offset
            record.blob = None
            _finish(record.written)

    def _append(self, records: Sequence[Record]) -> list[int]:
        """Write one frame. Returns the offsets of the blobs."""
        if self._broken:
            raise OSError(self._broken)
        frame, offsets = _framed(self._salt, records, [record.blob or b"" for record in records])
        with self.path.open("r+b", buffering=0) as file:
            try:
                _write_at(file, self.size, frame)
            except OSError:
                try:
                    file.truncate(self.size)
                    os.fsync(file.fileno())
                except OSError as error:
                    self._broken = f"its last frame could not be taken back ({error})"
                raise
        begin = self.size
        self.size += len(frame)
        return [begin + offset for offset in offsets]

    async def _exchange(self, rewrite: _Rewrite) -> None:
        live = [record for record in rewrite.live() if record is not None and record.blob is None]
        live.sort(key=attrgetter("offset"))
        partial = self.path.with_name(f".{self.path.name}")
        try:
            offsets, size = await asyncio.to_thread(self._copy, live, partial)
            # no record is read between these: its offset is that of one of the files
            os.replace(partial, self.path)
            for record, offset in zip(live, offsets, strict=True):
                record.offset = offset
            self.size = size
            self._broken = ""
            await asyncio.to_thread(sync, self.path.parent)
        except OSError as error:
            partial.unlink(missing_ok=True)
            need = sum(record.size for record in live)
            _finish(rewrite.written, OSError(error.errno, refusal(self.path, need, error)))
        else:
            _finish(rewrite.written)

    def _copy(self, live: Sequence[Record], partial: Path) -> tuple[list[int], int]:
        """Write a journal of the records ``live``. Returns the offsets of their blobs, and its
        bytes."""
        offsets = list[int]()
        with partial.open("wb") as file:
            file.write(MAGIC + self._salt)
            for record in live:
                frame, (offset,) = _framed(self._salt, [record], [self.read(record)])
                offsets.append(file.tell() + offset)
                file.write(frame)
            file.flush()
            os.fsync(file.fileno())
            return offsets, file.tell()


def _retrieve(written: asyncio.Future[None]) -> None:
    if not written.cancelled():
        written.exception()


def _finish(written: asyncio.Future[None] | None, error: OSError | None = None) -> None:
    if written is None or written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)


def _create(path: Path) -> None:
    with replacing(path, FILE_HEAD_BYTES) as partial:
        partial.write_bytes(MAGIC + os.urandom(8))
    sync(path.parent)


def _framed(
    salt: bytes, records: Iterable[Record], blobs: Iterable[bytes]
) -> tuple[bytes, list[int]]:
    """Return a frame, and where in it the blobs begin."""
    parts = list[bytes]()
    offsets = list[int]()
    end = FRAME.size
    for record, blob in zip(records, blobs, strict=True):
        packed = record.packed(blob)
        parts.append(packed)
        end += len(packed)
        offsets.append(end - len(blob))
    payload = b"".join(parts)
    return _frame_head(salt, len(payload), zlib.crc32(payload)) + payload, offsets


def _frame_head(salt: bytes, nbytes: int, checksum: int) -> bytes:
    own = zlib.crc32(salt + struct.pack("<QI", nbytes, checksum))
    return FRAME.pack(salt[:MARK_BYTES], nbytes, checksum, own)


def _write_at(file: BinaryIO, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file.fileno(), view, offset)
        offset += count
        view = view[count:]
    os.fsync(file.fileno())


def _payload(content: mmap.mmap, at: int, salt: bytes) -> memoryview | None:
    """Return the payload of the frame at ``at``; None where there is none."""
    head = content[at : at + FRAME.size]
    if len(head) < FRAME.size:
        return None
    _, nbytes, checksum, _ = FRAME.unpack(head)
    if head != _frame_head(salt, nbytes, checksum):
        return None
    begin = at + FRAME.size
    with memoryview(content) as whole:
        payload = whole[begin : begin + nbytes]
    if len(payload) < nbytes or zlib.crc32(payload) != checksum:
        payload.release()
        return None
    return payload


def _read(path: Path, content: mmap.mmap, salt: bytes) -> tuple[list[Record], int]:
    """Return the records, and where the last frame ends. Raises JournalDamaged."""
    records = list[Record]()
    at = FILE_HEAD_BYTES
    while (payload := _payload(content, at, salt)) is not None:
        with payload:
            records.extend(_records(payload, at + FRAME.size))
            at += FRAME.size + len(payload)
    later = at
    while (later := content.find(salt[:MARK_BYTES], later + 1)) >= 0:
        if (payload := _payload(content, later, salt)) is not None:
            payload.release()
            raise JournalDamaged(
                f"{path}: offset {at} cannot be read, and {later} can; restore the file from a "
                f"copy, or cut it off at {at} to lose the calls behind"
            )
    return records, at


def _records(payload: memoryview, begin: int) -> Iterator[Record]:
    at = 0
    while at < len(payload):
        head_bytes, blob_bytes = RECORD.unpack_from(payload, at)
        at += RECORD.size
        head = msgpack.unpackb(payload[at : at + head_bytes], strict_map_key=False)
        at += head_bytes
        yield Record(head, None, blob_bytes, begin + at)
        at += blob_bytes
