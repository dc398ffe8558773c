"""Reads the columns of claimed rows, from whichever warehouses they lie on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from tensordict import NonTensorStack, TensorDict

from pipeline.blocks import missing_column
from pipeline.columns import ColumnError, Packed, Schema, in_order
from pipeline.index.claims import Claim
from pipeline.warehouse.directory import OFFSET_BITS, WarehouseDirectory


class Reader:
    """Reads rows for one worker."""

    def __init__(self, schema: Schema, directory: WarehouseDirectory) -> None:
        self.schema, self.warehouses = schema, directory

    async def fetch(
        self, claim: Claim, columns: Sequence[str], *, ragged: Literal["jagged", "padded"] = "jagged", fill: float = 0
    ) -> TensorDict:
        """The claimed rows' ``columns``, batch size [B], in the claim's order; views of shared memory where they lie
        side by side on this node, valid while the lease is held. Ragged columns come as jagged nested tensors [B, j],
        or ``padded`` with ``fill``; text as strings. Raises StaleHandle for released rows."""
        found = await self.fetch_packed(claim, columns)
        out = {name: found[name].value(self.schema[name], len(claim), ragged, fill) for name in columns}
        texts = {name: NonTensorStack(*value) for name, value in out.items() if isinstance(value, list)}
        return TensorDict(out | texts, batch_size=[len(claim)])

    async def fetch_packed(self, claim: Claim, columns: Sequence[str]) -> dict[str, Packed]:
        """Like :meth:`fetch`, each column as one packed buffer with its offsets, as packed training takes it."""
        producers: dict[int, list[str]] = {}
        for name in columns:
            self.schema.bit(name)  # raises for a column that is not in the schema
            producers.setdefault(await self.warehouses.producer(name), []).append(name)
        out: dict[str, Packed] = {}
        for producer, names in producers.items():
            refs = claim.refs[producer]
            if len(refs) < len(claim):
                raise ColumnError(
                    f"column {names[0]!r}: stage {claim.stage!r} does not need what its maker makes, so it may come later "
                    "than the rows; declare it as needed"
                )
            if not refs["block"].all():
                raise missing_column(names[0], int((refs["block"] == 0).argmax()))
            out |= await self.gather(refs, names)
        return out

    async def gather(self, refs: np.ndarray, names: list[str]) -> dict[str, Packed]:
        """The columns ``names`` of the rows that lie where ``refs`` say (REF [B], B > 0), in that order."""
        numbers = (refs["place"] >> OFFSET_BITS).astype(np.int64)
        if len(numbers) == 1 or (numbers == numbers[0]).all():
            return await self.warehouses.read(int(numbers[0]), refs, names)
        parts = []
        for number in np.unique(numbers).tolist():
            positions = np.flatnonzero(numbers == number)
            parts.append((positions, await self.warehouses.read(number, refs[positions], names)))
        return {name: in_order([(positions, part[name]) for positions, part in parts], len(refs)) for name in names}
