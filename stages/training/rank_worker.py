"""What a rank other than 0 does: it carries out rank 0's orders (:mod:`stages.training.ranks`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from pipeline.index.client import Claim
from pipeline.warehouse.dock import Dock
from stages.algorithms.batch import trained_columns
from stages.algorithms.named import AlgorithmLike
from stages.engines.device_lease import DeviceLease
from stages.engines.protocols import TrainEngine, UndoableEngine
from stages.flow.catalogue import TOKEN_STALENESS
from stages.training.ranks import RankGroup
from stages.weights.published import Published
from stages.weights.transport.roles import Publisher
from stages.weights.verification.probe import probed


class RankWorker:
    """Carries out rank 0's orders on another rank, until the order to end.

    ``trained`` counts the steps in the engine's weights; ``save`` begins to write the engine's
    shard into a folder; ``publisher`` publishes this rank's part of them.
    """

    def __init__(
        self,
        dock: Dock,
        engine: TrainEngine,
        algorithm: AlgorithmLike,
        rank_group: RankGroup,
        *,
        version: int,
        save: Callable[[Path], Awaitable[Any]],
        device: DeviceLease | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        self.dock = dock
        self.engine = engine
        self.algorithm = algorithm
        self.rank_group = rank_group
        self.publisher = publisher
        self.trained = version
        self._save = save
        self.device = device or DeviceLease()

    async def run(self) -> None:
        while (order := await self.rank_group.receive())["do"] != "end":
            await self.do(order)

    async def do(self, order: Mapping[str, Any]) -> None:
        """Carry out one order of rank 0."""
        match order["do"]:
            case "train":
                async with self.device.training():
                    claim = Claim("", order["claim"]["token"], order["claim"])
                    columns = trained_columns(self.algorithm, self.dock.schema)
                    by_token = TOKEN_STALENESS in self.algorithm.loss_reads
                    batch = await self.rank_group.fetch(
                        self.dock, claim, order["shares"], columns, self.trained, by_token=by_token
                    )
                    # of all ranks: rank 0 records that the batch was skipped
                    with suppress(FloatingPointError):
                        await asyncio.to_thread(self.engine.train_batch, batch, self.algorithm)
                    self.trained += 1
            case "undo":
                async with self.device.training():
                    await asyncio.to_thread(cast("UndoableEngine", self.engine).undo)
            case "publish":
                part = await asyncio.to_thread(self._publish, order["probe"], order["version"])
                if part is not None:
                    await self.rank_group.send_part(part)
            case "export":
                folder = Path(order["folder"])
                await asyncio.to_thread(self.engine.save_pretrained, folder)
            case "save":
                async with self.device.training():
                    await self._save(Path(order["folder"]))
            case _:
                await self.device.follow(order)

    def _publish(self, probe: Sequence[list[int]], version: int | None) -> Published | None:
        """Take part in the calls that rank 0 makes of all ranks.

        Returns what this rank has published of ``version``.
        """
        if probe:
            probed(self.engine, probe)
        if self.publisher is None or version is None:
            return None
        own = self.rank_group.coordinates
        return self.publisher.publish(version, self.engine.weights(), None, (own.rank, own.world))
