"""What a step of a train engine's ranks sends, in bytes, by strategy: arithmetic on sizes, as the engine's calls are.

    all-gather of n shards     (n - 1) · shard             all-reduce       2 (n - 1) / n · tensor
    reduce-scatter             (n - 1) · shard             all-to-all       (n - 1) / n · tensor

Bytes are those that a rank sends when each call is a ring. Sums of metrics and of the gradient's norm are left out: they do
not grow with the model. So are sums of the gradients of norms and routers over tp, once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from stages.engines.torch.sharded import placement
from stages.parallel.options import ContextParallel, Ranks
from stages.parallel.placement import Layout, ModelState
from stages.parallel.schedules import filled, holder


@dataclass(frozen=True)
class Step:
    """A step of one replica: ``tokens`` that each of its micro-batches feeds, in a model of ``width`` numbers a token, of
    which each goes to ``chosen`` experts; ``prompts`` of all the tokens are those of prompts; ``head`` numbers of a head of
    attention; ``item`` bytes of a number that is computed with and ``reduced`` bytes of a number of a gradient that is
    summed."""

    tokens: tuple[int, ...]
    width: int
    chosen: int = 0
    prompts: int = 0
    head: int = 0
    item: int = 4
    reduced: int = 4


def sent(model: ModelState, ranks: Ranks, step: Step, method: ContextParallel = "ulysses") -> dict[str, float]:
    """Bytes that a rank sends in ``step``, by strategy, with tokens that are spread evenly over experts; strategies of one
    rank are left out. Of tied embeddings the sum over pipeline stages is left out, too."""
    passes = filled(ranks.pp, ranks.vpp, len(step.tokens), ranks.pipeline)
    tokens, kinds = sum(step.tokens) / ranks.cp, _kinds(model)
    layer_of = {tensor.name: model.by_name[tensor.parts[0]].layer for tensor in model.tensors}
    numbers, of_kind = dict.fromkeys(kinds.values(), 0), dict[str, set[int | None]]()  # of a shard; and layers
    for tensor in placement(model, ranks).ranks[ranks.rank]:
        numbers[kinds[tensor.name]] += tensor.nbytes // tensor.dtype.itemsize
        of_kind.setdefault(kinds[tensor.name], set()).add(layer_of[tensor.name])
    layers, outside, experts = (numbers.get(kind, 0) for kind in ("layers", "outside", "experts"))
    here, routed = (len(of_kind.get(kind, ())) for kind in ("layers", "experts"))
    shards = ranks.dp // ranks.dp_replicate * ranks.cp
    of_expert = Layout(ranks.dp_replicate, shards, ranks.tp, ranks.ep, etp=1).expert_shard
    same = ranks.of_stage // (ranks.ep * of_expert)
    moved = tokens * step.width * step.item  # by a layer that passes on all of them
    first, last = ranks.stage == 0, ranks.stage == ranks.pp - 1
    is_last = ranks.stage == holder(ranks.pp * ranks.vpp - 1, ranks.pp, ranks.pipeline)
    ends = 2 * (first + last) if ranks.pipeline == "zbv" else first + is_last  # passes whose results stay on the rank
    found = {
        "dp": passes * ((shards - 1) * layers + (of_expert - 1) * experts) * (2 * step.item + step.reduced)
        + passes * (shards * ranks.tp - 1) * outside * (ranks.vpp * step.item + step.reduced),
        "dp_replicate": passes
        * step.reduced
        * (_all_reduce(ranks.dp_replicate, layers + outside) + _all_reduce(same, experts)),
        "tp": (4 * here - 2 * routed + is_last / 2) * _all_reduce(ranks.tp, moved),
        "ep": routed * 4 * (ranks.ep - 1) / ranks.ep * moved * step.chosen / ranks.tp,
        "cp": here * _attention(model, ranks, step, method) if ranks.cp > 1 else 0.0,
        "pp": (2 * ranks.vpp - ends) * moved / ranks.tp if ranks.pp > 1 else 0.0,
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _attention(model: ModelState, ranks: Ranks, step: Step, method: ContextParallel) -> float:
    """Bytes that a context-parallel rank sends for a layer's attention, forward and backward."""
    heads, kv_heads, tokens = model.heads // ranks.tp, model.kv_heads // ranks.tp, sum(step.tokens) / ranks.cp
    if method == "ulysses":
        exchanged = 2 * (heads + lcm(kv_heads, ranks.cp)) * step.head * tokens  # queries and outputs, keys and values
        return 2 * (ranks.cp - 1) / ranks.cp * exchanged * step.item
    prompts = step.prompts / ranks.cp
    of_prompts, of_rows = (2 * kv_heads * step.head * some for some in (prompts, tokens - prompts))
    again = 2 * (ranks.cp - 1) * (of_prompts + of_rows) * step.item  # keys and values go around in both passes
    return again + ((ranks.cp - 1) * of_prompts + ranks.cp * of_rows) * max(step.item, 4)


def _kinds(model: ModelState) -> dict[str, str]:
    """Of each tensor the unit in which it is gathered."""
    firsts = ((tensor.name, model.by_name[tensor.parts[0]]) for tensor in model.tensors)
    return {name: "outside" if p.layer is None else "experts" if p.expert else "layers" for name, p in firsts}


def _all_reduce(ranks: int, nbytes: float) -> float:
    return 2 * (ranks - 1) / ranks * nbytes
