"""Blocks: rows of some columns packed into bytes, and the reader of many rows from many blocks of
one arena.

A *block* is what one write makes: B rows of C columns, column by column, without padding between
rows:

    header   int64 [4 + 4·C]: magic, block id, B, C, then per column (bit, offsets at, values at, bytes of values)
    column   ragged and text: offsets int64 [B + 1], then the values; scalar and fixed: the values alone

Sections begin at multiples of 64 bytes. Rows that lie side by side are read as views of the block:
nothing is copied.

>>> from pipeline.data.columns import Column
>>> schema = Schema([Column.ragged("ids", torch.int64), Column.scalar("reward", torch.float32), Column.text("answer")])
>>> rows = {"ids": [torch.tensor([5, 6]), torch.tensor([7])], "reward": torch.tensor([0.5, 1.0]), "answer": ["a", "bc"]}
>>> block = pack(schema, rows)
>>> arena = memoryview(bytearray(block.nbytes))
>>> block.write_into(arena, block_id=3)
>>> found = BlockReader(arena, schema).read(np.array([3, 3]), np.array([0, 0]), np.array([0, 1]), ["ids"])
>>> [row.tolist() for row in found["ids"].jagged().unbind()]
[[5, 6], [7]]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from struct import unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.data.arena import StaleHandle
from pipeline.data.columns import (
    Column,
    ColumnError,
    Packed,
    Schema,
    indexes_of,
    jagged_parts,
    offsets_of,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase

MAGIC = 0x6B636F64636E7973  # "syncdock", little endian
_ALIGN = 64
# bytes: runs shorter than this are gathered element by element, longer ones copied one by one
_GATHER_BELOW = 2048


class BlockError(RuntimeError):
    """A read names bytes that are no block's, or a block's numbers are damaged.

    Names field, value and fix.
    """


# ── writing ──


class _Section(NamedTuple):
    bit: int
    offsets: torch.Tensor | None  # int64 [B + 1]; None for scalar and fixed
    parts: list[torch.Tensor]  # of one dtype, flat, written one after the other
    nbytes: int


class PackedRows:
    """Checked rows, ready to be written into ``nbytes`` bytes of a warehouse."""

    def __init__(self, rows: int, mask: int, sections: list[_Section]) -> None:
        self.rows = rows
        self.mask = mask
        self._sections = sections
        at = _aligned(8 * (4 + 4 * len(sections)))
        self._places: list[tuple[int, int]] = []
        for section in sections:
            offsets_at = -1
            if section.offsets is not None:
                offsets_at = at
                at = _aligned(at + 8 * (rows + 1))
            self._places.append((offsets_at, at))
            at = _aligned(at + section.nbytes)
        self.nbytes = at

    def write_into(self, memory: memoryview, block_id: int) -> None:
        """Write header and columns; ``memory`` has ``nbytes`` bytes.

        Each payload byte is copied once.
        """
        header = [MAGIC, block_id, self.rows, len(self._sections)]
        for section, (offsets_at, values_at) in zip(self._sections, self._places, strict=True):
            header += [section.bit, offsets_at, values_at, section.nbytes]
            if section.offsets is not None:
                np.frombuffer(memory, np.int64, self.rows + 1, offsets_at)[:] = (
                    section.offsets.numpy()
                )
            if section.nbytes:
                # NumPy copies in this thread; torch would share the copy with a second thread and
                # wait for it.
                parts = [_array(part) for part in section.parts]
                dtype = parts[0].dtype
                target = np.frombuffer(memory, dtype, section.nbytes // dtype.itemsize, values_at)
                if len(parts) == 1:
                    np.copyto(target, parts[0])
                else:
                    np.concatenate(parts, out=target)
        np.frombuffer(memory, np.int64, len(header))[:] = header


def pack(schema: Schema, rows: Mapping[str, Any] | TensorDictBase) -> PackedRows:
    """Check ``rows`` against ``schema`` and lay them out.

    A scalar column takes a tensor [B], a fixed one [B, *shape], a ragged one a jagged nested
    tensor, a :class:`Packed` or a sequence of B tensors [n_i], a text one a sequence of B strings.
    Raises :class:`ColumnError`; nothing is ever cast.
    """
    columns = dict(rows.items())
    if not columns:
        raise ColumnError("", "no column given", "write at least one", subject="rows")
    first = next(iter(columns))
    count = 0
    sections = []
    for name in sorted(columns, key=schema.bit):
        column = schema[name]
        value = columns[name]
        if isinstance(value, str):  # its length is not a number of rows
            raise ColumnError(
                name,
                f"takes one string for each row, got {_shown(value)}",
                "give a list of them",
            )
        size = _count(value)
        if size < 1:
            raise ColumnError(name, f"needs one value for each row, got {_shown(value)}")
        if size != (count := count or size):
            raise ColumnError(
                name,
                f"has {size} rows where {first!r} has {count}",
                "give all the same rows",
            )
        sections.append(_section(schema.bit(name), column, value, size))
    return PackedRows(count, schema.mask(columns), sections)


def _section(bit: int, column: Column, value: Any, rows: int) -> _Section:
    parts: list[torch.Tensor]
    offsets: torch.Tensor | None = None
    if column.dtype == "utf8":
        parts, offsets = _text_parts(column, value)
    elif column.shape is None:
        parts, offsets = _ragged_parts(column, value)
    else:
        _check_dtype(column, value)
        if value.is_nested or tuple(value.shape[1:]) != column.shape:
            raise ColumnError(
                column.name,
                f"takes shape {[rows, *column.shape]}, got {_shown(value)}",
                "reshape it first",
            )
        parts = [value.detach().reshape(-1)]
    if not all(part.is_cpu for part in parts):
        parts = [part.cpu() for part in parts]
    count = rows * math.prod(column.shape or ()) if offsets is None else int(offsets[-1])
    if column.finite and not all(bool(part.isfinite().all()) for part in parts):
        values = torch.cat([part.reshape(-1) for part in parts])
        at = int((~values.isfinite()).nonzero()[0, 0])
        row = (
            at // (len(values) // rows)
            if offsets is None
            else int(torch.searchsorted(offsets, at, right=True)) - 1
        )
        raise ColumnError(
            column.name,
            f"row {row} holds {float(values[at])}",
            "NaN and infinities are refused",
        )
    return _Section(bit, offsets, parts, count * column.itemsize)


def _text_parts(column: Column, value: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    # NonTensorStack, and arrays, have it
    texts = value.tolist() if hasattr(value, "tolist") else list(value)
    if not all(isinstance(text, str) for text in texts):
        raise ColumnError(column.name, f"takes strings, got {_shown(value)}")
    encoded = []
    for row, text in enumerate(texts):
        try:
            encoded.append(text.encode())
        except UnicodeEncodeError as error:
            raise ColumnError(
                column.name,
                f"row {row} is not a text that UTF-8 can hold ({error})",
                "decode it with errors='replace'",
            ) from None
    payload = torch.from_numpy(np.frombuffer(bytearray(b"".join(encoded)), np.uint8))
    return [payload], offsets_of([len(text) for text in encoded])


def _ragged_parts(column: Column, value: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return flat tensors that hold the rows one after the other, and the rows' offsets."""
    if isinstance(value, torch.Tensor):
        if (inner := jagged_parts(value)) is None:
            raise ColumnError(
                column.name,
                "is ragged",
                f"give a jagged nested tensor or a list, got {_shown(value)}",
            )
        if inner[0].dtype != column.dtype:
            _check_dtype(column, value)
        if inner[0].dim() != 1:
            raise ColumnError(
                column.name,
                f"ragged rows have one dimension, got {_shown(value)}",
            )
        packed = Packed.of(value)
        assert packed.offsets is not None
        return [packed.values.detach()], packed.offsets
    if isinstance(value, Packed):
        _check_dtype(column, value.values)
        if (
            value.offsets is None
            or value.values.dim() != 1
            or not _are_offsets(value.offsets, len(value.values))
        ):
            raise ColumnError(
                column.name,
                f"takes flat values, and offsets int64 that rise from 0 to their number, got "
                f"{_shown(value)}",
            )
        return [value.values.detach()], value.offsets
    parts = list(value)
    try:  # all of them at once: a check for each would cost more than the copy
        fit = {part.dtype for part in parts} == {column.dtype} and {
            part.dim() for part in parts
        } == {1}
    except AttributeError:
        fit = False
    for part in () if fit else parts:
        _check_dtype(column, part)
        if part.dim() != 1:
            raise ColumnError(
                column.name,
                f"ragged rows have one dimension, got {_shown(part)}",
            )
    if any(part.requires_grad for part in parts):
        parts = [part.detach() for part in parts]
    return parts, offsets_of([part.numel() for part in parts])


def _are_offsets(offsets: torch.Tensor, total: int) -> bool:
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.is_cpu:
        return False
    return int(offsets[0]) == 0 and int(offsets[-1]) == total and bool((offsets.diff() >= 0).all())


def _count(value: Any) -> int:
    """Return the number of rows of a column's value; 0 when they cannot be counted."""
    if isinstance(value, torch.Tensor):
        if (inner := jagged_parts(value)) is not None:
            return len(inner[1]) - 1
        return value.size(0) if value.dim() else 0
    if isinstance(value, Packed) and value.offsets is None:
        return 0
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", None) != 0 else 0


def _check_dtype(column: Column, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise ColumnError(
            column.name,
            f"takes {column.describe()}, got {_shown(value)}",
            "make it a tensor",
        )
    if value.dtype != column.dtype:
        raise ColumnError(
            column.name,
            f"takes {column.describe()}, got {_shown(value)}",
            f"convert with .to({column.dtype})",
        )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        jagged = "jagged" if value.layout == torch.jagged else "strided nested"
        shape = jagged if value.is_nested else list(value.shape)
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {shape}"
    return f"{type(value).__name__} {value!r}"[:80]


def _array(part: torch.Tensor) -> np.ndarray:
    return (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy()


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN


# ── reading ──


class Runs(NamedTuple):
    """Bytes of an arena in the order to read them: run i is ``lengths[i]`` bytes at ``starts[i]``,
    both int64."""

    starts: np.ndarray
    lengths: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def unit(self) -> int:
        """Bytes of the largest words, 8 at most, that all runs consist of."""
        together = int(np.bitwise_or.reduce(self.starts | self.lengths)) | 8
        return together & -together


# For each column: offsets int64 [n + 1] in elements (None for scalar and fixed), and where its
# values lie.
Found = list[tuple[np.ndarray | None, Runs]]


class _Known:
    """A column's numbers that every read needs."""

    __slots__ = ("bit", "dtype", "size", "width")

    def __init__(self, bit: int, column: Column) -> None:
        self.bit = bit
        self.dtype = column.stored
        self.size = column.itemsize
        self.width = None if column.shape is None else column.width


class BlockReader:
    """A reader of rows from the blocks in ``memory``, the bytes of an arena.

    Checks every number that it takes from them, so that a damaged block raises BlockError and no
    read leaves the arena.

    Rows are given by three arrays int64 [n]: row i is slot ``slots[i]`` of the rows packed at byte
    ``offsets[i]`` under the block id ``blocks[i]``. Raises StaleHandle when the block was released,
    ColumnError when a row lacks a column.
    """

    def __init__(self, memory: memoryview, schema: Schema) -> None:
        self.memory = memory
        self._known = {
            column.name: _Known(bit, column) for bit, column in enumerate(schema.columns)
        }
        self._views: dict[int, np.ndarray] = {
            size: np.frombuffer(memory, dtype, len(memory) // size)
            for size, dtype in ((1, np.uint8), (2, np.int16), (4, np.int32), (8, np.int64))
        }
        self.words = self._views[8]

    def read(
        self, blocks: np.ndarray, offsets: np.ndarray, slots: np.ndarray, names: Sequence[str]
    ) -> dict[str, Packed]:
        """Return the columns ``names`` of n > 0 rows, in their order: views of the arena where the
        rows lie side by side, copies elsewhere."""
        out = {}
        if near := self._side_by_side(blocks, offsets, slots, names):
            for name, (bounds, start, nbytes) in zip(names, near, strict=True):
                values = self._view(self._known[name].dtype, start, nbytes)
                out[name] = Packed(values, None if bounds is None else torch.from_numpy(bounds))
            return out
        for name, (bounds, runs) in zip(
            names, self._scattered(blocks, offsets, slots, names), strict=True
        ):
            values = self._collect(self._known[name].dtype, runs)
            out[name] = Packed(values, None if bounds is None else torch.from_numpy(bounds))
        return out

    def find(
        self, blocks: np.ndarray, offsets: np.ndarray, slots: np.ndarray, names: Sequence[str]
    ) -> Found:
        """Return where the columns ``names`` of n > 0 rows lie."""
        if near := self._side_by_side(blocks, offsets, slots, names):
            return [
                (bounds, Runs(np.array([start]), np.array([nbytes])))
                for bounds, start, nbytes in near
            ]
        return self._scattered(blocks, offsets, slots, names)

    def gather(self, runs: Runs, unit: int) -> np.ndarray:
        """Return a copy of ``runs`` as an array of words of ``unit`` bytes, which must divide all
        starts and lengths."""
        shift = unit.bit_length() - 1  # faster than a division
        starts = runs.starts >> shift
        lengths = runs.lengths >> shift
        return self._views[unit][
            starts if lengths.sum() == len(starts) else indexes_of(starts, lengths)
        ]

    def _view(self, dtype: torch.dtype, start: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(
            self.memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=start
        )

    def _collect(self, dtype: torch.dtype, runs: Runs) -> torch.Tensor:
        """Return the bytes of ``runs`` as a tensor: a view of one run, a copy of several."""
        starts, lengths = runs
        if len(starts) <= 1:
            return (
                self._view(dtype, int(starts[0]), int(lengths[0]))
                if len(starts)
                else self._view(dtype, 0, 0)
            )
        if int(lengths.sum()) < _GATHER_BELOW * len(starts):
            return torch.from_numpy(self.gather(runs, dtype.itemsize)).view(dtype)
        return torch.cat(
            [self._view(dtype, *run) for run in zip(starts.tolist(), lengths.tolist(), strict=True)]
        )

    def _side_by_side(
        self, blocks: np.ndarray, offsets: np.ndarray, slots: np.ndarray, names: Sequence[str]
    ) -> list[tuple[np.ndarray | None, int, int]] | None:
        """Return the offsets, first byte and number of bytes of each column of neighbouring rows of
        one block.

        None when they are not neighbours, or when a number is wrong: then :meth:`_scattered` raises
        the error.
        """
        at = int(offsets[0])
        block = int(blocks[0])
        slot = int(slots[0])
        count = len(slots)
        if count > 1 and not (
            offsets[-1] == at
            and (offsets == at).all()
            and (blocks == block).all()
            and (np.diff(slots) == 1).all()
        ):
            return None
        memory = self.memory
        room = len(self.memory) - at
        if at < 0 or at & 7 or room < _ALIGN:
            return None
        magic, stamped, rows, columns = unpack_from("4q", memory, at)
        if (
            magic != MAGIC
            or stamped != block
            or not 0 <= slot <= rows - count
            or not 0 < 32 * columns <= room - 32
        ):
            return None
        table = unpack_from(f"{4 * columns}q", memory, at + 32)
        places = {table[i]: table[i + 1 : i + 4] for i in range(0, 4 * columns, 4)}
        out = []
        for name in names:
            column = self._known[name]
            offsets_at, values_at, nbytes = places.get(column.bit, (-1, -1, 0))
            if values_at < 32 or values_at % column.size or nbytes < 0 or values_at + nbytes > room:
                return None
            bounds = None
            if column.width is not None:
                if nbytes != rows * column.width:
                    return None
                begin = slot * column.width
                end = (slot + count) * column.width
            else:
                if offsets_at < 32 or offsets_at & 7 or offsets_at + 8 * (rows + 1) > room:
                    return None
                first = (at + offsets_at) // 8 + slot
                bounds = self.words[first : first + count + 1]
                low = int(bounds[0])
                begin = low * column.size
                end = int(bounds[-1]) * column.size
                if not 0 <= begin <= end <= nbytes or (
                    count > 1 and (bounds[1:] < bounds[:-1]).any()
                ):
                    return None
                bounds = bounds - low if low else bounds
            out.append((bounds, at + values_at + begin, end - begin))
        return out

    def _scattered(
        self, blocks: np.ndarray, offsets: np.ndarray, slots: np.ndarray, names: Sequence[str]
    ) -> Found:
        at, head_of, rows, table = self._headers(blocks, offsets, slots)
        known = [self._known[name] for name in names]
        bits, shifts, widths = np.array(
            [(c.bit, c.size.bit_length() - 1, c.width or 0) for c in known]
        ).T[:, :, None]
        ragged = [i for i, c in enumerate(known) if c.width is None]
        # Arrays are [columns, blocks] up to the first check, then [columns, n].
        here = table[:, :, 0] == bits[:, :, None]
        if not (has := here.any(2)).all():
            missing = int(has.all(1).argmin())
            raise missing_column(names[missing], int(has[missing][head_of].argmin()))
        place = table[np.arange(len(at)), here.argmax(2)]
        offsets_at = place[ragged, :, 1]
        values_at = place[:, :, 2]
        nbytes = place[:, :, 3]
        room = len(self.memory) - at
        bad = (
            (values_at < 32)
            | (values_at > room)
            | (values_at & (1 << shifts) - 1 != 0)
            | (nbytes < 0)
        )
        bad |= (nbytes > room - values_at) | ((nbytes != rows * widths) & (widths > 0))
        if ragged:
            bad[ragged] |= (
                (offsets_at < 32) | (offsets_at & 7 != 0) | (offsets_at > room - 8 * (rows + 1))
            )
        if bad.any():
            name = names[int(bad.any(1).argmax())]
            raise BlockError(
                f"read: column {name!r} of a block reaches beyond it; the arena is damaged"
            )
        bases = (at + values_at)[:, head_of]
        lines: Iterator[tuple[np.ndarray, ...]] = iter(())
        if ragged:
            index = ((at + offsets_at) >> 3)[:, head_of] + slots
            begins = self.words[index]
            ends = self.words[index + 1]
            bad = (begins < 0) | (begins > ends) | (ends > (nbytes >> shifts)[ragged][:, head_of])
            if bad.any():
                name = names[ragged[int(bad.any(1).argmax())]]
                raise BlockError(
                    f"read: offsets of column {name!r} are not in order; the arena is damaged"
                )
            bounds = np.zeros((len(ragged), len(slots) + 1), np.int64)
            np.cumsum(ends - begins, axis=1, out=bounds[:, 1:])
            lines = zip(begins, ends, bounds, strict=True)
        out: Found = []
        for base, column in zip(bases, known, strict=True):
            if column.width is None:
                begin, end, line = next(lines)
                out.append((line, _joined(base + begin * column.size, (end - begin) * column.size)))
            else:
                out.append(
                    (None, _joined(base + slots * column.width, np.full(len(slots), column.width)))
                )
        return out

    def _headers(
        self, blocks: np.ndarray, offsets: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the headers of the rows' blocks, all read at once: the byte that each begins at,
        the header of each row, rows of each, and its columns [headers, most columns, 4], with bit
        -1 where a header has fewer."""
        words = self.words
        room = len(self.memory)
        # One header for each stretch of rows in one block: reading some twice costs less than
        # sorting.
        head_of = np.zeros(len(offsets), np.int64)
        np.cumsum(offsets[1:] != offsets[:-1], out=head_of[1:])
        at = np.empty(head_of[-1] + 1, np.int64)
        at[head_of] = offsets
        invalid = (at < 0) | (at > room - _ALIGN) | (at & 7 != 0)
        if invalid.any():
            raise BlockError(
                f"read: offset {at[invalid][0]} is not a block's in an arena of {room} bytes; use "
                f"what the index gave"
            )
        head = at >> 3
        stamp = words[head[:, None] + np.arange(4)]
        stale = (stamp[:, 0] != MAGIC)[head_of] | (stamp[:, 1][head_of] != blocks)
        if stale.any():
            raise StaleHandle(
                f"block {blocks[stale][0]} was released: its bytes now hold something else; fetch "
                f"rows you still hold"
            )
        rows = stamp[:, 2]
        columns = stamp[:, 3]
        widest = int(columns.max())
        if rows.min() < 1 or rows.max() > room or columns.min() < 1 or widest > len(self._known):
            raise BlockError(
                f"read: a block header says {rows.max()} rows of {widest} columns; "
                f"the arena is damaged"
            )
        if (at > room - 32 - 32 * columns).any():
            raise BlockError("read: a block header reaches beyond the arena; the arena is damaged")
        beyond = np.flatnonzero((slots < 0) | (slots >= rows[head_of]))
        if len(beyond):
            row = int(beyond[0])
            raise BlockError(
                f"read: slot {slots[row]} of block {blocks[row]}, which has {rows[head_of[row]]} "
                f"rows; "
                "use the slots that the index gave"
            )
        cells = np.minimum(head[:, None] + 4 + np.arange(4 * widest), len(words) - 1)
        table = words[cells].reshape(-1, widest, 4)
        table[np.arange(widest) >= columns[:, None], 0] = -1
        return at, head_of, rows, table


def _joined(starts: np.ndarray, lengths: np.ndarray) -> Runs:
    """Join runs that touch; empty ones are left out."""
    some = lengths > 0
    if not some.all():
        starts = starts[some]
        lengths = lengths[some]
    if len(starts) == 0:
        return Runs(starts, lengths)
    ends = starts + lengths
    firsts = np.flatnonzero(np.concatenate([[True], starts[1:] != ends[:-1]]))
    if len(firsts) == len(starts):
        return Runs(starts, lengths)
    lasts = np.append(firsts[1:], len(starts)) - 1
    return Runs(starts[firsts], ends[lasts] - starts[firsts])


def missing_column(name: str, row: int) -> ColumnError:
    return ColumnError(
        name,
        f"row {row} of this claim does not have it yet",
        "declare it as consumed",
    )
