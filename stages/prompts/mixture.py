"""Several sources of prompts as one: which source each group number takes its prompt from, by weights.

    weights 3 : 1 ──▶ blocks of 4 numbers, each shuffled by (seed, block) ──▶ (source, its number) of every number

Each block has every source as often as its weight says, so the shares are exact after each block, and a position in the
mixture is a position in each source: nothing has to be saved for a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stages.prompts.formatter import Prompt
    from stages.prompts.sources import PromptSource
    from stages.prompts.too_long import LongPrompts

LARGEST_BLOCK = 1000  # numbers; weights that would need a longer block are rounded to its parts


def places_of(weights: Sequence[float]) -> list[int]:
    """Return how many numbers of a block each source gets, at least one. Exact where :data:`LARGEST_BLOCK` allows it.

    >>> places_of([3, 1]), places_of([0.5, 0.25, 0.25]), sum(places_of([1, 2**0.5]))
    ([3, 1], [2, 1, 1], 1000)
    """
    shares = [Fraction(weight).limit_denominator(LARGEST_BLOCK) for weight in weights]
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    whole = [count // (math.gcd(*whole) or 1) for count in whole]
    if min(whole) and sum(whole) <= LARGEST_BLOCK:
        return whole
    # The largest remainders get what rounding down leaves.
    free = LARGEST_BLOCK - len(weights)
    exact = [free * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda index: counts[index] - exact[index])
    for index in order[: free - sum(counts)]:
        counts[index] += 1
    return [1 + count for count in counts]


class MixedPrompts:
    """A :class:`~stages.prompts.sources.PromptSource` that takes each number's prompt from one of ``sources``."""

    def __init__(
        self, sources: Sequence[PromptSource], weights: Sequence[float], seed: int, too_long: LongPrompts
    ) -> None:
        self.sources, self.too_long, self._places = list(sources), too_long, places_of(weights)
        block = np.repeat(np.arange(len(sources)), self._places)
        # Groups in flight span two blocks at most, unless a block is tiny.
        self._order = lru_cache(2)(lambda number: np.random.default_rng([seed, number, len(block)]).permutation(block))

    def prompt(self, seq: int) -> Prompt:
        block, place = divmod(seq, sum(self._places))
        order = self._order(block)
        source = int(order[place])
        before = int((order[:place] == source).sum())
        return self.sources[source].prompt(block * self._places[source] + before)

    def epochs(self, seq: int) -> dict[str, int]:
        block, place = divmod(seq, sum(self._places))
        here = np.bincount(self._order(block)[: place + 1], minlength=len(self.sources))
        made = [block * places + int(more) for places, more in zip(self._places, here, strict=True)]
        found: dict[str, int] = {}
        for source, count in zip(self.sources, made, strict=True):
            found |= source.epochs(count - 1) if count else {}
        return found
