"""Columns: what a sample is made of, and how many rows of them lie packed in one block of bytes.

A *column* is a named field with a dtype and a shape: scalar, fixed, ragged (one dimension, a length of its own in each
row) or text. A *block* is what one write makes: B rows of some columns, column by column, never padded:

    header   int64 [4 + 4·C]: magic, block id, B, C, then per column (bit, offsets at, values at, bytes of values)
    column   ragged and text: offsets int64 [B + 1], then the values; scalar and fixed: the values alone

Sections begin at multiples of 64 bytes. Readers get tensors that are views of the block: nothing is copied.

>>> schema = Schema([Column.ragged("ids", torch.int64), Column.scalar("reward", torch.float32), Column.text("answer")])
>>> rows = {"ids": [torch.tensor([5, 6]), torch.tensor([7])], "reward": torch.tensor([0.5, 1.0]), "answer": ["a", "bc"]}
>>> block = pack(schema, rows)
>>> buffer = bytearray(block.nbytes)
>>> block.write_into(memoryview(buffer), block_id=3)
>>> [(row.tolist()) for row in BlockView(schema, memoryview(buffer), block_id=3).column("ids").unbind()]
[[5, 6], [7]]
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import unpack_from
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDictBase

from pipeline.warehouse.arena import StaleHandle

Dtype = torch.dtype | Literal["utf8"]

MAX_COLUMNS = 31  # the index keeps a sample's columns as bits of one 32-bit word
_ALIGN = 64
_MAGIC = 0x6B636F64636E7973  # "syncdock", little endian
_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)


class ColumnError(ValueError):
    """A value does not fit its column, or a column is not in the schema. The message names column, value and fix."""


@dataclass(frozen=True)
class Column:
    """A named field of a sample. ``shape`` is ``()`` for a scalar, a tuple for fixed, None for ragged and text. A column
    that is ``finite`` refuses NaN and infinities."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...] | None
    finite: bool = False

    def __post_init__(self) -> None:
        if self.dtype != "utf8" and self.dtype not in _DTYPES:
            raise ColumnError(
                f"column {self.name!r}: dtype {self.dtype} cannot be stored; use one of {_DTYPES} or text"
            )
        if self.dtype == "utf8" and self.shape is not None:
            raise ColumnError(f"column {self.name!r}: text has no shape; use Column.text({self.name!r})")

    @classmethod
    def scalar(cls, name: str, dtype: torch.dtype, *, finite: bool = False) -> Column:
        return cls(name, dtype, (), finite)

    @classmethod
    def fixed(cls, name: str, dtype: torch.dtype, shape: Iterable[int], *, finite: bool = False) -> Column:
        return cls(name, dtype, tuple(shape), finite)

    @classmethod
    def ragged(cls, name: str, dtype: torch.dtype, *, finite: bool = False) -> Column:
        return cls(name, dtype, None, finite)

    @classmethod
    def text(cls, name: str) -> Column:
        return cls(name, "utf8", None)

    @property
    def itemsize(self) -> int:
        """Bytes of one element; a text's elements are the bytes of its UTF-8."""
        return 1 if self.dtype == "utf8" else self.dtype.itemsize

    def describe(self) -> str:
        kind = "text" if self.dtype == "utf8" else str(self.dtype).removeprefix("torch.")
        return kind if self.dtype == "utf8" else f"{kind} {'ragged' if self.shape is None else list(self.shape)}"


class Schema:
    """The columns of a run, in order. A column's bit is its place; it stands for the column in the index, whose stages know
    ``most`` of them."""

    def __init__(self, columns: Iterable[Column], *, most: int = MAX_COLUMNS) -> None:
        self.columns = tuple(columns)
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ColumnError(f"schema: column {twice} is declared twice; each column has one producer")
        if len(names) > most:
            raise ColumnError(f"schema: {len(names)} columns, at most {most} fit; join some into a fixed column")
        self._bits = {name: bit for bit, name in enumerate(names)}

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def __getitem__(self, name: str) -> Column:
        return self.columns[self.bit(name)]

    def bit(self, name: str) -> int:
        if name not in self._bits:
            raise ColumnError(f"column {name!r} is not in the schema; it has {list(self._bits)}")
        return self._bits[name]

    def mask(self, names: Iterable[str]) -> int:
        """The bits of ``names`` as one number."""
        return sum(1 << self.bit(name) for name in set(names))

    def to_json(self) -> str:
        return json.dumps([[c.name, str(c.dtype).removeprefix("torch."), c.shape, c.finite] for c in self.columns])

    @classmethod
    def from_json(cls, text: str) -> Schema:
        columns = [
            Column(
                name,
                "utf8" if dtype == "utf8" else getattr(torch, dtype),
                None if shape is None else tuple(shape),
                finite,
            )
            for name, dtype, shape, finite in json.loads(text)
        ]
        return cls(columns, most=max(MAX_COLUMNS, len(columns)))  # its number was checked where it was made

    def names(self, mask: int) -> list[str]:
        return [column.name for bit, column in enumerate(self.columns) if mask >> bit & 1]


@dataclass(frozen=True)
class _Section:
    bit: int
    offsets: torch.Tensor | None  # int64 [B + 1]; None for scalar and fixed
    parts: list[torch.Tensor]  # of one dtype, flat, written one after the other
    nbytes: int


class PackedRows:
    """Checked rows, ready to be written into ``nbytes`` bytes of a warehouse."""

    def __init__(self, rows: int, mask: int, sections: list[_Section]) -> None:
        self.rows, self.mask, self._sections = rows, mask, sections
        at = _aligned(8 * (4 + 4 * len(sections)))
        self._places: list[tuple[int, int]] = []
        for section in sections:
            offsets_at = at
            if section.offsets is not None:
                at = _aligned(at + 8 * (rows + 1))
            self._places.append((offsets_at if section.offsets is not None else -1, at))
            at = _aligned(at + section.nbytes)
        self.nbytes = at

    def write_into(self, memory: memoryview, block_id: int) -> None:
        """Write header and columns; ``memory`` has ``nbytes`` bytes. Each payload byte is copied once."""
        header = [_MAGIC, block_id, self.rows, len(self._sections)]
        for section, (offsets_at, values_at) in zip(self._sections, self._places, strict=True):
            header += [section.bit, offsets_at, values_at, section.nbytes]
            if section.offsets is not None:
                _view(memory, torch.int64, offsets_at, 8 * (self.rows + 1)).copy_(section.offsets)
            if section.nbytes:
                # By numpy, in one thread: torch would share the copy with a second one, and wait for it on a busy machine.
                parts = [_array(part) for part in section.parts]
                kind = parts[0].dtype
                target = np.frombuffer(memory, kind, section.nbytes // kind.itemsize, values_at)
                if len(parts) == 1:
                    np.copyto(target, parts[0])
                else:
                    np.concatenate(parts, out=target)
        np.frombuffer(memory, np.int64, len(header))[:] = header


def pack(schema: Schema, rows: Mapping[str, Any] | TensorDictBase) -> PackedRows:
    """Check ``rows`` against ``schema`` and lay them out.

    A scalar column takes a tensor [B], a fixed one [B, *shape], a ragged one a jagged nested tensor, a :class:`Packed` or a
    sequence of B tensors [n_i], a text one a sequence of B strings. Raises :class:`ColumnError`; nothing is ever cast.
    """
    given = dict(rows.items())
    names = list(given)
    if not names:
        raise ColumnError("rows: no column given; write at least one")
    count: int | None = None
    sections = []
    for name in sorted(names, key=schema.bit):
        column = schema[name]
        value = given[name]
        if isinstance(value, str):  # has a length, which is not one of rows
            raise ColumnError(
                f"column {name!r}: takes one string for each row, got {_what(value)}; give a list of them"
            )
        size = _count(value)
        if size < 1:
            raise ColumnError(f"column {name!r}: needs one value for each row, got {_what(value)}")
        if count is None:
            count = size
        elif size != count:
            raise ColumnError(
                f"column {name!r}: has {size} rows where {names[0]!r} has {count}; give all the same rows"
            )
        sections.append(_section(schema, column, value, size))
    assert count is not None
    return PackedRows(count, schema.mask(names), sections)


def _section(schema: Schema, column: Column, value: Any, rows: int) -> _Section:
    bit = schema.bit(column.name)
    if column.dtype == "utf8":
        texts = value.tolist() if isinstance(value, NonTensorStack) else list(value)
        if not all(isinstance(text, str) for text in texts):
            raise ColumnError(f"column {column.name!r}: takes strings, got {_what(value)}")
        encoded = [_encoded(column, row, text) for row, text in enumerate(texts)]
        payload = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8) if any(encoded) else _EMPTY
        return _Section(bit, _offsets([len(text) for text in encoded]), [payload], payload.numel())
    offsets: torch.Tensor | None = None
    if column.shape is not None:
        _check_dtype(column, value)
        if value.is_nested or tuple(value.shape[1:]) != column.shape:
            raise ColumnError(
                f"column {column.name!r}: takes shape {[rows, *column.shape]}, got {_what(value)}; reshape it first"
            )
        parts = [value.detach().reshape(-1)]
    elif isinstance(value, torch.Tensor):
        inner = _jagged(value)
        if inner is None:
            raise ColumnError(
                f"column {column.name!r}: is ragged; give a jagged nested tensor or a list, got {_what(value)}"
            )
        values, bounds, lengths = inner
        if values.dtype != column.dtype:
            _check_dtype(column, value)
        if values.dim() != 1:
            raise ColumnError(f"column {column.name!r}: ragged rows have one dimension, got {_what(value)}")
        parts, offsets = [values.detach()], bounds.to("cpu", torch.int64)
        if int(offsets[0]) != 0 or lengths is not None:
            parts = [part.detach() for part in value.unbind()]
            offsets = _offsets([part.numel() for part in parts])
    elif isinstance(value, Packed):
        _check_dtype(column, value.values)
        parts, offsets = [value.values.detach()], value.offsets
        if offsets is None or parts[0].dim() != 1 or not _bounds(offsets, len(parts[0])):
            raise ColumnError(
                f"column {column.name!r}: takes flat values, and offsets int64 that rise from 0 to their number, got "
                f"{_what(value)}"
            )
    else:
        parts = list(value)
        try:  # all of them at once: a check for each would cost more than the copy
            fits = {part.dtype for part in parts} == {column.dtype} and {part.dim() for part in parts} == {1}
        except AttributeError:
            fits = False
        if not fits:
            _find_misfit(column, parts)
        if any(part.requires_grad for part in parts):
            parts = [part.detach() for part in parts]
        offsets = _offsets([part.numel() for part in parts])
    if not all(part.is_cpu for part in parts):
        parts = [part.cpu() for part in parts]
    count = rows * math.prod(column.shape or ()) if offsets is None else int(offsets[-1])
    if column.finite and not all(bool(part.isfinite().all()) for part in parts):
        raise ColumnError(
            f"column {column.name!r}: {_not_finite(parts, offsets, rows)}; NaN and infinities are refused"
        )
    return _Section(bit, offsets, parts, count * column.itemsize)


def _bounds(offsets: torch.Tensor, total: int) -> bool:
    """Whether ``offsets`` bound rows of ``total`` elements."""
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.is_cpu:
        return False
    return int(offsets[0]) == 0 and int(offsets[-1]) == total and bool((offsets.diff() >= 0).all())


def _find_misfit(column: Column, parts: Sequence[Any]) -> None:
    for part in parts:
        _check_dtype(column, part)
        if part.dim() != 1:
            raise ColumnError(f"column {column.name!r}: ragged rows have one dimension, got {_what(part)}")


def _not_finite(parts: Sequence[torch.Tensor], offsets: torch.Tensor | None, rows: int) -> str:
    """Which row holds the first value that is not finite."""
    values = torch.cat([part.reshape(-1) for part in parts])
    at = int((~values.isfinite()).nonzero()[0, 0])
    row = at // (len(values) // rows) if offsets is None else int(torch.searchsorted(offsets, at, right=True)) - 1
    return f"row {row} holds {float(values[at])}"


@dataclass(frozen=True)
class Packed:
    """One column of B rows, never padded: ``values`` flat, one row after the other; ``offsets`` int64 [B + 1] in elements,
    None where all rows have one size."""

    values: torch.Tensor
    offsets: torch.Tensor | None

    def __len__(self) -> int:
        """Rows of a ragged column; a dense one does not know where its rows end."""
        if self.offsets is None:
            raise TypeError("a dense column has no offsets, and so no number of rows")
        return len(self.offsets) - 1

    def lengths(self) -> torch.Tensor:
        """Elements of each row, int64 [B]; of ragged columns."""
        assert self.offsets is not None, "a dense column has no lengths"
        return self.offsets.diff()

    def jagged(self) -> torch.Tensor:
        """A jagged nested tensor [B, j] on the same memory."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def padded(self, fill: float = 0) -> torch.Tensor:
        """A new tensor [B, longest row], filled up with ``fill``."""
        lengths = self.lengths()
        out = self.values.new_full((len(lengths), int(lengths.max()) if len(lengths) else 0), fill)
        out[torch.arange(out.shape[1]) < lengths[:, None]] = self.values
        return out

    def texts(self) -> list[str]:
        """The strings of a text column."""
        assert self.offsets is not None
        payload = self.values.numpy().tobytes()
        return [payload[a:b].decode() for a, b in pairwise(self.offsets.tolist())]


class BlockView:
    """The columns of one block as tensors that view its bytes."""

    def __init__(self, schema: Schema, memory: memoryview, block_id: int) -> None:
        magic, found, self.rows, columns = unpack_from("4q", memory)
        if magic != _MAGIC or found != block_id:
            raise _stale(block_id)
        self._schema, self._memory = schema, memory
        table = unpack_from(f"{4 * columns}q", memory, 32)
        self._places = {table[i]: table[i + 1 : i + 4] for i in range(0, 4 * columns, 4)}

    def __contains__(self, name: str) -> bool:
        return self._schema.bit(name) in self._places

    def ragged(self, name: str) -> tuple[np.ndarray, torch.Tensor]:
        """Offsets int64 [B + 1] in elements, and the packed values."""
        column = self._schema[name]
        offsets_at, values_at, nbytes = self._places[self._schema.bit(name)]
        offsets = np.frombuffer(self._memory, np.int64, self.rows + 1, offsets_at)
        dtype = torch.uint8 if column.dtype == "utf8" else column.dtype
        return offsets, _view(self._memory, dtype, values_at, nbytes)

    def packed(self, name: str, first: int, rows: int) -> Packed:
        """Rows ``first`` .. ``first + rows - 1`` of a column, on the block's own memory."""
        column = self._schema[name]
        if column.shape is not None:
            assert isinstance(column.dtype, torch.dtype)
            _, values_at, nbytes = self._places[self._schema.bit(name)]
            each = nbytes // self.rows
            return Packed(_view(self._memory, column.dtype, values_at + first * each, rows * each), None)
        offsets, values = self.ragged(name)
        bounds = torch.from_numpy(offsets[first : first + rows + 1])
        start = int(bounds[0])
        return Packed(values[start : int(bounds[-1])], bounds if start == 0 else bounds - start)


def collect(
    schema: Schema, names: Sequence[str], arena: memoryview, places: np.ndarray, blocks: np.ndarray, slots: np.ndarray
) -> dict[str, Packed]:
    """The columns ``names`` of B rows of one arena, in their order: row i is slot ``slots[i]`` of the packed rows of block
    ``blocks[i]`` that begin at byte ``places[i]`` (each int64 [B]).

    Rows that lie side by side stay views of the arena; others are copied together once. Raises StaleHandle when other
    bytes lie there by now, ColumnError when a row does not have the column.
    """
    count, first = len(slots), int(slots[0])
    if count == 1 or (
        (places == places[0]).all() and (blocks == blocks[0]).all() and (slots == np.arange(first, first + count)).all()
    ):
        view = BlockView(schema, arena[int(places[0]) :], int(blocks[0]))
        missing = [name for name in names if name not in view]
        if missing:
            raise missing_column(missing[0], 0)
        return {name: view.packed(name, first, count) for name in names}
    words = np.frombuffer(arena, np.int64, len(arena) // 8)
    # One header for each stretch of rows in the same packed rows; all headers are read at once.
    heads = np.concatenate([[0], np.flatnonzero((np.diff(places) != 0) | (np.diff(blocks) != 0)) + 1])
    head_of = np.repeat(np.arange(len(heads)), np.diff(np.append(heads, count)))
    at = places[heads] // 8
    stale = (words[at] != _MAGIC) | (words[at + 1] != blocks[heads])
    if stale.any():
        raise _stale(int(blocks[heads][stale][0]))
    columns = words[at + 3]
    table = words[np.minimum(at[:, None] + 4 + np.arange(4 * columns.max()), len(words) - 1)].reshape(len(at), -1, 4)
    table[np.arange(table.shape[1]) >= columns[:, None], 0] = -1
    out = {}
    for name in names:
        column, here = schema[name], table[:, :, 0] == schema.bit(name)
        if not here.any(1).all():
            raise missing_column(name, int(heads[~here.any(1)][0]))
        _, offsets_at, values_at, _ = table[here].T
        begin = places + values_at[head_of]
        if column.shape is None:
            bounds = (places + offsets_at[head_of]) // 8 + slots
            starts, ends = (begin + words[bounds + i] * column.itemsize for i in (0, 1))
            sizes = ends - starts
            offsets: torch.Tensor | None = _offsets(sizes // column.itemsize)
        else:
            size = column.itemsize * math.prod(column.shape)
            starts, sizes, offsets = begin + slots * size, np.full(count, size), None
        dtype = torch.uint8 if column.dtype == "utf8" else column.dtype
        out[name] = Packed(_joined(arena, dtype, starts, sizes), offsets)
    return out


def _joined(arena: memoryview, dtype: torch.dtype, starts: np.ndarray, sizes: np.ndarray) -> torch.Tensor:
    """The bytes [starts, starts + sizes) one after the other; a view when they already lie so."""
    keep = sizes > 0
    starts, sizes = starts[keep], sizes[keep]
    if not len(starts):
        return torch.empty(0, dtype=dtype)
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
    firsts = np.concatenate([[0], breaks])
    begins, lengths = starts[firsts], np.add.reduceat(sizes, firsts)
    if len(begins) == 1:
        return _view(arena, dtype, int(begins[0]), int(lengths[0]))
    if lengths.mean() >= _GATHER_BELOW:
        pieces = zip(begins.tolist(), lengths.tolist(), strict=True)
        return torch.cat([_view(arena, dtype, begin, length) for begin, length in pieces])
    items, begins = lengths // dtype.itemsize, begins // dtype.itemsize
    ends = np.cumsum(items)
    index = np.arange(ends[-1]) + np.repeat(begins - ends + items, items)
    source = np.frombuffer(arena, _NUMPY[dtype.itemsize], len(arena) // dtype.itemsize)
    return torch.from_numpy(source[index]).view(dtype)


def in_order(parts: Sequence[tuple[np.ndarray, Packed]], count: int) -> Packed:
    """One column whose rows came from several places: each part says which of the ``count`` rows it holds."""
    order = np.argsort(np.concatenate([positions for positions, _ in parts]), kind="stable")
    values = torch.cat([part.values for _, part in parts])
    if parts[0][1].offsets is None:
        return Packed(values.view(count, -1)[torch.from_numpy(order)].view(-1), None)
    sizes = np.concatenate([part.lengths().numpy() for _, part in parts])
    starts = np.cumsum(sizes) - sizes
    sizes, starts = sizes[order], starts[order]
    offsets = _offsets(sizes)
    index = np.arange(int(offsets[-1])) + np.repeat(starts - offsets.numpy()[:-1], sizes)
    return Packed(values[torch.from_numpy(index)], offsets)


def missing_column(name: str, row: int) -> ColumnError:
    return ColumnError(f"column {name!r}: row {row} of this claim does not have it yet; declare it as consumed")


def _stale(block: int) -> StaleHandle:
    return StaleHandle(f"block {block} was released: its bytes now hold something else; fetch rows you still hold")


_GATHER_BELOW = 2048  # bytes: pieces shorter than this are gathered element by element, longer ones copied one by one
_NUMPY = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_EMPTY = torch.empty(0, dtype=torch.uint8)


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN


def _offsets(lengths: Sequence[int] | np.ndarray) -> torch.Tensor:
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return torch.from_numpy(out)


def _jagged(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Values, offsets and lengths of a jagged nested tensor; None of any other. Its attributes are read as they are: each
    public accessor goes through torch's dispatcher, which takes longer than a small column's copy."""
    if not hasattr(value, "_offsets"):
        return None
    held: Any = value
    return held._values, held._offsets, held._lengths


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        if (inner := _jagged(value)) is not None:
            return len(inner[1]) - 1
        return value.size(0) if value.dim() else 0
    if isinstance(value, Packed) and value.offsets is None:
        return 0
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", None) != 0 else 0


def _encoded(column: Column, row: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ColumnError(
            f"column {column.name!r}: row {row} is not a text that UTF-8 can hold ({error}); "
            "decode it with errors='replace'"
        ) from None


def _array(part: torch.Tensor) -> np.ndarray:
    return (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy()


def _view(memory: memoryview, dtype: torch.dtype, at: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)


def _check_dtype(column: Column, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise ColumnError(f"column {column.name!r}: takes {column.describe()}, got {_what(value)}; make it a tensor")
    if value.dtype != column.dtype:
        raise ColumnError(
            f"column {column.name!r}: takes {column.describe()}, got {_what(value)}; convert with .to({column.dtype})"
        )


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        jagged = "jagged" if value.layout == torch.jagged else "strided nested"
        shape = jagged if value.is_nested else list(value.shape)
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {shape}"
    return f"{type(value).__name__} {value!r}"[:80]
