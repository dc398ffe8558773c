"""What the ranks of the swap tests do, each in a process of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, Qwen3Config

from stages.resharding.layout import Layout, ModelState, Names, Placement, model_state, place
from stages.resharding.plan import Phase, PhaseMemory, ReshardPlan, memory, plan_reshard
from stages.resharding.swap import State, Swap, SwapError, live_bytes, local_weights, training_state
from tests.stages.resharding.models import SMALL, moe_config
from tests.stages.resharding.ranks import run_ranks

CPU = torch.device("cpu")
BUCKET = 3000  # small, so that every case takes many rounds

DENSE = model_state(Qwen3Config(**SMALL, head_dim=8))
TIED = model_state(LlamaConfig(**{**SMALL, "vocab_size": 51, "intermediate_size": 23}, tie_word_embeddings=True))
THREE_HEADS = model_state(
    LlamaConfig(**{**SMALL, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 53})
)
MOE = model_state(moe_config())
FIVE_EXPERTS = model_state(moe_config(num_experts=5, moe_intermediate_size=7, num_hidden_layers=3))


@dataclass(frozen=True)
class Case:
    name: str
    state: ModelState = field(repr=False)
    train: Layout
    rollout: Layout
    rollout_names: Names = "vllm"
    dtype: torch.dtype | None = None

    def plan(self) -> ReshardPlan:
        target = place(self.state, self.rollout, names=self.rollout_names, dtype=self.dtype)
        return plan_reshard(place(self.state, self.train), target, bucket_bytes=BUCKET)


CASES = {
    2: [
        Case("FSDP2 to DP2", DENSE, Layout(dp_shard=2), Layout(dp_replicate=2)),
        Case("TP2 to DP2, nine heads on three", THREE_HEADS, Layout(tp=2), Layout(dp_replicate=2)),
        Case("PP2 to TP2, tied", TIED, Layout(pp=2), Layout(tp=2)),
        Case("the same to the same", DENSE, Layout(tp=2), Layout(tp=2), "hf"),
    ],
    4: [
        Case("TP2·DP2 to TP1·DP4", DENSE, Layout(dp_replicate=2, tp=2), Layout(dp_replicate=4)),
        Case("TP4 to TP2·DP2", DENSE, Layout(tp=4), Layout(dp_replicate=2, tp=2)),
        Case("FSDP4 to TP2", TIED, Layout(dp_shard=4), Layout(dp_replicate=2, tp=2)),
        Case("FSDP4 to TP2, in bfloat16", TIED, Layout(dp_shard=4), Layout(dp_replicate=2, tp=2), dtype=torch.bfloat16),
        Case("Fig. 3: EP2·TP2·DP2 to EP4·DP4", MOE, Layout(dp_replicate=2, tp=2, ep=2), Layout(dp_replicate=4, ep=4)),
        Case("FSDP2·TP2 to TP4, nine heads", THREE_HEADS, Layout(dp_shard=2, tp=2), Layout(tp=4)),
        Case("EP2·FSDP4 to TP4, five experts", FIVE_EXPERTS, Layout(dp_shard=4, ep=2), Layout(tp=4)),
        Case("FSDP3 of four to two ranks", DENSE, Layout(dp_shard=3), Layout(dp_replicate=2, tp=2)),
    ],
    8: [
        Case("TP2·DP4 to TP1·DP8", TIED, Layout(dp_replicate=4, tp=2), Layout(dp_replicate=8)),
        Case("PP2·FSDP2·TP2 to TP4·DP2", DENSE, Layout(pp=2, dp_shard=2, tp=2), Layout(dp_replicate=2, tp=4)),
        Case("EP4·FSDP4·TP2 to EP8·DP8", MOE, Layout(dp_shard=4, tp=2, ep=4), Layout(dp_replicate=2, tp=4, ep=4)),
        Case("FSDP8 to EP2·TP4·DP2, uneven", FIVE_EXPERTS, Layout(dp_shard=8), Layout(dp_replicate=2, tp=4, ep=4)),
    ],
}


def full_state(state: ModelState) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {p.name: torch.randn(p.shape, generator=generator).to(p.dtype) for p in state.parameters}


def laid_out(full: Mapping[str, torch.Tensor], placement: Placement, rank: int) -> dict[str, torch.Tensor]:
    """The slices of ``full`` that ``rank`` holds, made of it by itself."""
    tensors = {}
    for tensor in placement.ranks[rank] if rank < placement.world else ():
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for piece in tensor.pieces:
            part = full[piece.parameter][tuple(slice(*span) for span in piece.box)]
            value[tuple(slice(a, a + n) for a, n in zip(piece.at, part.shape, strict=True))] = part
        tensors[tensor.name] = value
    return tensors


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    # A copy: a storage that numpy looks into cannot be resized any more.
    return {name: t.detach().clone().flatten().view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


def swapped_twice(rank: int, world: int, cases: list[Case]) -> list[str]:
    return [case.name for case in cases if _round_trips(rank, case)]


def _round_trips(rank: int, case: Case) -> bool:
    plan = case.plan()
    full = full_state(case.state)
    weights = laid_out(full, plan.source, rank)
    state = {f"{name}.{kind}": torch.randn(t.shape) for name, t in weights.items() for kind in ("grad", "exp_avg", "exp_avg_sq")}
    before = bits({**weights, **state})
    expected = bits(laid_out(full, plan.target, rank))

    counted = [0] * plan.world
    dist.all_gather_object(counted, live_bytes(state.values()))
    figures = {figure.phase: figure for figure in memory(plan, counted)}
    seen: dict[Phase, list[int]] = {phase: [] for phase in Phase}

    def live() -> int:
        return live_bytes([*weights.values(), *state.values(), *swap.rollout.values()]) + swap.temporary_bytes()

    def within(phase: Phase) -> None:
        assert live() <= figures[phase].live[rank], phase
        assert swap.temporary_bytes() <= min(plan.temporary[rank], 2 * BUCKET)
        seen[phase].append(live())

    swap = Swap(plan, rank, weights, state.values, device=CPU, deadline=30, watch=within)
    assert live() == figures[Phase.TRAIN].live[rank]
    for again in range(2):
        arena = swap.arena.nbytes
        rollout = swap.to_rollout()
        assert bits(rollout) == expected
        assert live_bytes([*weights.values(), *state.values()]) == 0  # device bytes of training
        assert live() == figures[Phase.GENERATE].live[rank]
        if again:
            assert swap.arena.nbytes == arena  # reused
            swap.prefetch()
        swap.ready()
        assert bits({**weights, **state}) == before
        assert live() == figures[Phase.PREFETCH].after[rank]
        assert live_bytes(rollout.values()) == 0
    _reached(seen, figures, plan, rank)
    return True


def _reached(seen: dict[Phase, list[int]], figures: dict[Phase, PhaseMemory], plan: ReshardPlan, rank: int) -> None:
    """The plan's figures are not only bounds: each is reached."""
    for phase in (Phase.OFFLOAD_STATE, Phase.OFFLOAD_WEIGHTS):
        assert set(seen[phase]) == {figures[phase].after[rank]}
    assert len(seen[Phase.GATHER]) == 2 * (len(plan.rounds) + 1)
    assert max(seen[Phase.GATHER]) == (figures[Phase.GATHER].live[rank] if plan.rounds else figures[Phase.GATHER].after[rank])


