"""Logprobs under a reference that becomes the policy every k steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import torch
from tensordict import TensorDict

from pipeline.data.columns import Schema
from pipeline.index.client import Claim
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Written
from stages.engines.protocols import TrainEngine
from stages.flow.catalogue import scored_columns
from stages.training.ranks import train_batch


class MovingReference(Stage):
    """Scores each row by the reference of its oldest token's version, rounded down to a multiple of
    ``every``. ``make`` builds the engine with that of a version; one is held at a time. Claims one
    group at a time, as :class:`stages.inference.scores.Reference` does."""

    name = "reference"

    def __init__(self, make: Callable[[int], TrainEngine], schema: Schema, every: int) -> None:
        self._make = make
        self.fetches = scored_columns(schema)
        self.every = every
        self._version = -1  # of the reference that is held
        self._engine: TrainEngine | None = None

    def room(self, held: int) -> int:
        return 0 if held else 1

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        batch = train_batch(claim, rows)
        references = claim.oldest_version.astype(int) // self.every * self.every
        logprobs: dict[int, torch.Tensor] = {}
        for version in sorted({*references.tolist()}):
            engine = await asyncio.to_thread(self._engine_of, version)
            positions = (references == version).nonzero()[0].tolist()
            scored = await asyncio.to_thread(engine.logprobs, _rows(batch, positions))
            logprobs |= zip(positions, scored.unbind(), strict=True)
        in_order = [logprobs[position] for position in range(len(claim))]
        column = torch.nested.nested_tensor(in_order, layout=torch.jagged)
        yield Written(
            range(len(claim)), rows={"ref_logprobs": column}, tokens=int(claim.tokens.sum())
        )

    def _engine_of(self, version: int) -> TrainEngine:
        """Return the engine with the reference of ``version``; the other one is closed first."""
        if self._engine is None or version != self._version:
            self.close()
            self._engine = self._make(version)
            self._version = version
        return self._engine

    def close(self) -> None:
        """Release the engine. May be called again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _rows(batch: TensorDict, positions: list[int]) -> TensorDict:
    """Return the rows at ``positions`` of ``batch``, whose columns may be jagged."""
    columns = {}
    for name in batch.keys():  # noqa: SIM118
        values = batch[name].unbind()
        chosen = [values[position] for position in positions]
        is_ragged = batch[name].is_nested
        columns[name] = (
            torch.nested.nested_tensor(chosen, layout=torch.jagged)
            if is_ragged
            else torch.stack(chosen)
        )
    return TensorDict(columns, batch_size=[len(positions)])
