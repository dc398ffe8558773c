"""What a step of a train engine's ranks sends, in bytes, by strategy: arithmetic on sizes, as the engine's calls are.

    all-gather of n shards     (n - 1) · shard             all-reduce       2 (n - 1) / n · tensor
    reduce-scatter             (n - 1) · shard             all-to-all       (n - 1) / n · tensor

Bytes are those that a rank sends when each call is a ring. Sums of metrics and of the gradient's norm are left out: they do
not grow with the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.engines.strategies import Ranks
from stages.engines.torch.sharded import placement
from stages.resharding.layout import ModelState


@dataclass(frozen=True)
class Step:
    """A step of one replica: ``tokens`` that each of its micro-batches feeds, in a model of ``width`` numbers a token;
    ``item`` bytes of a number that is computed with and ``reduced`` bytes of a number of a gradient that is summed."""

    tokens: tuple[int, ...]
    width: int
    item: int = 4
    reduced: int = 4


def sent(model: ModelState, ranks: Ranks, step: Step) -> dict[str, float]:
    """Bytes that rank 0 sends in ``step``, by strategy; strategies of one rank are left out."""
    passes, layers = len(step.tokens), [t for t in model.tensors if model.by_name[t.parts[0]].layer is not None]
    within = {tensor.name for tensor in layers}
    numbers = {True: 0, False: 0}  # of a shard, in layers and outside of them
    for tensor in placement(model, ranks).ranks[0]:
        numbers[tensor.name in within] += tensor.nbytes // tensor.dtype.itemsize
    shards = ranks.dp // ranks.dp_replicate * ranks.cp
    found = {
        "dp": passes * (shards - 1) * numbers[True] * (2 * step.item + step.reduced)
        + passes * (shards * ranks.tp - 1) * numbers[False] * (step.item + step.reduced),
        "dp_replicate": passes * _all_reduce(ranks.dp_replicate, sum(numbers.values()) * step.reduced),
        "tp": 4 * model.layers * _all_reduce(ranks.tp, sum(step.tokens) * step.width * step.item),
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _all_reduce(ranks: int, nbytes: float) -> float:
    return 2 * (ranks - 1) / ranks * nbytes
