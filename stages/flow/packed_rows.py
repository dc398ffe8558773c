"""Rows of some columns as the bytes of one block (:mod:`pipeline.data.blocks`), between a worker and the
process of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pipeline.data.arena import StaleHandle
from pipeline.data.blocks import BlockError, BlockReader, pack
from pipeline.data.columns import Column, ColumnError, Packed, Schema

BLOCK = 1  # the id of the one block


class BadRows(ValueError):
    """Bytes that are not the rows that they should be. ``str``: what is wrong with them."""


def packed_rows(schema: Schema, columns: Mapping[str, Any]) -> bytearray:
    """Return the bytes of ``columns``, all of the ``schema``'s. Raises ColumnError."""
    rows = pack(schema, columns)
    data = bytearray(rows.nbytes)
    rows.write_into(memoryview(data), BLOCK)
    return data


def unpacked_rows(schema: Schema, data: bytearray, rows: int) -> dict[str, Any]:
    """Return the columns of ``rows`` rows in ``data``, which may come from anyone: of the types of
    ``schema``, on the memory of ``data``. A tensor [B, …] of a column with one value in each row, a
    list of B tensors of a ragged one, a list of B strings of a text. Raises BadRows."""
    if len(data) < 64:
        raise BadRows(f"{len(data)} bytes are no rows")
    reader = BlockReader(memoryview(data), schema)
    blocks = np.full(rows, BLOCK)
    offsets = np.zeros(rows, np.int64)
    try:
        if int(reader.words[2]) != rows:
            raise BadRows(f"{reader.words[2]} rows came for {rows}")
        packed = reader.read(
            blocks, offsets, np.arange(rows), [column.name for column in schema.columns]
        )
        return {column.name: _plain(column, packed[column.name], rows) for column in schema.columns}
    except (BlockError, StaleHandle, ColumnError, UnicodeDecodeError) as error:
        raise BadRows(str(error)) from None


def _plain(column: Column, packed: Packed, rows: int) -> Any:
    if packed.values.dtype == torch.bool and bool((packed.values.view(torch.uint8) > 1).any()):
        raise BadRows(f"column {column.name!r} has bytes that are neither true nor false")
    value = packed.value(column, rows, "packed")
    return value.rows() if isinstance(value, Packed) else value
