"""Layouts say where everything lies: torch's chunks, whole heads, and local tensors without a
gap."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from stages.parallel.layout import Layout, LayoutError, parse_layout
from stages.parallel.placement import (
    ModelState,
    Names,
    Parameter,
    Split,
    Tensor,
    chunk,
    head_ranges,
    intersect,
    model_state,
    place,
    stage_layers,
    subtract,
    volume,
)
from tests.stages.resharding.models import MOE, SMALL, fused_config, layouts, moe_config, states


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    ours = [chunk(size, parts, index) for index in range(parts)]
    theirs = torch.arange(size).chunk(parts)
    assert [end - start for start, end in ours if end > start] == [len(t) for t in theirs if len(t)]
    assert ours[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ours))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 12))
def test_a_rank_has_the_key_value_heads_of_its_query_heads(
    kv_heads: int, group: int, tp: int
) -> None:
    heads = kv_heads * group
    found = [head_ranges(heads, kv_heads, tp, rank) for rank in range(tp)]
    assert [head for query, _ in found for head in range(*query)] == list(range(heads))
    for query, key_value in found:
        assert set(range(*key_value)) == {head // group for head in range(*query)}
    # what vLLM takes, and its formula
    if heads % tp == 0 and (tp % kv_heads == 0 or kv_heads % tp == 0):
        copies = max(1, tp // kv_heads)
        count = max(1, kv_heads // tp)
        assert [kv for _, kv in found] == [
            (rank // copies * count, (rank // copies + 1) * count) for rank in range(tp)
        ]


@given(st.data())
def test_a_box_without_a_hole_is_the_rest_of_it(data: st.DataObject) -> None:
    span = st.tuples(st.integers(0, 4), st.integers(1, 4)).map(lambda at: (at[0], sum(at)))
    dims = data.draw(st.integers(1, 3))
    box, other = (tuple(data.draw(span) for _ in range(dims)) for _ in range(2))
    hole = intersect(box, other)
    if hole is None:
        return
    rest = list(subtract(box, hole))
    assert sum(map(volume, rest)) == volume(box) - volume(hole)
    assert not any(intersect(part, hole) for part in rest)
    assert not any(intersect(a, b) for i, a in enumerate(rest) for b in rest[:i])


@given(states(), st.data(), st.sampled_from(["hf", "vllm"]))
def test_local_tensors_are_full_and_every_element_is_held(
    state: ModelState, data: st.DataObject, names: Names
) -> None:
    layout = data.draw(layouts(state))
    placement = place(state, layout, names=names)
    assert len(placement.ranks) == layout.world
    held = {p.name: np.zeros(p.shape, int) for p in state.parameters}
    for tensors in placement.ranks:
        assert len({tensor.name for tensor in tensors}) == len(tensors)
        for tensor in tensors:
            filled = np.zeros(tensor.shape, int)
            for piece in tensor.pieces:
                sizes = [end - start for start, end in piece.box]
                filled[
                    tuple(slice(at, at + size) for at, size in zip(piece.at, sizes, strict=True))
                ] += 1
                held[piece.parameter][tuple(slice(*span) for span in piece.box)] += 1
            assert (filled == 1).all()
    for parameter in state.parameters:
        counts = held[parameter.name]
        assert counts.min() >= 1
        stages = len(
            {
                layout.coordinates(r).stage
                for r in range(layout.world)
                if _holds(placement.ranks[r], parameter.name)
            }
        )
        if (parameter.split and parameter.split.rule != "key_value") or layout.tp <= state.kv_heads:
            copies = _copies(layout, parameter) * max(stages, 1)
            assert (counts == copies).all(), (parameter, layout)


def _holds(tensors: tuple, name: str) -> bool:
    return any(piece.parameter == name for tensor in tensors for piece in tensor.pieces)


def _copies(layout: Layout, parameter: Parameter) -> int:
    """Ranks of a stage that hold the same element."""
    if parameter.expert:
        cuts = layout.ep * layout.expert_shard * (layout.expert_tp if parameter.split else 1)
    else:
        cuts = layout.dp_shard * (layout.tp if parameter.split else 1)
    return layout.stage_ranks // cuts


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        Qwen3Config(**SMALL, head_dim=8),
        Qwen3MoeConfig(**SMALL, **MOE, head_dim=8),
        Qwen2MoeConfig(**SMALL, **MOE, shared_expert_intermediate_size=16),
        fused_config(),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_are_read_off_the_model(config: object) -> None:
    state = model_state(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (whole,) = place(state, Layout()).ranks
    assert {t.name: t.shape for t in whole} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert state.nbytes == sum(p.nbytes for p in model.parameters())
    assert all(parameter.rule_known for parameter in state.parameters)
    assert sorted(name for t in state.named("vllm") for name in t.parts) == sorted(
        p.name for p in state.parameters
    )
    fused = {t.name.removeprefix("model.layers.0.") for t in state.named("vllm")}
    assert "self_attn.qkv_proj.weight" in fused
    assert fused & {"mlp.gate_up_proj.weight", "mlp.experts.w13_weight"}
    assert not any("gate_proj" in name or "q_proj" in name for name in fused)


def test_a_fused_expert_tensor_is_cut_in_both_its_halves() -> None:
    state = model_state(moe_config())
    rank1 = {t.name: t for t in place(state, Layout(tp=2), names="vllm").ranks[1]}
    experts = 4
    wide = MOE["moe_intermediate_size"]
    hidden = SMALL["hidden_size"]
    w13 = rank1["model.layers.0.mlp.experts.w13_weight"]
    assert w13.shape == (experts, wide, hidden)
    assert [(piece.box[1], piece.at[1]) for piece in w13.pieces] == [
        ((wide // 2, wide), 0),
        ((wide // 2, wide), wide // 2),
    ]
    assert rank1["model.layers.0.mlp.experts.w2_weight"].shape == (experts, hidden, wide // 2)


def test_what_the_source_has_fused_is_cut_part_by_part() -> None:
    """4 heads on 2 of 8 elements: the rows of q, k and v, and of gate and up, each cut by its own
    rule."""
    state = model_state(fused_config())
    assert {t.name: t.parts for t in state.tensors}["model.layers.1.mlp.gate_up_proj.weight"] == (
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    )
    rank1 = {t.name: t for t in place(state, Layout(tp=2)).ranks[1]}
    qkv = rank1["model.layers.0.self_attn.qkv_proj.weight"]
    assert qkv.shape == (32, SMALL["hidden_size"])
    assert [
        (piece.parameter.rsplit(".", 2)[1], piece.box[0], piece.at[0]) for piece in qkv.pieces
    ] == [
        ("q_proj", (16, 32), 0),
        ("k_proj", (8, 16), 16),
        ("v_proj", (8, 16), 24),
    ]
    gate_up = rank1["model.layers.0.mlp.gate_up_proj.weight"]
    assert gate_up.shape == (24, SMALL["hidden_size"])
    assert [
        (piece.parameter.rsplit(".", 2)[1], piece.box[0], piece.at[0]) for piece in gate_up.pieces
    ] == [
        ("gate_proj", (12, 24), 0),
        ("up_proj", (12, 24), 12),
    ]


def test_key_value_heads_are_held_twice_when_there_are_more_ranks_than_heads() -> None:
    state = model_state(Qwen3Config(**SMALL, head_dim=8))  # 4 heads on 2
    ranks = place(state, Layout(tp=4), names="vllm").ranks
    qkv = [
        next(t for t in tensors if t.name.endswith("0.self_attn.qkv_proj.weight"))
        for tensors in ranks
    ]
    # one query head, one key head, one value head, of 8 each
    assert [t.shape[0] for t in qkv] == [24] * 4
    keys = [next(p.box[0] for p in t.pieces if "k_proj" in p.parameter) for t in qkv]
    assert keys == [(0, 8), (0, 8), (8, 16), (8, 16)]


def test_tied_embeddings_are_at_both_ends_of_a_pipeline() -> None:
    for tied in (True, False):
        state = model_state(LlamaConfig(**SMALL, tie_word_embeddings=tied))
        ranks = place(state, Layout(pp=2)).ranks
        ends = [
            [t.name for t in tensors if t.name in ("model.embed_tokens.weight", "lm_head.weight")]
            for tensors in ranks
        ]
        expected = (
            [["model.embed_tokens.weight"]] * 2
            if tied
            else [["model.embed_tokens.weight"], ["lm_head.weight"]]
        )
        assert ends == expected


def test_layers_are_dealt_out_in_order_and_evenly() -> None:
    assert stage_layers((1.0,) * 6, 3) == (range(2), range(2, 4), range(4, 6))
    assert stage_layers((1.0,) * 7 + (5.0,), 2) == (range(6), range(6, 8))
    assert stage_layers((9.0, 1.0, 1.0), 3) == (range(1), range(1, 2), range(2, 3))


def test_shards_cut_what_tensor_parallelism_left() -> None:
    """FSDP2 over a tensor-parallel mesh: a rank's rows are a chunk of its tensor-parallel rows, not
    one of all rows."""
    up = Parameter("up_proj.weight", (10, 2), torch.float32, split=Split(0))
    state = ModelState((up,), (Tensor("up_proj.weight", (up.name,)),), 1, 1, 1)
    rows = [tensors[0].pieces[0].box[0] for tensors in place(state, Layout(dp_shard=2, tp=2)).ranks]
    assert rows == [(0, 3), (5, 8), (3, 5), (8, 10)]


@pytest.mark.parametrize("order", ["inner", "outer"])
def test_neighbours_hold_different_experts_or_the_same(order: str) -> None:
    layout = Layout(dp_replicate=2, tp=2, ep=2, ep_order=order)  # type: ignore[arg-type]
    assert [layout.coordinates(rank).ep for rank in range(4)] == (
        [0, 1, 0, 1] if order == "inner" else [0, 0, 1, 1]
    )


def test_dp_means_what_the_side_does_with_it() -> None:
    assert parse_layout(" dp=2, tp=4 ", "train") == Layout(dp_shard=2, tp=4)
    assert parse_layout("dp=2,tp=4", "rollout") == Layout(dp_replicate=2, tp=4)
    assert parse_layout("", "train") == Layout()
    assert (
        str(parse_layout("dp=2,pp=3,ep_order=outer", "rollout"))
        == "pp=3,dp_replicate=2,ep_order=outer"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=two", r"dp: 'two' is no number of ranks; write for example dp=2"),
        ("dp=0", r"dp_shard: 0 is no number of ranks; use a whole number >= 1"),
        ("tensor=2", r"tensor: is no part of a layout; use dp, .*tp"),
        ("tp=2,tp=2", r"tp: 'tp=2' gives tp a second time"),
        ("dp=2,dp_shard=4", r"dp_shard: 'dp_shard=4' gives dp_shard a second time"),
        (
            "tp=2,ep=3",
            r"ep: 3 with etp = 1 does not divide the 2 ranks of dp_replicate · tp "
            r".*divisor of 2",
        ),
        ("dp=4,ep=3", r"ep: 3 .* does not divide the 4 ranks of dp_shard · tp"),
        ("ep_order=left", r"ep_order: 'left' is unknown; use 'inner' or 'outer'"),
        ("tp", r"tp: '' is no number of ranks"),
    ],
)
def test_an_invalid_layout_raises_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_layout(text, "train")


def test_a_layout_that_does_not_fit_the_model_says_so() -> None:
    dense = model_state(LlamaConfig(**SMALL))
    with pytest.raises(LayoutError, match="pp: 5 stages are more than the 2 layers; use pp <= 2"):
        place(dense, Layout(pp=5))
    with pytest.raises(LayoutError, match="ep: 2 for a model with no experts; use ep <= 1"):
        place(dense, Layout(dp_replicate=2, ep=2))
    with pytest.raises(LayoutError, match="ep: 8 for a model with 4 experts; use ep <= 4"):
        place(model_state(moe_config()), Layout(dp_replicate=8, ep=8))
    odd = Parameter("mixer.in_proj.weight", (4, 4), torch.float32, rule_known=False)
    state = ModelState((odd,), (Tensor(odd.name, (odd.name,)),), 1, 1, 1)
    with pytest.raises(
        LayoutError,
        match=r"tp: 2, but how .* cuts mixer.in_proj.weight \[4, 4\] is not known; "
        r"use tp=1",
    ):
        place(state, Layout(tp=2))
    assert prod(place(state, Layout(dp_shard=2)).ranks[1][0].shape) == 8
    with pytest.raises(
        LayoutError, match="num_attention_heads: 4 is no multiple of num_key_value_heads = 3"
    ):
        model_state(LlamaConfig(**{**SMALL, "num_key_value_heads": 3}))
