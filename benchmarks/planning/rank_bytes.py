"""The bytes that a step of a train engine's ranks sends, by strategy: arithmetic on sizes, as the
engine's calls are.

    all-gather of n shards     (n - 1) · shard             all-reduce       2 (n - 1) / n · tensor
    reduce-scatter             (n - 1) · shard             all-to-all       (n - 1) / n · tensor

Bytes are those that a rank sends when each call is a ring. Sums of metrics and of the gradient's
norm are left out: they do not grow with the model. So are sums of the gradients of norms and
routers over tp, once a step.

Beside it what the naive way of a swap keeps beside the rollout weights, by formulas; the plan
counts it (`stages/resharding/plan.py`: ``redundant_if_naive``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from stages.parallel.layout import Layout, RankCoordinates
from stages.parallel.placement import ModelState, train_placement


@dataclass(frozen=True)
class Step:
    """A step of one replica: ``tokens`` that each of its micro-batches feeds, in a model of
    ``width`` numbers a token, of which each goes to ``chosen`` experts; ``prompts`` of all the
    tokens are those of prompts; ``head`` numbers of a head of attention; ``item`` bytes of a number
    that is computed with and ``reduced`` bytes of a number of a gradient that is summed."""

    tokens: tuple[int, ...]
    width: int
    chosen: int = 0
    prompts: int = 0
    head: int = 0
    item: int = 4
    reduced: int = 4


def sent(model: ModelState, at: RankCoordinates, step: Step) -> dict[str, float]:
    """Return the bytes that the rank at ``at`` sends in ``step``, by strategy, with tokens that are
    spread evenly over experts; strategies of one rank are left out. Of tied embeddings the sum over
    pipeline stages is left out, too."""
    layout = at.layout
    passes = layout.filled(len(step.tokens))
    tokens = sum(step.tokens) / layout.cp
    kinds = _kinds(model)
    layer_of = {tensor.name: model.by_name[tensor.parts[0]].layer for tensor in model.tensors}
    numbers = dict.fromkeys(kinds.values(), 0)  # of a shard
    layers_of_kind: dict[str, set[int | None]] = {}
    for tensor in train_placement(model, layout).ranks[at.rank]:
        kind = kinds[tensor.name]
        numbers[kind] += tensor.nbytes // tensor.dtype.itemsize
        layers_of_kind.setdefault(kind, set()).add(layer_of[tensor.name])
    layers, outside, experts = (numbers.get(kind, 0) for kind in ("layers", "outside", "experts"))
    here, routed = (len(layers_of_kind.get(kind, ())) for kind in ("layers", "experts"))
    gathered = (layout.fsdp - 1) * layers + (layout.expert_shard - 1) * experts
    gathered_outside = (layout.fsdp * layout.tp - 1) * outside
    copied = _all_reduce(layout.dp_replicate, layers + outside) + _all_reduce(
        layout.expert_copies, experts
    )
    moved = tokens * step.width * step.item  # by a layer that passes on all of them
    is_first = at.stage == 0
    is_last = at.stage == layout.last_stage
    ends = is_first + is_last  # passes whose results stay on the rank
    nbytes = {
        "dp": passes * gathered * (2 * step.item + step.reduced)
        + passes * gathered_outside * (layout.vpp * step.item + step.reduced),
        "dp_replicate": passes * step.reduced * copied,
        "tp": (4 * here - 2 * routed + is_last / 2) * _all_reduce(layout.tp, moved),
        "ep": routed * 4 * (layout.ep - 1) / layout.ep * moved * step.chosen / layout.tp,
        "cp": here * _attention(model, layout, step) if layout.cp > 1 else 0.0,
        "pp": (2 * layout.vpp - ends) * moved / layout.tp if layout.pp > 1 else 0.0,
    }
    return {name: size for name, size in nbytes.items() if size}


def spans(layout: Layout) -> dict[str, int]:
    """Return the neighbouring ranks among which each strategy sends."""
    of_stage = dict.fromkeys(("dp", "dp_replicate"), layout.stage_ranks)
    return of_stage | {
        "tp": layout.tp,
        "cp": layout.tp * layout.cp,
        "ep": layout.ep,
        "pp": layout.world,
    }


def waited_for(model: ModelState, layout: Layout, step: Step) -> list[tuple[float, int]]:
    """Return the bytes that the first rank sends in ``step`` while it does not compute, and the
    span of ranks among which: all but those of weights and their gradients."""
    # What is waited for does not depend on more data-parallel ranks than share out the experts.
    few = replace(layout, dp_replicate=1, dp_shard=min(layout.replicas, layout.ep))
    span_of = spans(layout)
    by_strategy = sent(model, few.coordinates(0), step).items()
    return [
        (nbytes, span_of[name])
        for name, nbytes in by_strategy
        if name not in ("dp", "dp_replicate")
    ]


def _attention(model: ModelState, layout: Layout, step: Step) -> float:
    """Return the number of bytes that a context-parallel rank sends for a layer's attention,
    forward and backward."""
    cp = layout.cp
    heads = model.heads // layout.tp
    kv_heads = model.kv_heads // layout.tp
    tokens = sum(step.tokens) / cp
    if layout.context_parallel == "ulysses":
        # queries and outputs, keys and values
        exchanged = 2 * (heads + lcm(kv_heads, cp)) * step.head * tokens
        return 2 * (cp - 1) / cp * exchanged * step.item
    prompts = step.prompts / cp
    of_prompts, of_rows = (
        2 * kv_heads * step.head * count for count in (prompts, tokens - prompts)
    )
    # keys and values go around in both passes
    again = 2 * (cp - 1) * (of_prompts + of_rows) * step.item
    return again + ((cp - 1) * of_prompts + cp * of_rows) * max(step.item, 4)


def _kinds(model: ModelState) -> dict[str, str]:
    """Return the unit in which each tensor is gathered."""
    firsts = ((tensor.name, model.by_name[tensor.parts[0]]) for tensor in model.tensors)
    return {
        name: "outside" if p.layer is None else "experts" if p.expert else "layers"
        for name, p in firsts
    }


def _all_reduce(ranks: int, nbytes: float) -> float:
    return 2 * (ranks - 1) / ranks * nbytes


def split_bytes(model: ModelState) -> int:
    """Return the bytes of the dense parameters that tensor parallelism splits: TW of MindSpeed RL,
    Eq. 3."""
    return sum(p.nbytes for p in model.parameters if p.split and not p.expert)


def redundant_eq3(model: ModelState, train: Layout, rollout: Layout) -> float:
    """Redundant bytes on all ranks by MindSpeed RL (arXiv 2507.19017), Eq. 3: GDP · (TW / UTP + EW
    / GEP), with GDP and GEP of generation, UTP of the update, TW the bytes that tensor parallelism
    splits, EW those of experts.

    It holds when the update does not shard over data-parallel ranks, and generation has one
    tensor-parallel rank and twice the update's expert parallelism; :func:`redundant_general` has no
    such condition.
    """
    return rollout.dp_replicate * (split_bytes(model) / train.tp + model.expert_bytes / rollout.ep)


def redundant_general(model: ModelState, train: Layout, rollout: Layout) -> float:
    """Redundant bytes on all ranks: N · (TW / UTP + EW · (1 / UEP − 1 / GEP)).

    UTP and UEP count every split, also over data-parallel shards. It assumes that generation splits
    the dense weights in another way, and that each rank trains the experts with which it generates;
    ``redundant_if_naive`` counts the real bytes.
    """
    dense = split_bytes(model) / (train.tp * train.fsdp)
    experts = model.expert_bytes * max(0.0, 1 / train.expert_parts - 1 / rollout.expert_parts)
    return train.world * (dense + experts)
