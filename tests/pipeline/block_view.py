"""A second, plain reader of one block, to compare the product's reader with."""

from __future__ import annotations

import struct

import numpy as np
import torch

from pipeline.data.blocks import MAGIC
from pipeline.data.columns import Packed, Schema


class BlockView:
    """The columns of the block ``block_id`` in ``memory``, row by row; nothing is checked but its
    id."""

    def __init__(self, schema: Schema, memory: memoryview, block_id: int) -> None:
        magic, found, self.rows, columns = struct.unpack_from("4q", memory)
        assert (magic, found) == (MAGIC, block_id)
        self._schema = schema
        self._memory = memory
        table = struct.unpack_from(f"{4 * columns}q", memory, 32)
        self._places = {table[i]: table[i + 1 : i + 4] for i in range(0, 4 * columns, 4)}

    def row(self, name: str, slot: int) -> torch.Tensor:
        """The flat values of one row."""
        column = self._schema[name]
        offsets_at, values_at, nbytes = self._places[self._schema.bit(name)]
        if column.shape is None:
            offsets = np.frombuffer(self._memory, np.int64, self.rows + 1, offsets_at)
            first = int(offsets[slot]) * column.itemsize
            last = int(offsets[slot + 1]) * column.itemsize
        else:
            first = slot * nbytes // self.rows
            last = (slot + 1) * nbytes // self.rows
        data = bytes(self._memory[values_at + first : values_at + last])
        return (
            torch.frombuffer(bytearray(data), dtype=column.stored)
            if data
            else torch.empty(0, dtype=column.stored)
        )

    def column(self, name: str) -> Packed:
        """All rows of a column, a copy."""
        rows = [self.row(name, slot) for slot in range(self.rows)]
        offsets = (
            torch.tensor([0, *map(len, rows)]).cumsum(0)
            if self._schema[name].shape is None
            else None
        )
        return Packed(torch.cat(rows), offsets)
