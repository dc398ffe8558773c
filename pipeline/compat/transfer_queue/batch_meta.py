"""The metadata of a batch of keys, as TransferQueue's users know it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Tag = dict[str, Any]


@dataclass
class KVBatchMeta:
    """The result of a put: keys with their tags, and the fields that all of these keys have now."""

    keys: list[str] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(
                f"keys and tags must have same length, but got {len(self.keys)} and "
                f"{len(self.tags)}"
            )
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("Got duplicated keys.")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise ValueError("Got duplicated fields.")
        self.tags, self.extra_info = copy.deepcopy(self.tags), copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return (
            f"KVBatchMeta(size={self.size}, field_names={self.fields}, "
            f"extra_info={self.extra_info})"
        )

    def _at(self, positions: Sequence[int]) -> KVBatchMeta:
        keys = [self.keys[i] for i in positions]
        tags = [self.tags[i] for i in positions]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """Return these keys alone, in this order."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError("Contain duplicate keys.")
        places = {key: i for i, key in enumerate(self.keys)}
        if missing := set(keys_to_select) - set(places):
            raise RuntimeError(f"Keys {missing} not found in current batch.")
        return self._at([places[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Put keys and tags into the order of ``indexes``, in place."""
        if len(indexes) != self.size:
            raise ValueError(
                f"indexes: {len(indexes)} of them do not match the batch size {self.size}"
            )
        if len(set(indexes)) != len(indexes):
            raise ValueError("Contain duplicate indexes.")
        ordered = self._at(indexes)
        self.keys = ordered.keys
        self.tags = ordered.tags

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Return ``chunks`` parts of neighbouring keys; their sizes differ by one at most."""
        return [self._at(part.tolist()) for part in np.array_split(np.arange(self.size), chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """Join batches of one partition with the same fields.

        Raises ValueError when their ``extra_info`` differ.
        """
        data = [part for part in data if part is not None and part.size]
        if not data:
            return cls()
        first = data[0]
        extra: dict[str, Any] = {}
        for part in data:
            if part.fields is not None and set(part.fields) != set(first.fields or ()):
                raise ValueError("Field names do not match for concatenation.")
            if part.partition_id != first.partition_id:
                raise ValueError("Partition do not match for concatenation.")
            for name, value in (part.extra_info or {}).items():
                if not _equal(extra.setdefault(name, value), value):
                    raise ValueError(
                        f"KVBatchMeta.concat: extra_info key '{name}' has conflicting values "
                        f"across chunks."
                    )
        keys = [key for part in data for key in part.keys]
        tags = [tag for part in data for tag in part.tags]
        return cls(keys, tags, first.partition_id, first.fields, extra or None)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
