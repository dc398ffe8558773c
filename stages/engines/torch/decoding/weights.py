"""The weights of a decoder: checked, prepared beside the running ones, and exchanged.

    new weights ─▶ check: names, shapes, dtypes ─▶ prepare: a second set on the device ─▶ install: at a token boundary

On CPU the weights of linear layers are kept in oneDNN's blocked layout: in float32, a step of 64
rows of a model with 135M parameters takes 92 ms instead of 140 in linear layers (2 cores).
Elsewhere they are the modules' own parameters, and new ones are copied in place, where recorded
steps read them.

Adapters stand beside linear layers, which keep the weights W of the base: x·Wᵀ + (x·Aᵀ)·Bᵀ, not
merged. Merged weights would need no further product in a decode step, but a second copy of W to
return from, and in bfloat16 most small changes of W would be rounded away.
docs/measurements/lora.md has both, measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stages.adapters.options import AdapterOptions
from stages.engines.checks import Layout, check_weights, layout_of
from stages.engines.torch.decoding.llama_forward import (
    LlamaForward,
    PackedLinear,
    Place,
    own_places,
)
from stages.resharding.tensors import separate

WeightSet = list[tuple[Any, str, torch.Tensor]]  # holder, attribute, its new tensor


class DecoderWeights:
    """The parameters of ``model``.

    ``packed``: linear layers are copied into oneDNN's layout. ``adapters``: new weights are those
    of adapters, and the model's own stay. Raises ValueError for adapters that the model cannot
    have.
    """

    def __init__(self, model: Any, packed: bool, adapters: AdapterOptions | None = None) -> None:
        self.model = model
        self.packed = packed
        self._adapters = None if adapters is None else DecoderAdapters(model, adapters)
        self._layout = (
            self._adapters.layout if self._adapters else layout_of(dict(model.named_parameters()))
        )
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._llama: LlamaForward | None = None

    def lay_out(self, llama: LlamaForward | None) -> None:
        """Decide where each parameter is kept: for ``llama``, or for the model's own modules when
        it is None."""
        self._llama = llama
        linears: list[Any] = []
        if self.packed:
            linears = llama.linears() if llama is not None else self._pack_modules()
        layers = [layer for linear in linears for layer in linear.layers]
        module_places = own_places(
            [module for module in self.model.modules() if module not in layers], self._names
        )
        self._places = [
            place for linear in linears for place in linear.places(self._names)
        ] + module_places
        if self.packed:  # the file that they were mapped from would stay in memory with them
            separate(getattr(place.holder, place.attribute) for place in module_places)
        if self._adapters is not None:
            joined = linears or (llama.linears() if llama is not None else [])
            self._places = self._adapters.put_beside(joined, self.model, self._names)

    def check(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise ``WeightMismatch`` unless ``weights`` have names, shapes and dtypes of the
        parameters, or the adapters."""
        check_weights(weights, self._layout)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the decoder computes with, which the caller may write between two
        calls.

        Their names are those of Hugging Face, and of vLLM where several parameters are one tensor.
        Raises ValueError when they are packed.
        """
        if self.packed:
            raise ValueError(
                "packed: the weights are copies in oneDNN's layout; make the decoder "
                "with packed=False"
            )
        tensors = dict[str, torch.Tensor]()
        parts = set[str]()
        for linear in self._llama.linears() if self._llama else ():
            for kind, whole in (("weight", linear.weight), ("bias", linear.bias)):
                if whole is not None:
                    names = [self._names[id(getattr(layer, kind))] for layer in linear.layers]
                    tensors[
                        names[0]
                        .replace(".q_proj.", ".qkv_proj.")
                        .replace(".gate_proj.", ".gate_up_proj.")
                    ] = whole
                    parts.update(names)
        if self._adapters is not None:
            tensors |= {
                place.names[0]: getattr(place.holder, place.attribute) for place in self._places
            }
        return tensors | {n: p.detach() for n, p in self.model.named_parameters() if n not in parts}

    @torch.no_grad()
    def prepare(self, weights: Mapping[str, torch.Tensor]) -> WeightSet:
        """Copy ``weights`` to the device, in the layout that is computed with, while the present
        ones are in use."""
        device = self.model.device
        return [
            (
                place.holder,
                place.attribute,
                place.build([weights[n].detach().to(device) for n in place.names]),
            )
            for place in self._places
        ]

    def install(self, prepared: WeightSet) -> list[torch.Tensor]:
        """Use ``prepared`` from the next forward on; computed keys and values stay.

        Returns the replaced tensors: freeing them takes longer than the exchange, so the caller
        does it in another thread.
        """
        replaced = []
        for holder, attribute, tensor in prepared:
            current = getattr(holder, attribute)
            if not self.packed:
                current.data.copy_(tensor)
                replaced.append(tensor)
            elif isinstance(current, nn.Parameter):
                replaced.append(current.data)
                current.data = tensor
            else:
                replaced.append(current)
                setattr(holder, attribute, tensor)
        return replaced

    def _pack_modules(self) -> list[PackedLinear]:
        """Replace the model's linear layers."""
        head = None if self.model.dtype == torch.float32 else self.model.get_output_embeddings()
        uses = Counter(
            id(parameter) for _, parameter in self.model.named_parameters(remove_duplicate=False)
        )
        packed = []
        for name, module in list(self.model.named_modules()):
            if type(module) is nn.Linear and module is not head:
                packed.append(PackedLinear(module, shared=uses[id(module.weight)] > 1))
                parent, _, attribute = name.rpartition(".")
                setattr(self.model.get_submodule(parent), attribute, packed[-1])
        return packed


class JoinedAdapter:
    """The adapters of linear layers with the same input, as two matrices: ``down`` [R, in], and
    ``up`` [out, R] in which each layer with an adapter has its own columns, times the adapters'
    scale."""

    def __init__(
        self, layers: Sequence[nn.Linear], has: Sequence[bool], rank: int, scale: float
    ) -> None:
        self._rows = [layer.out_features for layer in layers]
        self._has = has
        self._rank = rank
        self._scale = scale
        like = layers[0].weight
        width = rank * sum(has)
        self.down, self.up = (
            like.new_zeros(width, layers[0].in_features),
            like.new_zeros(sum(self._rows), width),
        )

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``out`` [T, out] with the adapters' outputs for ``x`` [T, in] added."""
        return out + nn.functional.linear(nn.functional.linear(x, self.down), self.up)

    def places(self, downs: Sequence[str], ups: Sequence[str]) -> Iterator[Place]:
        """Return the places of the matrices of these names."""
        yield Place(tuple(downs), self, "down", lambda parts: torch.cat(parts))
        yield Place(tuple(ups), self, "up", self._diagonal)

    def _diagonal(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        up = torch.zeros_like(self.up)
        row = 0
        rest = list(parts)
        for at, (rows, has) in enumerate(zip(self._rows, self._has, strict=True)):
            if has:
                column = self._rank * sum(self._has[:at])
                up[row : row + rows, column : column + self._rank] = rest.pop(0) * self._scale
            row += rows
        return up


class DecoderAdapters:
    """The adapters of ``options`` on ``model``, whose linear layers are not replaced yet.

    Raises ValueError.
    """

    def __init__(self, model: Any, options: AdapterOptions) -> None:
        from stages.adapters.names import adapter_shapes

        self._options = options
        self.layout: Layout = {
            name: (shape, model.dtype) for name, shape in adapter_shapes(model, options).items()
        }

    def put_beside(
        self, linears: Sequence[Any], model: Any, names: Mapping[int, str]
    ) -> list[Place]:
        """Give each of ``linears``, layers that are computed together, an adapter where one of them
        has it, and each linear layer of ``model`` that is in none of them. ``names``: of
        parameters, by id. Returns where the matrices are kept."""
        joined = {id(layer) for linear in linears for layer in linear.layers}
        places: list[Place] = []
        for linear in linears:
            adapter, adapter_places = self._adapter(linear.layers, names)
            if adapter is not None:
                linear.adapter = adapter
                places += adapter_places
        for module in model.modules():
            if type(module) is nn.Linear and id(module) not in joined:
                adapter, adapter_places = self._adapter([module], names)
                if adapter is not None:
                    module.forward = partial(_adapted, module, adapter)  # type: ignore[method-assign]
                    places += adapter_places
        return places

    def _adapter(
        self, layers: Sequence[nn.Linear], names: Mapping[int, str]
    ) -> tuple[JoinedAdapter | None, list[Place]]:
        from stages.adapters.names import down_of, up_of

        layer_names = [names[id(layer.weight)].removesuffix(".weight") for layer in layers]
        has = [down_of(name) in self.layout for name in layer_names]
        if not any(has):
            return None, []
        adapter = JoinedAdapter(layers, has, self._options.rank, self._options.scale)
        adapted_names = [name for name, adapted in zip(layer_names, has, strict=True) if adapted]
        return adapter, list(
            adapter.places([down_of(n) for n in adapted_names], [up_of(n) for n in adapted_names])
        )


def _adapted(module: nn.Linear, adapter: JoinedAdapter, x: torch.Tensor) -> torch.Tensor:
    return adapter.add_to(nn.functional.linear(x, module.weight, module.bias), x)
