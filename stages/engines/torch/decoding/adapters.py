"""Adapters beside the linear layers of a decoder, which keeps the weights W of the base: x·Wᵀ + (x·Aᵀ)·Bᵀ, not merged.

Merged weights would need no further product in a decode step, but a second copy of W to return from, and in bfloat16 most
small changes of W would be rounded away. docs/measurements/lora.md has both, measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stages.adapters.names import adapter_shapes, down_of, up_of
from stages.adapters.options import AdapterOptions
from stages.engines.checks import Layout
from stages.engines.torch.decoding.llama_forward import Place


class JoinedAdapter:
    """The adapters of linear layers with the same input, as two matrices: ``down`` [R, in], and ``up`` [out, R] in which
    each layer with an adapter has its own columns, times the adapters' scale."""

    def __init__(self, layers: Sequence[nn.Linear], has: Sequence[bool], rank: int, scale: float) -> None:
        self._rows = [layer.out_features for layer in layers]
        self._has, self._rank, self._scale = has, rank, scale
        like, width = layers[0].weight, rank * sum(has)
        self.down, self.up = like.new_zeros(width, layers[0].in_features), like.new_zeros(sum(self._rows), width)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``out`` [T, out] with the adapters' outputs for ``x`` [T, in] added."""
        return out + nn.functional.linear(nn.functional.linear(x, self.down), self.up)

    def places(self, downs: Sequence[str], ups: Sequence[str]) -> Iterator[Place]:
        """Where the matrices of these names are kept."""
        yield Place(tuple(downs), self, "down", lambda parts: torch.cat(parts))
        yield Place(tuple(ups), self, "up", self._diagonal)

    def _diagonal(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        up, row, rest = torch.zeros_like(self.up), 0, list(parts)
        for at, (rows, has) in enumerate(zip(self._rows, self._has, strict=True)):
            if has:
                column = self._rank * sum(self._has[:at])
                up[row : row + rows, column : column + self._rank] = rest.pop(0) * self._scale
            row += rows
        return up


class DecoderAdapters:
    """The adapters of ``options`` on ``model``, whose linear layers are not replaced yet. Raises ValueError."""

    def __init__(self, model: Any, options: AdapterOptions) -> None:
        self._options = options
        self.layout: Layout = {name: (shape, model.dtype) for name, shape in adapter_shapes(model, options).items()}

    def put_beside(self, linears: Sequence[Any], model: Any, names: Mapping[int, str]) -> list[Place]:
        """Give each of ``linears``, layers that are computed together, an adapter where one of them has it, and each linear
        layer of ``model`` that is in none of them. ``names``: of parameters, by id. Returns where the matrices are kept."""
        joined = {id(layer) for linear in linears for layer in linear.layers}
        places: list[Place] = []
        for linear in linears:
            adapter, found = self._adapter(linear.layers, names)
            if adapter is not None:
                linear.adapter = adapter
                places += found
        for module in model.modules():
            if type(module) is nn.Linear and id(module) not in joined:
                adapter, found = self._adapter([module], names)
                if adapter is not None:
                    module.forward = partial(_adapted, module, adapter)  # type: ignore[method-assign]
                    places += found
        return places

    def _adapter(
        self, layers: Sequence[nn.Linear], names: Mapping[int, str]
    ) -> tuple[JoinedAdapter | None, list[Place]]:
        of = [names[id(layer.weight)].removesuffix(".weight") for layer in layers]
        has = [down_of(name) in self.layout for name in of]
        if not any(has):
            return None, []
        adapter = JoinedAdapter(layers, has, self._options.rank, self._options.scale)
        named = [name for name, adapted in zip(of, has, strict=True) if adapted]
        return adapter, list(adapter.places([down_of(n) for n in named], [up_of(n) for n in named]))


def _adapted(module: nn.Linear, adapter: JoinedAdapter, x: torch.Tensor) -> torch.Tensor:
    return adapter.add_to(nn.functional.linear(x, module.weight, module.bias), x)
