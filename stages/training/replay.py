"""Replay: groups of earlier steps that are trained again beside those of a step.

    steps v-k … v-1, whose rows are still in the warehouses ─▶ draw, by seed and version ─▶ the train batch of version v

The groups drawn are recorded with the step, so a restarted trainer replays it with the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.index.client import Claim, Index


@dataclass(frozen=True)
class Replay:
    """Draws ``most`` groups a step, uniformly and without repetition, or all where there are no more;
    of the run in ``index``, whose config says how many steps back. ``seed`` is the run's."""

    index: Index
    most: int
    seed: int

    async def draw(self, version: int) -> Claim | None:
        """Return the rows to train again in the step at ``version``, which depend on nothing but the
        seed, the version and the groups of earlier steps; None where there are none.

        Raises StaleHandle where they were lost meanwhile.
        """
        groups = await self.index.replayable()
        if not groups:
            return None
        random = np.random.default_rng([self.seed, version])
        drawn = random.choice(groups, min(self.most, len(groups)), replace=False)
        return await self.index.trained_rows(sorted(drawn.tolist()))

    def figures(self, staleness: Sequence[int]) -> dict[str, float]:
        """Return the metrics of a step's replayed rows, whose ``staleness`` is apart from that of its
        own."""
        return {
            "replayed_rows": len(staleness),
            "replayed_staleness_mean": sum(staleness) / len(staleness),
            "replayed_staleness_max": max(staleness),
        }
