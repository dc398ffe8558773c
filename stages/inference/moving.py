"""Scores by a reference that becomes the policy every k steps."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable

import torch
from tensordict import TensorDict

from pipeline.index.client import Claim
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Written
from stages.engines.protocols import TrainEngine
from stages.flow.declarations import StageDeclaration
from stages.inference.scores import scores
from stages.training.ranks import train_batch


class MovingReference(Stage):
    """Scores each row by the reference of its oldest token's version, rounded down to a multiple of
    ``every``. ``make`` builds the engine with that of a version; one is held at a time. Claims one
    group at a time, as :class:`stages.inference.scores.Reference` does."""

    name = "reference"

    def __init__(
        self, make: Callable[[int], TrainEngine], declared: StageDeclaration, every: int
    ) -> None:
        self._make = make
        self.declared = declared
        self.fetches = tuple(declared.needs)
        self.every = every
        self._version = -1  # of the reference that is held
        self._engine: TrainEngine | None = None

    def room(self, held: int) -> int:
        return 0 if held else 1

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        batch = train_batch(claim, rows)
        references = claim.oldest_version.astype(int) // self.every * self.every
        columns = defaultdict[str, dict[int, torch.Tensor]](dict)  # rows by position
        for version in sorted({*references.tolist()}):
            engine = await asyncio.to_thread(self._engine_of, version)
            positions = (references == version).nonzero()[0].tolist()
            chosen = _rows(batch, positions)
            for name, values in (
                await asyncio.to_thread(scores, engine, chosen, self.declared)
            ).items():
                columns[name] |= zip(positions, values.unbind(), strict=True)
        in_order = {
            name: torch.nested.nested_tensor(
                [of_rows[position] for position in range(len(claim))], layout=torch.jagged
            )
            for name, of_rows in columns.items()
        }
        yield Written(range(len(claim)), rows=in_order, tokens=int(claim.tokens.sum()))

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
