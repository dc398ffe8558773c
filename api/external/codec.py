"""Experience as it travels: rows of columns as JSON, or as one safetensors body.

    JSON           {"token": …, "rows": […], …, "columns": {"response_ids": [[5, 6], [7]], "reward": [0.5, 1.0]}}
    safetensors    header: __metadata__ {"asyncdock": the same JSON without its columns}
                   response_ids int64 [3], response_ids.offsets int64 [3]; reward float32 [2]; text as uint8 with offsets

Ragged columns are packed: values flat, one row after the other, and offsets [B + 1] that say where each begins. In JSON a
value that is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from api.external.schemas import ExperienceRow
from orchestration.external.session import Experience
from pipeline.columns import Column, Packed, Schema
from stages.external_checks import Misfit

CONTROL = "asyncdock"  # the key of the header's metadata that holds what is no column
OFFSETS = ".offsets"
LONGEST_HEADER = 2 * 2**20


class Unreadable(ValueError):
    """A body that is no safetensors file, or not one of ours. The message says why."""


def rows_of(experience: Experience) -> list[ExperienceRow]:
    """What is told of each row of a claim."""
    return [
        ExperienceRow(
            id=row.row,
            group=row.group,
            place=row.place,
            samples=row.samples,
            oldest_version=row.oldest_version,
            tokens=row.tokens,
            seed=seed,
        )
        for row, seed in zip(experience.claim.rows, experience.seeds, strict=True)
    ]


def to_body(control: str, columns: Mapping[str, Packed | torch.Tensor]) -> bytes:
    """One safetensors body of ``control``, which is what is no column, and the columns."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in columns.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value.clone()  # tensors of one memory are refused, and these may be views of an arena
            continue
        tensors[name] = value.values.clone()
        if value.offsets is not None:
            tensors[name + OFFSETS] = value.offsets.clone()
    return save(tensors, {CONTROL: control})


def from_body(body: bytes) -> tuple[str, dict[str, Any]]:
    """What is no column, as JSON, and the columns: ragged ones as Packed. Raises Unreadable."""
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > min(LONGEST_HEADER, len(body) - 8):
        raise Unreadable("it does not begin with a safetensors header")
    try:
        told = json.loads(body[8 : 8 + length])
        control = told.get("__metadata__", {}).get(CONTROL)
        tensors = load(body)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"it is no safetensors file ({type(error).__name__}: {error})") from None
    if not isinstance(control, str):
        raise Unreadable(f"its header's __metadata__ has no {CONTROL!r}")
    return control, joined(tensors)


def joined(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Columns of tensors: those that have offsets as Packed. Raises Unreadable."""
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith(OFFSETS):
            if name.removesuffix(OFFSETS) not in tensors:
                raise Unreadable(f"{name!r} are offsets of a column that is not there")
        else:
            offsets = tensors.get(name + OFFSETS)
            out[name] = tensor if offsets is None else Packed(tensor, offsets)
    return out


def to_lists(schema: Schema, columns: Mapping[str, Packed]) -> dict[str, list[Any]]:
    """Columns as JSON has them."""
    return {name: _lists(schema[name], packed) for name, packed in columns.items()}


def _lists(column: Column, packed: Packed) -> list[Any]:
    if column.dtype == "utf8":
        return list(packed.texts())
    values = _finite(packed.values.tolist())
    if packed.offsets is not None:
        return [values[a:b] for a, b in pairwise(packed.offsets.tolist())]
    each = math.prod(column.shape or ())
    return values if not column.shape else [values[i : i + each] for i in range(0, len(values), each)]


def _finite(values: list[Any]) -> list[Any]:
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]


def from_lists(schema: Schema, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that came as JSON: ragged ones as Packed. Raises Misfit and ColumnError."""
    out: dict[str, Any] = {}
    for name, rows in columns.items():
        column = schema[name]
        if column.dtype == "utf8":
            raise Misfit(name, "is text, which no external stage makes", "leave it out")
        if not isinstance(rows, list):
            raise Misfit(name, "is no list", "give a list with one entry for each row")
        if column.shape is not None:
            out[name] = _tensor(column, rows, (len(rows), *column.shape))
            continue
        for at, row in enumerate(rows):
            if not isinstance(row, list):
                raise Misfit(name, f"row {at} is no list", f"it is {column.describe()}: give a list for each row")
        flat = [value for row in rows for value in row]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        out[name] = Packed(_tensor(column, flat, (len(flat),)), torch.from_numpy(offsets))
    return out


def _tensor(column: Column, values: list[Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Values of JSON in the column's dtype, when each is of its kind and none is changed by it beyond rounding."""
    assert isinstance(column.dtype, torch.dtype)
    floating, fix = column.dtype.is_floating_point, f"it is {column.describe()}"
    flat = values
    for _ in shape[1:]:
        if not all(isinstance(value, list) for value in flat):
            raise Misfit(column.name, f"is not of shape {list(shape)}", fix)
        flat = [value for inner in flat for value in inner]
    if len(flat) != math.prod(shape):
        raise Misfit(column.name, f"is not of shape {list(shape)}", fix)
    kinds: tuple[type, ...] = (bool,) if column.dtype is torch.bool else (int, float) if floating else (int,)
    for at, value in enumerate(flat):
        right = isinstance(value, kinds) and (isinstance(value, bool) == (column.dtype is torch.bool))
        if not right and not (value is None and floating):
            raise Misfit(column.name, f"value {at} is {value!r:.40}", f"{fix}: give numbers of that kind")
    try:
        made = torch.tensor([math.nan if value is None else value for value in flat], dtype=column.dtype)
    except (RuntimeError, OverflowError, ValueError):
        raise Misfit(column.name, "has a number that its dtype does not hold", fix) from None
    if floating and bool(made.isinf().any()):
        raise Misfit(column.name, "has a number that its dtype does not hold", fix)
    return made.view(shape)
