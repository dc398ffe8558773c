"""A forward for Llama-like models (Llama, Mistral, Qwen2, Qwen3, SmolLM, …) in few calls.

    ids ─▶ embedding ─▶ layers: norm ▸ qkv ▸ rotate ▸ attend ▸ out + residual ▸ norm ▸ gate, up ▸ down + residual
                                                                                   └▶ kept tokens ▸ norm ▸ logits

It computes with the weights of the transformers model. Compared with the model's own modules it
saves some forty Python calls per layer and several passes over memory: q, k and v are one matmul;
on CPU the activation, the product and the residual sum are part of the matmuls; the last layer
computes the kept tokens alone. :func:`is_llama` decides by the modules, not by the model's name,
and the caller compares the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# the layout that oneDNN chooses for so many rows is as fast as any from 1 row to 256 (measured)
PACK_ROWS = 64


@functools.cache
def can_pack_in(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of ``dtype`` on this CPU: bfloat16 needs AVX-512 or
    AVX-NE-CONVERT."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), PACK_ROWS)
    except RuntimeError:  # of a torch that was built without oneDNN too
        return False
    return True


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [T, H, D], key and value [T, KV heads, D]) -> [T, H * D]."""


@dataclass(frozen=True, eq=False)
class Place:
    """The place where parameters are kept: ``holder.attribute`` has the tensor that ``build`` makes
    from the parameters ``names``."""

    names: tuple[str, ...]
    holder: Any
    attribute: str
    build: Callable[[list[torch.Tensor]], torch.Tensor]


class PackedLinear(nn.Module):
    """Linear layers with the same input, joined to one weight in oneDNN's blocked layout (CPU
    only). ``dtype`` (None: the layers'): of the weight, the input and the output. The layers' own
    weights are freed, unless ``shared`` by others. ``adapter``: whose output is added
    (``decoding.adapters``)."""

    adapter: Any = None

    def __init__(
        self, *layers: nn.Linear, dtype: torch.dtype | None = None, shared: bool = False
    ) -> None:
        super().__init__()
        self._shared = shared
        self.layers = layers
        self.dtype = dtype or layers[0].weight.dtype
        self.packed = self.pack([layer.weight.detach() for layer in layers])
        self.bias = (
            self.join([layer.bias.detach() for layer in layers])
            if layers[0].bias is not None
            else None
        )

        for layer in () if shared else layers:
            layer.weight.data = layer.weight.data.new_empty(0)

    def unpack(self) -> None:
        """Give the layers their weights back."""
        parts = self.packed.to_dense().split([layer.out_features for layer in self.layers])
        for layer, part in () if self._shared else zip(self.layers, parts, strict=True):
            layer.weight.data = part.to(layer.weight.dtype)

    def forward(self, hidden: torch.Tensor, after: str = "none") -> torch.Tensor:
        """Return the linear layers' output. ``after``: "none", or "swish" of what is returned."""
        if self.adapter is None:
            return torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, after, [], "")
        out = torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")
        out = self.adapter.add_to(out, hidden)
        return nn.functional.silu(out, inplace=True) if after == "swish" else out

    def then(self, operation: str, hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return ``self(hidden)``, then ``add`` or ``mul`` with ``other`` in the same pass."""
        if self.adapter is not None and operation == "mul":
            return self(hidden).mul_(other)
        out = torch.ops.mkldnn._linear_pointwise.binary(
            hidden, other, self.packed, self.bias, operation
        )
        return out if self.adapter is None else self.adapter.add_to(out, hidden)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)).to(self.dtype)

    def pack(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(self.join(weights), PACK_ROWS)

    def places(self, names: Mapping[int, str]) -> Iterator[Place]:
        """Return the places of its parameters; ``names`` has their names by id."""
        yield Place(
            tuple(names[id(layer.weight)] for layer in self.layers), self, "packed", self.pack
        )
        if self.bias is not None:
            yield Place(
                tuple(names[id(layer.bias)] for layer in self.layers), self, "bias", self.join
            )


class JoinedLinear:
    """Linear layers with the same input as one weight in torch's layout. The modules' parameters
    become views of it. ``adapter``: as in :class:`PackedLinear`."""

    adapter: Any = None

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.dtype = layers[0].weight.dtype
        self.weight = _join([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else _join([layer.bias for layer in layers])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(hidden, self.weight, self.bias)
        return out if self.adapter is None else self.adapter.add_to(out, hidden)

    def then(self, operation: str, hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        assert operation == "add", operation
        return self(hidden).add_(other)


def _join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0]
    with torch.inference_mode(False):  # an ordinary tensor, which others may write to
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, view in zip(
            parameters, joined.split([len(p) for p in parameters]), strict=True
        ):
            parameter.data = view
    return joined


class _Layer:
    def __init__(self, layer: Any, packed: bool) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        linear: Any = PackedLinear if packed else JoinedLinear
        self.before = layer.input_layernorm
        self.between = layer.post_attention_layernorm
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.qkv = linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = linear(attention.o_proj)
        self.down = linear(mlp.down_proj)
        self.gates = (
            [linear(mlp.gate_proj), linear(mlp.up_proj)]
            if packed
            else [linear(mlp.gate_proj, mlp.up_proj)]
        )
        self.width: int = attention.head_dim
        self.kv_heads = attention.k_proj.out_features // self.width
        self.heads = attention.q_proj.out_features // self.width

    def gated(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``silu(gate(x)) * up(x)``: activation and product inside the packed matmuls, or
        one joined matmul."""
        if len(self.gates) == 2:
            gate, up = self.gates
            return up.then("mul", hidden, gate(hidden, "swish"))
        gate, up = self.gates[0](hidden).chunk(2, -1)
        return nn.functional.silu(gate) * up


class LlamaForward:
    """The forward of ``model``, for which :func:`is_llama` is true.

    ``packed``: linear layers are copied into oneDNN's layout; else the modules' parameters stay the
    weights.
    """

    def __init__(self, model: Any, packed: bool) -> None:
        self.embedding = model.model.embed_tokens
        self.norm = model.model.norm
        self.layers = [_Layer(layer, packed) for layer in model.model.layers]
        # Logits are float32 in any dtype: by a float32 copy of the head, or by the module, which
        # the decoder has changed.
        tied = model.lm_head.weight is self.embedding.weight
        self.head: Any = (
            PackedLinear(model.lm_head, dtype=torch.float32, shared=tied)
            if packed
            else model.lm_head
        )
        self.head_dtype = torch.float32 if packed else model.lm_head.weight.dtype
        rotary = model.model.rotary_emb
        self.frequencies = torch.cat([rotary.inv_freq, rotary.inv_freq]).float()
        self.half = len(rotary.inv_freq)
        self.amplitude = torch.full_like(self.frequencies, rotary.attention_scaling)
        self.signed = torch.cat([-self.amplitude[: self.half], self.amplitude[self.half :]])

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """Return the logits [K, V] of the tokens ``keep`` (all when None) among ``ids`` int64 [T]
        at ``positions`` [T]."""
        hidden = nn.functional.embedding(ids, self.embedding.weight)
        angles = positions[:, None, None].float() * self.frequencies
        cos = (angles.cos() * self.amplitude).to(hidden.dtype)
        sin = (angles.sin() * self.signed).to(hidden.dtype)
        for number, layer in enumerate(self.layers):
            joined = layer.qkv(_normed(layer.before, hidden)).view(len(ids), -1, layer.width)
            rotating = layer.heads + layer.kv_heads
            turned = joined[:, :rotating]
            value = joined[:, rotating:]
            if layer.q_norm is not None:
                query = turned[:, : layer.heads]
                key = turned[:, layer.heads :]
                turned = torch.cat([_normed(layer.q_norm, query), _normed(layer.k_norm, key)], 1)
            turned = (turned * cos).addcmul_(turned.roll(self.half, -1), sin)
            attended = attend(number, turned[:, : layer.heads], turned[:, layer.heads :], value)
            if keep is not None and number == len(self.layers) - 1:
                attended = attended[keep]
                hidden = hidden[keep]
            hidden = layer.out.then("add", attended, hidden)
            hidden = layer.down.then("add", layer.gated(_normed(layer.between, hidden)), hidden)
        return self.head(_normed(self.norm, hidden).to(self.head_dtype))

    def linears(self) -> list[Any]:
        """Return every :class:`PackedLinear` or :class:`JoinedLinear`."""
        linears = [
            linear
            for layer in self.layers
            for linear in (layer.qkv, layer.out, *layer.gates, layer.down)
        ]
        return [*linears, self.head] if isinstance(self.head, PackedLinear) else linears


def own_places(modules: Iterable[nn.Module], names: Mapping[int, str]) -> list[Place]:
    """Return the places of the modules' own parameters; shared parameters once."""
    places = {
        id(parameter): Place((names[id(parameter)],), module, attribute, copied)
        for module in modules
        for attribute, parameter in module.named_parameters(recurse=False)
    }
    return list(places.values())


def copied(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of the one weight."""
    (weight,) = weights
    return weight.clone()


def _normed(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def is_llama(model: Any) -> bool:
    """Return whether the modules of ``model`` that have parameters are those of a Llama: no
    parameter is left out of the forward. The caller compares what is computed between them."""
    body = getattr(model, "model", None)
    head = getattr(model, "lm_head", None)
    rotary = getattr(body, "rotary_emb", None)
    if body is None or rotary is None or type(head) is not nn.Linear:
        return False
    if not hasattr(rotary, "inv_freq") or not hasattr(rotary, "attention_scaling"):
        return False
    children = {name for name, _ in body.named_children()}
    if children != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    rotary_dim = 2 * len(rotary.inv_freq)
    return _is_rms(body.norm) and all(_is_llama_layer(layer, rotary_dim) for layer in body.layers)


QKV = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
GATE_UP = {"mlp.gate_proj", "mlp.up_proj"}
LINEARS = {*QKV, "self_attn.o_proj", *GATE_UP, "mlp.down_proj"}
NORMS = {"input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}


def _is_llama_layer(layer: nn.Module, rotating: int) -> bool:
    modules = {
        name: module
        for name, module in layer.named_modules()
        if [*module.parameters(recurse=False)]
    }
    if modules.keys() not in (LINEARS | NORMS, LINEARS | NORMS | HEAD_NORMS):
        return False
    return (
        all(type(modules[name]) is nn.Linear for name in LINEARS)
        and all(_is_rms(modules[name]) for name in modules.keys() - LINEARS)
        and all(
            len({modules[name].bias is None for name in joined}) == 1 for joined in (QKV, GATE_UP)
        )
        and getattr(layer.get_submodule("self_attn"), "head_dim", 0) == rotating
    )


def _is_rms(module: Any) -> bool:
    return [name for name, _ in module.named_parameters()] == ["weight"] and hasattr(
        module, "variance_epsilon"
    )
