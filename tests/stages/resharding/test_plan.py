"""A plan moves exactly what is needed, from the nearest rank with the least load, and predicts what
that takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config

from benchmarks.planning.rank_bytes import redundant_eq3, redundant_general, split_bytes
from stages.parallel.layout import Layout
from stages.parallel.placement import ModelState, Placement, model_state, place
from stages.resharding.plan import (
    Phase,
    PlanError,
    ReshardPlan,
    Slice,
    adamw_bytes,
    memory,
    plan_reshard,
    redundant_if_naive,
)
from tests.stages.resharding.models import layouts, moe_config, states

Arrays = list[dict[str, np.ndarray]]


def filled(state: ModelState, placement: Placement) -> Arrays:
    """Local tensors whose every element is its own number among all elements of the model."""
    full = {}
    start = 1
    for parameter in state.parameters:
        count = int(np.prod(parameter.shape))
        full[parameter.name] = np.arange(start, start + count).reshape(parameter.shape)
        start += count
    arrays: Arrays = []
    for tensors in placement.ranks:
        arrays.append({tensor.name: np.zeros(tensor.shape, int) for tensor in tensors})
        for tensor in tensors:
            for piece in tensor.pieces:
                sizes = [end - first for first, end in piece.box]
                arrays[-1][tensor.name][at(piece.at, sizes)] = full[piece.parameter][
                    tuple(slice(*s) for s in piece.box)
                ]
    return arrays


def at(offset: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))


def carried_out(
    plan: ReshardPlan, source: Arrays, slices: Iterable[Slice]
) -> tuple[Arrays, Arrays]:
    """The target's tensors after ``slices``, and how often each element was written."""
    empty: Arrays = [
        {t.name: np.zeros(t.shape, int) for t in tensors} for tensors in plan.target.ranks
    ]
    times: Arrays = [
        {t.name: np.zeros(t.shape, int) for t in tensors} for tensors in plan.target.ranks
    ]
    for s in slices:
        to = at(s.target_at, s.sizes)
        empty[s.receiver][s.target][to] = source[s.sender][s.source][at(s.source_at, s.sizes)]
        times[s.receiver][s.target][to] += 1
    return empty, times


@st.composite
def plans(draw: st.DrawFn) -> tuple[ModelState, ReshardPlan]:
    state = draw(states())
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    train = place(state, draw(layouts(state, world)), names=draw(st.sampled_from(["hf", "vllm"])))
    other = draw(st.sampled_from([world, world, 1, 5]))  # mostly the same ranks
    dtype = draw(st.sampled_from([None, torch.bfloat16]))
    rollout = place(
        state, draw(layouts(state, other)), names=draw(st.sampled_from(["hf", "vllm"])), dtype=dtype
    )
    bucket = draw(st.sampled_from([8, 24, 200, 2**20]))
    node = draw(st.sampled_from([None, 1, 2]))
    return state, plan_reshard(train, rollout, bucket_bytes=bucket, ranks_per_node=node)


@given(plans())
def test_every_element_arrives_once_where_it_is_needed_and_nothing_else_moves(
    made: tuple[ModelState, ReshardPlan],
) -> None:
    state, plan = made
    source = filled(state, plan.source)
    wanted = filled(state, plan.target)
    in_rounds = [s for one in plan.rounds for s in one]
    local = [s for rank in range(plan.world) for s in plan.local(rank)]
    for slices in (plan.slices, [*local, *in_rounds]):
        found, times = carried_out(plan, source, slices)
        for rank, tensors in enumerate(wanted):
            for name, array in tensors.items():
                assert (times[rank][name] == 1).all()
                assert (found[rank][name] == array).all()
    assert all(s.sender != s.receiver for s in in_rounds)


@given(plans())
def test_the_bytes_add_up(made: tuple[ModelState, ReshardPlan]) -> None:
    _, plan = made
    assert sum(plan.sent) == sum(plan.received) == sum(s.nbytes for one in plan.rounds for s in one)
    for rank in range(plan.world):
        assert plan.received[rank] + plan.kept[rank] == plan.target.nbytes(rank)


@given(plans())
def test_no_rank_has_more_than_a_bucket_in_a_round(made: tuple[ModelState, ReshardPlan]) -> None:
    _, plan = made
    for one in plan.rounds:
        assert one
        assert len({s.dtype for s in one}) == 1
        load: dict[int, int] = defaultdict(int)
        for s in one:
            load[s.sender] += s.nbytes
            load[s.receiver] += s.nbytes
        assert max(load.values()) <= plan.bucket_bytes
    assert max(plan.temporary) <= 2 * plan.bucket_bytes
    busiest = max(map(sum, zip(plan.sent, plan.received, strict=True)))
    assert (max(plan.temporary) > 0) == (busiest > 0)


@given(plans())
def test_a_rank_keeps_all_that_it_has(made: tuple[ModelState, ReshardPlan]) -> None:
    state, plan = made
    source = filled(state, plan.source)
    wanted = filled(state, plan.target)
    for rank, tensors in enumerate(wanted):
        own = (
            np.concatenate([a.ravel() for a in source[rank].values()])
            if rank < len(source)
            else np.zeros(0, int)
        )
        have = {t.name: t.dtype.itemsize for t in plan.target.ranks[rank]}
        kept = sum(int(np.isin(array, own).sum()) * have[name] for name, array in tensors.items())
        assert plan.kept[rank] == kept


def test_a_neighbour_is_asked_before_another_node() -> None:
    state = model_state(moe_config())
    train = Layout(dp_replicate=2, tp=2)
    rollout = Layout(dp_replicate=4)
    plan = plan_reshard(place(state, train), place(state, rollout), ranks_per_node=2)
    assert plan.slices
    assert all(s.sender // 2 == s.receiver // 2 for s in plan.slices)
    across = plan_reshard(place(state, Layout(dp_shard=4)), place(state, rollout), ranks_per_node=2)
    assert any(s.sender // 2 != s.receiver // 2 for s in across.slices)  # no neighbour has it


def test_replicas_share_the_sending() -> None:
    state = model_state(moe_config())
    source = place(state, Layout(dp_replicate=4))
    plan = plan_reshard(source, place(state, Layout(dp_replicate=8)))
    assert plan.received[:4] == (0,) * 4
    assert sum(plan.sent[:4]) == 4 * state.nbytes
    largest = max(parameter.nbytes for parameter in state.parameters)
    assert max(plan.sent[:4]) - min(plan.sent[:4]) <= largest


def test_rounds_are_nearly_full() -> None:
    state = model_state(moe_config(num_hidden_layers=6))
    plan = plan_reshard(
        place(state, Layout(dp_shard=4)), place(state, Layout(dp_replicate=4)), bucket_bytes=4096
    )
    busiest = max(map(sum, zip(plan.sent, plan.received, strict=True)))
    assert len(plan.rounds) <= 1.25 * busiest / plan.bucket_bytes


def test_a_plan_between_two_models_is_refused() -> None:
    small = model_state(moe_config())
    large = model_state(moe_config(num_hidden_layers=3))
    with pytest.raises(
        PlanError,
        match=r"parameter 'model.layers.2.*the source layout has none of "
        r"it",
    ):
        plan_reshard(place(small, Layout()), place(large, Layout()))
    wide = model_state(moe_config(vocab_size=60))
    with pytest.raises(
        PlanError,
        match=r"'model.embed_tokens.weight': no rank of the source "
        r"layout has",
    ):
        plan_reshard(place(small, Layout()), place(wide, Layout()))
    with pytest.raises(PlanError, match="bucket_bytes: 4 cannot hold an element of 4 bytes"):
        plan_reshard(place(small, Layout()), place(small, Layout()), bucket_bytes=4)


@given(plans())
def test_memory_follows_from_what_is_alive(made: tuple[ModelState, ReshardPlan]) -> None:
    _, plan = made
    state = adamw_bytes(plan.source)
    phases = {phase.phase: phase for phase in memory(plan, state)}
    assert list(phases) == list(Phase)
    for rank in range(plan.world):
        weights = plan.source.nbytes(rank)
        rollout = plan.target.nbytes(rank)
        extra = state[rank] if rank < len(state) else 0
        assert phases[Phase.TRAIN].live[rank] == weights + extra
        assert phases[Phase.GATHER].live[rank] == weights + rollout + plan.temporary[rank]
        assert phases[Phase.GENERATE].live[rank] == rollout  # of training nothing is left
        assert phases[Phase.PREFETCH].after[rank] == weights + extra
        assert (
            phases[Phase.OFFLOAD_STATE].host[rank] + phases[Phase.OFFLOAD_WEIGHTS].host[rank]
            == weights + extra
        )
    assert all(
        a <= b for phase in phases.values() for a, b in zip(phase.after, phase.live, strict=True)
    )


def test_adamw_keeps_two_moments_of_each_weight_and_a_gradient_within_a_step() -> None:
    state = model_state(moe_config())
    whole = place(state, Layout())
    assert adamw_bytes(whole) == (3 * state.nbytes,)
    assert adamw_bytes(whole, gradients=False) == (2 * state.nbytes,)


# --- MindSpeed RL's Eq. 3
# ----------------------------------------------------------------------------------------------


FIG3_TRAIN = Layout(dp_replicate=2, tp=2, ep=2)
FIG3_ROLLOUT = Layout(dp_replicate=4, ep=4)


def fig3(order: Literal["outer", "inner"]) -> tuple[ModelState, ReshardPlan]:
    """TP2 · DP2 · EP2 to DP4 · EP4, the paper's Fig. 3."""
    state = model_state(moe_config())
    train = replace(FIG3_TRAIN, ep_order=order)
    return state, plan_reshard(place(state, train), place(state, FIG3_ROLLOUT, names="vllm"))


def test_eq3_is_what_the_plan_counts_for_the_papers_example() -> None:
    state, plan = fig3("outer")
    eq3 = redundant_eq3(state, FIG3_TRAIN, FIG3_ROLLOUT)
    assert eq3 == 4 * (split_bytes(state) / 2 + state.expert_bytes / 4)
    assert eq3 == redundant_general(state, FIG3_TRAIN, FIG3_ROLLOUT)
    assert eq3 == sum(redundant_if_naive(plan))


def test_what_eq3_leaves_out_is_counted() -> None:
    """Where neighbours hold different experts, half of the ranks find none of their own and keep
    all they trained."""
    state, plan = fig3("inner")
    general = redundant_general(state, FIG3_TRAIN, FIG3_ROLLOUT)
    assert sum(redundant_if_naive(plan)) == general + 2 * state.expert_bytes / 4


def test_eight_gigabytes_are_released_per_device_for_32b() -> None:
    """Fig. 10 of the paper: Qwen2.5-32B, TP8 · DP2 to TP4 · DP4, 8 GB per device."""
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    state = model_state(config)
    train = Layout(dp_replicate=2, tp=8)
    rollout = Layout(dp_replicate=4, tp=4)
    plan = plan_reshard(place(state, train), place(state, rollout, names="vllm"))
    counted = redundant_if_naive(plan)
    assert [round(nbytes / 1e9) for nbytes in counted] == [8] * 16
    assert sum(counted) == pytest.approx(redundant_general(state, train, rollout), rel=1e-3)


def test_tensors_that_stay_as_they_are_are_not_redundant() -> None:
    state = model_state(moe_config())
    same: Any = place(state, Layout(tp=2))
    assert redundant_if_naive(plan_reshard(same, same)) == (0, 0)
    lower = place(state, Layout(tp=2), dtype=torch.bfloat16)
    assert redundant_if_naive(plan_reshard(same, lower)) == tuple(
        same.nbytes(rank) for rank in range(2)
    )
