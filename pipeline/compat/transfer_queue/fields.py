"""Fields of TransferQueue's interface: tensors and JSON values as bytes, and the kinds that a
partition's fields have.

The index keeps the kinds for each partition, because fields become known one by one; the columns of
a run, on which its nodes agree, stay as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from pipeline.compat.transfer_queue.batch_meta import Tag
from pipeline.data.columns import ColumnError, Packed, jagged_parts, offsets_of
from pipeline.index.errors import IndexRefused

MAX_FIELDS = 63  # of a partition: the index keeps a key's fields as bits of two 32-bit words
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True)
class Field:
    """The kind of a field's values: ``dtype`` (None: JSON), and the shape of a row after its first
    dimension, in which rows may differ (None: rows are scalars)."""

    name: str
    dtype: torch.dtype | None
    inner: tuple[int, ...] | None

    @property
    def kind(self) -> str:
        if self.dtype is None:
            return "json"
        shape = "" if self.inner is None else " " + ",".join(["*", *map(str, self.inner)])
        return str(self.dtype).removeprefix("torch.") + shape

    @classmethod
    def parse(cls, name: str, kind: str) -> Field:
        dtype, _, shape = kind.partition(" ")
        inner = tuple(int(size) for size in shape.split(",")[1:]) if shape else None
        return cls(name, None if dtype == "json" else _DTYPES[dtype], inner)

    @property
    def nbytes(self) -> int:
        """Bytes of one step along a row's first dimension; of the row, when it is a scalar."""
        return 1 if self.dtype is None else self.dtype.itemsize * math.prod(self.inner or ())


@dataclass(frozen=True)
class Fields:
    """The fields of a partition in the order in which they were first put; a field's bit is its
    position. ``packed`` is their form in the index: a line of JSON for each."""

    packed: str = ""

    @cached_property
    def by_name(self) -> dict[str, tuple[int, Field]]:
        lines = enumerate(map(json.loads, self.packed.splitlines()))
        return {name: (bit, Field.parse(name, kind)) for bit, (name, kind) in lines}

    def names(self, mask: int) -> list[str]:
        return [name for name, (bit, _) in self.by_name.items() if mask >> bit & 1]

    def joined(
        self, encoded: Sequence[tuple[Field, Packed]], partition: str
    ) -> tuple[Fields, dict[int, Packed]]:
        """Return these fields and those of ``encoded`` that are new, and its values by bit.

        Raises ColumnError for values that are not of their field's kind, and cannot become so
        without a change.
        """
        new = [field for field, _ in encoded if field.name not in self.by_name]
        if len(self.by_name) + len(new) > MAX_FIELDS:
            name = new[MAX_FIELDS - len(self.by_name)].name
            raise IndexRefused(
                f"field {name} is one too many: a partition has at most {MAX_FIELDS}; join some of "
                f"them, or put them into "
                "another partition"
            )
        fields = self
        if new:
            fields = Fields(
                self.packed + "".join(json.dumps([field.name, field.kind]) + "\n" for field in new)
            )
        values = {}
        for field, value in encoded:
            bit, known = fields.by_name[field.name]
            values[bit] = value if known == field else _converted(value, field, known, partition)
        return fields, values


def _converted(packed: Packed, found: Field, known: Field, partition: str) -> Packed:
    """Return ``packed`` in the dtype of its field, where no value changes by that.

    Raises ColumnError otherwise.
    """
    change = ""
    if found.dtype is not None and known.dtype is not None and found.inner == known.inner:
        values = packed.values.view(found.dtype)
        if values.is_complex() == known.dtype.is_complex:
            out = values.to(known.dtype)
            back = out.to(found.dtype).view(torch.uint8)
            if torch.equal(back, packed.values):
                assert packed.offsets is not None
                return Packed(out.view(torch.uint8), packed.offsets // found.nbytes * known.nbytes)
            at = int((back != packed.values).nonzero()[0, 0]) // found.dtype.itemsize
            change = f": {values[at].item()} would become {out[at].item()}"
    raise field_error(
        found.name,
        f"takes {known.kind}, got {found.kind}",
        f"convert it first, or name another field (partition {partition!r} keeps {known.kind} "
        f"until its last key is cleared{change})",
    )


def field_error(name: str, wrong: str, fix: str) -> ColumnError:
    return ColumnError(name, wrong, fix, subject=f"field {name!r}")


def encode_field(name: str, value: Any, rows: int) -> tuple[Field, Packed]:
    """Return the kind of ``value``, and its ``rows`` rows as bytes."""
    value = as_tensor(name, value)
    if not isinstance(value, torch.Tensor):
        texts = [to_json(f"field {name!r}", item).encode() for item in as_list(name, value)]
        _check_rows(name, len(texts), rows)
        values = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        return Field(name, None, None), Packed(values, offsets_of([len(text) for text in texts]))
    parts = jagged_parts(value)
    if parts is not None and parts[2] is None and int(parts[1][0]) == 0:
        flat = parts[0]
        steps = parts[1].to("cpu", torch.int64)
        field = Field(name, value.dtype, tuple(flat.shape[1:]))
    elif value.is_nested:
        unbound = value.unbind()
        shapes = {tuple(part.shape[1:]) for part in unbound}
        if len(shapes) != 1 or unbound[0].dim() == 0:
            raise field_error(
                name,
                f"rows differ beyond their first dimension ({shapes})",
                "pad or flatten them",
            )
        flat = torch.cat(unbound)
        steps = offsets_of([len(part) for part in unbound])
        field = Field(name, value.dtype, shapes.pop())
    else:
        flat = value
        length = value.shape[1] if value.dim() > 1 else 1
        steps = torch.arange((value.shape[0] if value.dim() else 0) + 1) * length
        field = Field(name, value.dtype, tuple(value.shape[2:]) if value.dim() > 1 else None)
    _check_rows(name, len(steps) - 1, rows)
    if field.nbytes == 0:
        raise field_error(
            name,
            f"rows of shape {list(value.shape[1:])} hold nothing",
            "leave the field out",
        )
    flat = flat.detach().cpu().reshape(-1).contiguous()
    return field, Packed(flat.view(torch.uint8), steps * field.nbytes)


def as_tensor(name: str, value: Any) -> Any:
    """Return ``value`` as a tensor, when it is an array of numbers or a list of tensors or arrays;
    anything else as it is."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufc":
            raise TypeError(
                f"field {name!r}: an array of {value.dtype} cannot be stored; give value.tolist()"
            )
        native = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])
        try:
            return torch.from_numpy(native)
        except TypeError as error:
            raise TypeError(f"field {name!r}: {error}; convert it first") from None
    if isinstance(value, torch.Tensor):
        return value
    items = value.tolist() if isinstance(value, NonTensorStack) else value
    if not isinstance(items, list) or not items or not all(map(_is_numbers, items)):
        return value
    tensors = [as_tensor(name, item) for item in items]
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise field_error(
            name,
            f"rows of {sorted({str(t.dtype) for t in tensors})}",
            "convert them to one dtype",
        )
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    try:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    except RuntimeError:
        shapes = sorted({tuple(tensor.shape[1:]) for tensor in tensors})
        raise field_error(
            name,
            f"rows differ beyond their first dimension ({shapes})",
            "pad or flatten them",
        ) from None


def _is_numbers(item: Any) -> bool:
    return isinstance(item, torch.Tensor | np.ndarray) or (
        isinstance(item, np.generic) and item.dtype.kind in "biufc"
    )


def as_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, NonTensorStack | NonTensorData):
        items = value.tolist()
        return items if isinstance(items, list) else [items]
    if isinstance(value, list | tuple):
        return list(value)
    raise TypeError(
        f"field {name!r}: a {type(value).__name__} cannot be stored; give a tensor, or a list of "
        f"JSON values"
    )


def _check_rows(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(
            f"field {name!r} has {found} rows for {rows} keys; give one row for each key"
        )


def to_json(what: str, value: Any) -> str:
    """Return ``value`` as JSON. Raises TypeError for what does not come back as it was: nothing is
    pickled, and nothing changes its type, except that numpy's scalars become Python's."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        same = _same(json.loads(text), value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what}: {value!r:.80} cannot be stored ({error}); make it a tensor or a JSON value"
        ) from None
    if not same:
        raise TypeError(
            f"{what}: {value!r:.80} would come back as {json.loads(text)!r:.80}; give lists and "
            f"string keys"
        )
    return text


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(map(_same, one, other))
    return bool(one == other)


def decode_field(found: Field, packed: Packed) -> Any:
    """Return a tensor [B] of scalars, a jagged nested tensor [B, j, …], or a stack of JSON
    values."""
    if found.dtype is None:
        return NonTensorStack(*map(json.loads, packed.texts()))
    values = packed.values.view(found.dtype)
    if found.inner is None:
        return values
    assert packed.offsets is not None
    return torch.nested.nested_tensor_from_jagged(
        values.view(-1, *found.inner), packed.offsets // found.nbytes
    )


def encode_tags(tags: Tag) -> dict[str, str]:
    if not isinstance(tags, Mapping) or not all(isinstance(tag, str) for tag in tags):
        raise TypeError(f"tags: {tags!r:.80} is not a dict with string keys; give one for each key")
    return {tag: to_json(f"tag {tag!r}", value) for tag, value in tags.items()}


def decode_tags(tags: Mapping[Any, Any]) -> Tag:
    """Return the tags from their stored form."""
    return {
        tag.decode() if isinstance(tag, bytes) else tag: json.loads(value)
        for tag, value in tags.items()
    }
