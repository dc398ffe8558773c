"""What the naive way of a swap keeps beside the rollout weights, by formulas; the plan counts it
(`stages/resharding/plan.py`: ``redundant_if_naive``)."""

from __future__ import annotations

from stages.parallel.layout import Layout
from stages.parallel.placement import ModelState


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
