"""Experience as it is sent: one safetensors body.

    header   __metadata__ {"asyncdock": "{\\"token\\": …, \\"rows\\": […], …}"}, then the tensors' dtypes, shapes and offsets
    payload  response_ids int64 [3], response_ids.offsets int64 [3]; reward float32 [2]; text as uint8 with offsets

Ragged columns are packed: the values of all rows in one tensor, and int64 offsets [B + 1] at which
the rows begin. The columns of parked rows are called ``begun.NAME``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from orchestration.external.experience import Experience, ExperienceRow
from pipeline.data.columns import Packed, Schema

CONTROL = "asyncdock"  # key of the header's metadata that holds the JSON beside the columns
OFFSETS = ".offsets"
BEGUN = "begun."
FIELDS = ("stage", "token", "lease", "state", "reason", "published", "trained", "sampling")
LONGEST_HEADER = 2 * 2**20


class Unreadable(ValueError):
    """A body is not a safetensors file with experience in it; the message says why."""


def encode_experience(schema: Schema, experience: Experience) -> bytes:
    """Return the body of ``experience``."""
    ids, progress = experience.begun
    control = {name: getattr(experience, name) for name in FIELDS} | {
        "over": experience.over,
        "rows": [asdict(row) for row in experience.rows],
        "begun": {"rows": list(ids)} if ids else None,
    }
    columns: dict[str, Packed | torch.Tensor] = {
        BEGUN + name: packed for name, packed in progress.items()
    }
    for name, packed in experience.columns.items():
        shape = (len(experience.rows), *(schema[name].shape or ()))
        columns[name] = packed if packed.offsets is not None else packed.values.reshape(shape)
    return to_body(json.dumps(control), columns)


def decode_experience(body: bytes) -> Experience:
    """Return the experience in ``body``. Raises Unreadable."""
    text, tensors = from_body(body)
    columns = {
        name: tensor if isinstance(tensor, Packed) else Packed(tensor.reshape(-1), None)
        for name, tensor in tensors.items()
    }
    progress = {
        name.removeprefix(BEGUN): columns.pop(name)
        for name in list(columns)
        if name.startswith(BEGUN)
    }
    try:
        control = json.loads(text)
        rows = [ExperienceRow(**row) for row in control["rows"]]
        begun = (control["begun"] or {"rows": []})["rows"]
        return Experience(
            **{name: control[name] for name in FIELDS},
            rows=rows,
            columns=columns,
            begun=(begun, progress),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(
            f"its metadata is not that of experience ({type(error).__name__}: {error})"
        ) from None


def to_body(control: str, columns: Mapping[str, Packed | torch.Tensor]) -> bytes:
    """Return one safetensors body of the JSON text ``control`` and the columns."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in columns.items():
        if isinstance(value, Packed) and value.offsets is not None:
            tensors[name + OFFSETS] = value.offsets
        tensors[name] = value.values if isinstance(value, Packed) else value
    # save() refuses tensors that share memory, and these may be views of an arena.
    return save({name: tensor.clone() for name, tensor in tensors.items()}, {CONTROL: control})


def from_body(body: bytes) -> tuple[str, dict[str, Packed | torch.Tensor]]:
    """Return the JSON text and the columns of ``body``; ragged columns as Packed.

    Raises Unreadable.
    """
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > min(LONGEST_HEADER, len(body) - 8):
        raise Unreadable("it does not begin with a safetensors header")
    try:
        header = json.loads(body[8 : 8 + length])
        control = header.get("__metadata__", {}).get(CONTROL)
        tensors = load(body)
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise Unreadable(
            f"it is not a safetensors file ({type(error).__name__}: {error})"
        ) from None
    if not isinstance(control, str):
        raise Unreadable(f"its header's __metadata__ has no {CONTROL!r}")
    columns: dict[str, Packed | torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(OFFSETS):
            offsets = tensors.get(name + OFFSETS)
            columns[name] = tensor if offsets is None else Packed(tensor, offsets)
        elif name.removesuffix(OFFSETS) not in tensors:
            raise Unreadable(f"{name!r} are offsets of a column that is missing")
    return control, columns
