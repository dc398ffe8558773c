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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import unpack_from
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

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


class StaleHandle(LookupError):
    """A handle points to a row or block that was released; its bytes may belong to somebody else by now."""


@dataclass(frozen=True)
class Column:
    """A named field of a sample. ``shape`` is ``()`` for a scalar, a tuple for fixed, None for ragged and text."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...] | None

    def __post_init__(self) -> None:
        if self.dtype != "utf8" and self.dtype not in _DTYPES:
            raise ColumnError(
                f"column {self.name!r}: dtype {self.dtype} cannot be stored; use one of {_DTYPES} or text"
            )
        if self.dtype == "utf8" and self.shape is not None:
            raise ColumnError(f"column {self.name!r}: text has no shape; use Column.text({self.name!r})")

    @classmethod
    def scalar(cls, name: str, dtype: torch.dtype) -> Column:
        return cls(name, dtype, ())

    @classmethod
    def fixed(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> Column:
        return cls(name, dtype, tuple(shape))

    @classmethod
    def ragged(cls, name: str, dtype: torch.dtype) -> Column:
        return cls(name, dtype, None)

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
    """The columns of a run, in order. A column's bit is its place; it stands for the column in the index."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self.columns = tuple(columns)
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ColumnError(f"schema: column {twice} is declared twice; each column has one producer")
        if len(names) > MAX_COLUMNS:
            raise ColumnError(f"schema: {len(names)} columns, at most {MAX_COLUMNS} fit; join some into a fixed column")
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

    def names(self, mask: int) -> list[str]:
        return [column.name for bit, column in enumerate(self.columns) if mask >> bit & 1]


@dataclass(frozen=True)
class _Section:
    bit: int
    lengths: torch.Tensor | None  # int64 [B + 1] offsets; None for scalar and fixed
    values: list[torch.Tensor]  # flat uint8, written one after the other
    nbytes: int


class PackedRows:
    """Checked rows, ready to be written into ``nbytes`` bytes of a warehouse."""

    def __init__(self, rows: int, mask: int, sections: list[_Section]) -> None:
        self.rows, self.mask, self._sections = rows, mask, sections
        at = _aligned(8 * (4 + 4 * len(sections)))
        self._places: list[tuple[int, int]] = []
        for section in sections:
            offsets_at = at
            if section.lengths is not None:
                at = _aligned(at + 8 * (rows + 1))
            self._places.append((offsets_at if section.lengths is not None else -1, at))
            at = _aligned(at + section.nbytes)
        self.nbytes = at

    def write_into(self, memory: memoryview, block_id: int) -> None:
        """Write header and columns; ``memory`` has ``nbytes`` bytes. Each payload byte is copied once."""
        header = [_MAGIC, block_id, self.rows, len(self._sections)]
        target = torch.frombuffer(memory, dtype=torch.uint8)
        for section, (offsets_at, values_at) in zip(self._sections, self._places, strict=True):
            header += [section.bit, offsets_at, values_at, section.nbytes]
            if section.lengths is not None:
                target[offsets_at : offsets_at + 8 * (self.rows + 1)] = section.lengths.view(torch.uint8)
            at = values_at
            for value in section.values:
                target[at : at + value.numel()] = value
                at += value.numel()
        np.frombuffer(memory, np.int64, len(header))[:] = header


def pack(schema: Schema, rows: Mapping[str, Any] | TensorDictBase) -> PackedRows:
    """Check ``rows`` against ``schema`` and lay them out.

    A scalar column takes a tensor [B], a fixed one [B, *shape], a ragged one a jagged nested tensor or a sequence of B
    tensors [n_i], a text one a sequence of B strings. Raises :class:`ColumnError`; nothing is ever cast.
    """
    names = list(rows.keys())
    if not names:
        raise ColumnError("rows: no column given; write at least one")
    count: int | None = None
    sections = []
    for name in sorted(names, key=schema.bit):
        column = schema[name]
        value = rows.get(name)
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
    if column.shape is None:
        if isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged:
            _check_dtype(column, value)
            nested: Any = value  # torch declares none of a nested tensor's own methods
            parts, offsets = [nested.values()], nested.offsets()
            if parts[0].dim() != 1:
                raise ColumnError(f"column {column.name!r}: ragged rows have one dimension, got {_what(value)}")
            if int(offsets[0]) != 0 or nested.lengths() is not None:
                parts = list(nested.unbind())
                offsets = _offsets([part.numel() for part in parts])
        elif isinstance(value, torch.Tensor):
            raise ColumnError(
                f"column {column.name!r}: is ragged; give a jagged nested tensor or a list, got {_what(value)}"
            )
        else:
            parts = list(value)
            for part in parts:
                _check_dtype(column, part)
                if part.dim() != 1:
                    raise ColumnError(f"column {column.name!r}: ragged rows have one dimension, got {_what(part)}")
            offsets = _offsets([part.numel() for part in parts])
        flat = [_bytes(part) for part in parts if part.numel()]
        return _Section(bit, offsets.to("cpu", torch.int64), flat, sum(part.numel() for part in flat))
    _check_dtype(column, value)
    if value.is_nested or tuple(value.shape[1:]) != column.shape:
        raise ColumnError(
            f"column {column.name!r}: takes shape {[rows, *column.shape]}, got {_what(value)}; reshape it first"
        )
    flat_value = _bytes(value)
    return _Section(bit, None, [flat_value], flat_value.numel())


class BlockView:
    """The columns of one block as tensors that view its bytes."""

    def __init__(self, schema: Schema, memory: memoryview, block_id: int) -> None:
        magic, found, self.rows, columns = unpack_from("4q", memory)
        if magic != _MAGIC or found != block_id:
            raise StaleHandle(
                f"block {block_id} was released: its bytes now hold something else; fetch rows you still hold"
            )
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

    def dense(self, name: str) -> torch.Tensor:
        """Values [B, *shape] of a scalar or fixed column."""
        column = self._schema[name]
        assert column.shape is not None
        assert isinstance(column.dtype, torch.dtype)
        _, values_at, nbytes = self._places[self._schema.bit(name)]
        return _view(self._memory, column.dtype, values_at, nbytes).view(self.rows, *column.shape)

    def row_bytes(self, column: Column, bit: int, slot: int) -> memoryview:
        """The bytes of one row's value of ``column``, whose bit is ``bit``; KeyError when the block does not have it."""
        offsets_at, values_at, nbytes = self._places[bit]
        if column.shape is None:
            begin, end = unpack_from("2q", self._memory, offsets_at + 8 * slot)
            return self._memory[values_at + begin * column.itemsize : values_at + end * column.itemsize]
        size = nbytes // self.rows
        return self._memory[values_at + slot * size : values_at + (slot + 1) * size]

    def column(self, name: str) -> torch.Tensor:
        """The whole column: dense, or a jagged nested tensor."""
        if self._schema[name].shape is not None:
            return self.dense(name)
        offsets, values = self.ragged(name)
        return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets))


def gather(schema: Schema, names: Sequence[str], places: Sequence[Sequence[tuple[BlockView, int]]]) -> TensorDict:
    """Rows from wherever they lie, as a TensorDict with batch size [B], in the order of ``places``.

    ``places[i]`` lists the (block, slot) pairs of row i. Rows that lie side by side in one block stay views of it;
    others are copied together. Ragged columns come back as jagged nested tensors, text as lists of strings.
    """
    out = TensorDict({}, batch_size=[len(places)])
    for name in names:
        column, found = schema[name], _find(name, places)
        first, start = found[0]
        if all(view is first and slot == start + i for i, (view, slot) in enumerate(found)):
            if column.shape is not None:
                out[name] = first.dense(name)[start : start + len(found)]
                continue
            offsets, values = first.ragged(name)
            offsets = offsets[start : start + len(found) + 1]
            values = values[int(offsets[0]) : int(offsets[-1])]
            bounds = torch.from_numpy(offsets - offsets[0])
        else:  # joined as bytes: a tensor for each row would take ten times as long
            bit = schema.bit(name)
            parts = [view.row_bytes(column, bit, slot) for view, slot in found]
            joined = bytearray().join(parts)
            dtype = torch.uint8 if column.dtype == "utf8" else column.dtype
            values = _view(memoryview(joined), dtype, 0, len(joined))
            if column.shape is not None:
                out[name] = values.view(len(found), *column.shape)
                continue
            bounds = _offsets([len(part) // column.itemsize for part in parts])
        if column.dtype == "utf8":
            payload, edges = values.numpy().tobytes(), bounds.tolist()
            out[name] = NonTensorStack(*(payload[a:b].decode() for a, b in pairwise(edges)))
        else:
            out[name] = torch.nested.nested_tensor_from_jagged(values, bounds)
    return out


def _find(name: str, places: Sequence[Sequence[tuple[BlockView, int]]]) -> list[tuple[BlockView, int]]:
    """Where each row has the column ``name``."""
    found = []
    for row, blocks in enumerate(places):
        for place in blocks:
            if name in place[0]:
                found.append(place)
                break
        else:
            raise ColumnError(f"column {name!r}: row {row} of this claim does not have it yet; declare it as consumed")
    return found


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.size(0) if value.dim() else 0
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", None) != 0 else 0


def _encoded(column: Column, row: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ColumnError(
            f"column {column.name!r}: row {row} is not a text that UTF-8 can hold ({error}); "
            "decode it with errors='replace'"
        ) from None


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)


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
