"""Lengths of responses that no run has measured, for simulations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class LognormalLengths:
    """Log-normal lengths, 1 to ``longest`` tokens; the same for the same seed. A share
    ``stragglers`` is ``times`` as long."""

    CHUNK = 4096  # groups that are drawn at once

    def __init__(
        self,
        group_size: int,
        longest: int,
        *,
        median: float,
        sigma: float,
        seed: int = 0,
        stragglers: float = 0.0,
        times: float = 1.0,
    ) -> None:
        self.group_size = group_size
        self.longest = longest
        self.seed = seed
        self._median = median
        self._sigma = sigma
        self._stragglers = stragglers
        self._times = times
        self._chunks: dict[int, list[list[int]]] = {}

    def __call__(self, group: int) -> Sequence[int]:
        chunk, at = divmod(group, self.CHUNK)
        if chunk not in self._chunks:
            self._chunks[chunk] = self._draw(chunk)
        return self._chunks[chunk][at]

    def _draw(self, chunk: int) -> list[list[int]]:
        random = np.random.default_rng([self.seed, chunk])
        shape = (self.CHUNK, self.group_size)
        drawn = self._median * random.lognormal(0.0, self._sigma, shape)
        if self._stragglers:
            drawn = np.where(random.random(shape) < self._stragglers, drawn * self._times, drawn)
        lengths: list[list[int]] = np.clip(drawn.round(), 1, self.longest).astype(int).tolist()
        return lengths
