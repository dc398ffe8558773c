"""The records of a run's published versions, in its index.

    publish: the table of tensors, the first time ─▶ document `weight-tensors` ◀─ read: the first time
             checksums, probe, source, each time  ─▶ the version's record      ◀─ read: each time

All versions of a run have the same names, shapes and offsets: 80 bytes for each tensor, which do
not travel again with each version to each engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.index.client import Index
from stages.weights.documents import WEIGHT_TENSORS
from stages.weights.published import Published, WeightsDamaged, checksum

_HELD = 2  # tables, as the index holds the records of two versions


class WeightRecords:
    """Writes and reads the records of published versions in ``index``."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._tables: dict[str, list[Any]] = {}  # by checksum, the newest last

    async def publish(self, published: Published) -> None:
        """Record a version; this opens the gate further and wakes generation."""
        record = published.record()
        tensors = [list(tensor.values()) for tensor in record.pop("tensors")]
        text = json.dumps(tensors).encode()
        table = checksum(np.frombuffer(text, np.uint8))
        if table not in self._tables:
            held = list((await WEIGHT_TENSORS.get(self._index) or {}).items())
            self._tables = dict([*held[1 - _HELD :], (table, tensors)])
            await WEIGHT_TENSORS.put(self._index, self._tables)
        await self._index.publish_weights(published.version, record | {"table": table})

    async def read(self, record: Mapping[str, Any]) -> Published:
        """Returns the version of a ``record``. Raises WeightsDamaged where its table was replaced
        meanwhile."""
        if "table" not in record:  # of a run that an earlier release began
            return Published.from_record(record)
        table = record["table"]
        if table not in self._tables:
            self._tables = await WEIGHT_TENSORS.get(self._index) or {}
        if table not in self._tables:
            raise WeightsDamaged(
                f"weights of version {record['version']}: their table of tensors is held no more; "
                f"take the newest"
            )
        fields = ("name", "dtype", "shape", "offset", "nbytes")
        tensors = [dict(zip(fields, tensor, strict=True)) for tensor in self._tables[table]]
        return Published.from_record({**record, "tensors": tensors})
