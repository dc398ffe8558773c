"""The columns of samples: their schema, and a column of many rows packed into one tensor.

A *column* is a named field with a dtype and a shape: scalar, fixed, ragged (one dimension, with its
own length in each row) or text. :mod:`pipeline.data.blocks` writes rows of columns into bytes and reads
them back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from pipeline.problems import Fatal, Problem, ProblemError

Dtype = torch.dtype | Literal["utf8"]
Ragged = Literal["packed", "jagged", "padded"]

MAX_COLUMNS = 31  # the index keeps a sample's columns as bits of one 32-bit word
DTYPES: tuple[torch.dtype, ...] = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
)


class ColumnError(Fatal, ProblemError, ValueError):
    """A value does not fit its ``column``, or that is not there.

    ``subject``: its name in the message.
    """

    def __init__(self, column: str, wrong: str, fix: str = "", subject: str = "") -> None:
        problem = Problem(f"columns.{column}" if column else "columns", None, wrong, fix)
        message = str(Problem(subject or f"column {column!r}", None, wrong, fix))
        super().__init__(problem, message=message)


@dataclass(frozen=True)
class Column:
    """A named field of a sample.

    ``shape`` is ``()`` for a scalar, a tuple for fixed, None for ragged and text. A column that is
    ``finite`` refuses NaN and infinities.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...] | None
    finite: bool = False

    def __post_init__(self) -> None:
        if self.dtype != "utf8" and self.dtype not in DTYPES:
            raise ColumnError(
                self.name,
                f"dtype {self.dtype} cannot be stored",
                f"use one of {DTYPES} or text",
            )
        if self.dtype == "utf8" and self.shape is not None:
            raise ColumnError(self.name, "text has no shape", f"use Column.text({self.name!r})")

    @classmethod
    def scalar(cls, name: str, dtype: torch.dtype, *, finite: bool = False) -> Column:
        return cls(name, dtype, (), finite)

    @classmethod
    def fixed(
        cls, name: str, dtype: torch.dtype, shape: Iterable[int], *, finite: bool = False
    ) -> Column:
        return cls(name, dtype, tuple(shape), finite)

    @classmethod
    def ragged(cls, name: str, dtype: torch.dtype, *, finite: bool = False) -> Column:
        return cls(name, dtype, None, finite)

    @classmethod
    def text(cls, name: str) -> Column:
        return cls(name, "utf8", None)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the stored elements; a text is stored as the bytes of its UTF-8."""
        return torch.uint8 if isinstance(self.dtype, str) else self.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return self.stored.itemsize

    @property
    def width(self) -> int:
        """Bytes of one row of a scalar or fixed column."""
        assert self.shape is not None
        return self.itemsize * math.prod(self.shape)

    def describe(self) -> str:
        if self.dtype == "utf8":
            return "text"
        shape = "ragged" if self.shape is None else list(self.shape)
        return f"{str(self.dtype).removeprefix('torch.')} {shape}"

    def empty(self) -> Packed:
        """This column of no rows."""
        offsets = torch.zeros(1, dtype=torch.int64) if self.shape is None else None
        return Packed(torch.empty(0, dtype=self.stored), offsets)


class Schema:
    """The ordered columns of a run.

    The index stores a column as the bit at its position; it takes ``most`` of them.
    """

    def __init__(self, columns: Iterable[Column], *, most: int = MAX_COLUMNS) -> None:
        self.columns = tuple(columns)
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ColumnError(
                "",
                f"column {twice} is declared twice",
                "each column has one producer",
                subject="schema",
            )
        if len(names) > most:
            raise ColumnError(
                "",
                f"{len(names)} columns, at most {most} fit",
                "join some into a fixed column",
                subject="schema",
            )
        self._bits = {name: bit for bit, name in enumerate(names)}

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def __getitem__(self, name: str) -> Column:
        return self.columns[self.bit(name)]

    def bit(self, name: str) -> int:
        if name not in self._bits:
            raise ColumnError(name, "is not in the schema", f"it has {list(self._bits)}")
        return self._bits[name]

    def mask(self, names: Iterable[str]) -> int:
        """Return the bits of ``names`` as one number."""
        return sum(1 << self.bit(name) for name in set(names))

    def names(self, mask: int) -> list[str]:
        """Return the columns with a bit in ``mask``, in the order of the schema."""
        return [column.name for bit, column in enumerate(self.columns) if mask >> bit & 1]

    def to_json(self) -> str:
        return json.dumps(
            [[c.name, str(c.dtype).removeprefix("torch."), c.shape, c.finite] for c in self.columns]
        )

    @classmethod
    def from_json(cls, text: str) -> Schema:
        columns = [
            Column(
                name,
                "utf8" if dtype == "utf8" else getattr(torch, dtype),
                shape if shape is None else tuple(shape),
                finite,
            )
            for name, dtype, shape, finite in json.loads(text)
        ]
        # the number was checked when the schema was made
        return cls(columns, most=max(MAX_COLUMNS, len(columns)))


@dataclass(frozen=True)
class Packed:
    """One column of B rows without padding: ``values`` flat, one row after the other; ``offsets``
    int64 [B + 1] in elements, None for a dense column: its rows have one size."""

    values: torch.Tensor
    offsets: torch.Tensor | None

    @classmethod
    def of(cls, column: torch.Tensor) -> Packed:
        """Return a ragged column of B rows: a jagged nested tensor [B, j] on the same memory; of
        any other tensor of rows, or where rows do not lie one after the other, a copy."""
        if (inner := jagged_parts(column)) is not None:
            values, bounds, lengths = inner
            offsets = bounds.to("cpu", torch.int64)
            if lengths is None and int(offsets[0]) == 0:
                return cls(values[: int(offsets[-1])], offsets)
        rows = column.unbind()
        return cls(torch.cat(rows), offsets_of([len(row) for row in rows]))

    def __len__(self) -> int:
        """Return the number of rows of a ragged column.

        Raises TypeError for a dense one, which has no offsets to count.
        """
        if self.offsets is None:
            raise TypeError("a dense column has no offsets, and so no number of rows")
        return len(self.offsets) - 1

    def lengths(self) -> torch.Tensor:
        """Return the number of elements of each row of a ragged column, int64 [B]."""
        assert self.offsets is not None, "a dense column has no lengths"
        return self.offsets.diff()

    def rows(self) -> list[torch.Tensor]:
        """Return the rows of a ragged column, on the same memory."""
        return list(self.values.split(self.lengths().tolist()))

    def lists(self) -> list[list[Any]]:
        """Return the rows of a ragged column as lists of numbers."""
        assert self.offsets is not None, "a dense column has no lengths"
        values = self.values.tolist()
        return [values[begin:end] for begin, end in pairwise(self.offsets.tolist())]

    def sums(self) -> torch.Tensor:
        """Return the sum of each row of a ragged column of integers or truth values, int64 [B]."""
        sums = self.values.new_zeros(len(self.values) + 1, dtype=torch.int64)
        torch.cumsum(self.values, 0, out=sums[1:])
        return sums[self.offsets].diff()

    def indexes(self, positions: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Return int64, the places in ``values`` of the rows at ``positions``, row after row."""
        assert self.offsets is not None, "a dense column has no offsets"
        bounds = self.offsets.numpy()
        at = np.asarray(positions, np.int64)
        return torch.from_numpy(indexes_of(bounds[at], np.diff(bounds)[at]))

    def value(self, column: Column, rows: int, ragged: Ragged, fill: float = 0) -> Any:
        """Return these ``rows`` rows of ``column`` for its reader: a dense column as a tensor [B,
        *shape], text as a list of B strings, a ragged one as this object ("packed"), :meth:`jagged`
        or :meth:`padded` with ``fill``."""
        if column.shape is not None:
            return self.values.view(rows, *column.shape)
        if column.dtype == "utf8":
            return self.texts()
        if ragged == "packed":
            return self
        return self.jagged() if ragged == "jagged" else self.padded(fill)

    def jagged(self) -> torch.Tensor:
        """Return a jagged nested tensor [B, j] on the same memory."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def padded(self, fill: float = 0) -> torch.Tensor:
        """Return a new tensor [B, longest row], padded with ``fill``."""
        lengths = self.lengths()
        out = self.values.new_full((len(lengths), int(lengths.max()) if len(lengths) else 0), fill)
        out[torch.arange(out.shape[1]) < lengths[:, None]] = self.values
        return out

    def texts(self) -> list[str]:
        """Return the strings of a text column."""
        assert self.offsets is not None
        payload = self.values.numpy().tobytes()
        return [payload[a:b].decode() for a, b in pairwise(self.offsets.tolist())]

    def select(self, positions: np.ndarray, rows: int) -> Packed:
        """Return a copy of the rows at ``positions`` (int64) of these ``rows`` rows, in that
        order."""
        if self.offsets is None:
            values = (
                self.values.view(rows, -1)[torch.from_numpy(positions)].view(-1)
                if rows
                else self.values
            )
            return Packed(values, None)
        sizes = self.lengths().numpy()[positions]
        return Packed(self.values[self.indexes(positions)], offsets_of(sizes))


def jagged_parts(
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Return the values, offsets and lengths of a jagged nested tensor; None for any other tensor.

    Reads the private attributes, because each public accessor goes through torch's dispatcher,
    which takes longer than the copy of a small column.
    """
    if not hasattr(value, "_offsets"):
        return None
    nested: Any = value
    return nested._values, nested._offsets, nested._lengths


def plain_values(column: Any) -> list[Any]:
    """Return the values of a fetched column, one for each row, as plain Python values: numbers,
    lists of numbers, or texts."""
    if not isinstance(column, torch.Tensor):
        return list(column)
    return Packed.of(column).lists() if column.is_nested else column.tolist()


def in_order(parts: Sequence[tuple[np.ndarray, Packed]], count: int) -> Packed:
    """Return one column of ``count`` rows from parts, each with the positions that its rows have in
    the whole."""
    order = np.argsort(np.concatenate([positions for positions, _ in parts]), kind="stable")
    values = torch.cat([part.values for _, part in parts])
    if parts[0][1].offsets is None:
        return Packed(values, None).select(order, count)
    sizes = np.concatenate([part.lengths().numpy() for _, part in parts])
    return Packed(values, offsets_of(sizes)).select(order, count)


def offsets_of(lengths: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Return the offsets int64 [B + 1] of rows of these ``lengths``."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return torch.from_numpy(out)


def indexes_of(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indexes starts[0], starts[0] + 1, … of each range in turn: ``lengths[i]`` of them
    from ``starts[i]``.

    >>> indexes_of(np.array([7, 2]), np.array([2, 3])).tolist()
    [7, 8, 2, 3, 4]
    """
    ends = np.cumsum(lengths)
    index = np.repeat(starts - (ends - lengths), lengths)
    index += np.arange(len(index))
    return index
