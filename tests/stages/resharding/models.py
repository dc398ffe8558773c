"""Small models and layouts for the tests of resharding."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from transformers import Phi3Config, Qwen3MoeConfig

from stages.parallel.layout import Layout, LayoutError
from stages.parallel.placement import ModelState, Parameter, Split, Tensor, place

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def moe_config(**changes: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**{**SMALL, **MOE, "head_dim": 8, **changes})


def fused_config(**changes: Any) -> Phi3Config:
    """A model that has q, k and v, and gate and up, as one tensor each by Hugging Face's names,
    too."""
    return Phi3Config(**{**SMALL, "pad_token_id": 0, **changes})


@st.composite
def states(draw: st.DrawFn) -> ModelState:
    """Models of any small sizes: layers with attention, a dense or an expert block, a bias, tied or
    untied embeddings; in Hugging Face's names, experts fused."""
    size = st.integers(1, 7)
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 3))
    head_dim = draw(st.integers(1, 3))
    heads = kv_heads * group
    hidden = draw(size)
    wide = draw(size)
    vocab = draw(size)
    layers = draw(st.integers(1, 3))
    experts = draw(st.integers(0, 5))
    tied = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    parameters = [Parameter("model.embed_tokens.weight", (vocab, hidden), dtype, split=Split(0))]
    tensors: list[Tensor] = []
    for layer in range(layers):
        at = f"model.layers.{layer}."
        attention = f"{at}self_attn."
        q = Split(0, head_dim, "query")
        kv = Split(0, head_dim, "key_value")
        parameters += [
            Parameter(f"{attention}q_proj.weight", (heads * head_dim, hidden), dtype, layer, q),
            Parameter(f"{attention}k_proj.weight", (kv_heads * head_dim, hidden), dtype, layer, kv),
            Parameter(f"{attention}v_proj.weight", (kv_heads * head_dim, hidden), dtype, layer, kv),
            Parameter(
                f"{attention}o_proj.weight",
                (hidden, heads * head_dim),
                dtype,
                layer,
                Split(1, head_dim, "query"),
            ),
            Parameter(f"{at}input_layernorm.weight", (hidden,), torch.float32, layer),
        ]
        if experts:
            block = f"{at}mlp.experts."
            fused = (f"{block}gate_proj", f"{block}up_proj")
            parameters += [
                Parameter(name, (experts, wide, hidden), dtype, layer, Split(1), True)
                for name in fused
            ]
            parameters.append(
                Parameter(
                    f"{block}down_proj", (experts, hidden, wide), dtype, layer, Split(2), True
                )
            )
            tensors.append(Tensor(f"{block}gate_up_proj", fused, 1))
        else:
            for name, shape, dim in (
                ("gate", (wide, hidden), 0),
                ("up", (wide, hidden), 0),
                ("down", (hidden, wide), 1),
            ):
                parameters.append(
                    Parameter(f"{at}mlp.{name}_proj.weight", shape, dtype, layer, Split(dim))
                )
    if not tied:
        parameters.append(Parameter("lm_head.weight", (vocab, hidden), dtype, split=Split(0)))
    in_fused = {part for tensor in tensors for part in tensor.parts}
    tensors += [Tensor(p.name, (p.name,)) for p in parameters if p.name not in in_fused]
    ties = (("lm_head.weight", "model.embed_tokens.weight"),) if tied else ()
    return ModelState(tuple(parameters), tuple(tensors), layers, heads, kv_heads, ties)


@st.composite
def layouts(draw: st.DrawFn, state: ModelState, world: int | None = None) -> Layout:
    """Layouts of ``world`` ranks (None: up to 12) that fit ``state``."""
    world = world or draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    experts = any(parameter.expert for parameter in state.parameters)
    left = world
    sizes = {}
    for axis in draw(st.permutations(["dp_replicate", "dp_shard", "tp", "pp"])):
        sizes[axis] = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        left //= sizes[axis]
    sizes["dp_replicate"] *= left
    sizes["vpp"] = draw(st.integers(1, 3)) if sizes["pp"] > 1 else 1
    ep = draw(st.integers(1, 6)) if experts else 1
    etp = draw(st.sampled_from([None, 1, 2]))
    order = draw(st.sampled_from(["inner", "outer"]))
    for choice in (
        {**sizes, "ep": ep, "etp": etp, "ep_order": order},
        sizes,
        {"dp_replicate": world},
    ):
        try:
            layout = Layout(**choice)
            place(state, layout)
        except LayoutError:
            continue
        return layout
    raise AssertionError("replicas fit every model")
