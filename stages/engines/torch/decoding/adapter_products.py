"""The products of adapters beside linear layers. Imported where a decoder gets adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages.adapters.names import down_of, up_of
from stages.engines.torch.decoding.llama_forward import PackedLinear, Place

ONEDNN_TOKENS = 32  # of fewer, torch's products take less time than calls of oneDNN (measured)


class JoinedAdapter:
    """The adapters of the linear layers of ``linear``, which have the same input, as two matrices:
    ``down`` [R, in], and ``up`` [out, R] in which each layer that ``has`` one has its own columns,
    times ``scale``. They are zeros at first."""

    def __init__(self, linear: Any, has: Sequence[bool], rank: int, scale: float) -> None:
        self._rows = [layer.out_features for layer in linear.layers]
        self._has = has
        self._rank = rank
        self._scale = scale
        self._packed = isinstance(linear, PackedLinear)
        like = linear.layers[0].weight
        dtype = linear.dtype
        width = rank * sum(has)
        self.down = like.new_zeros(width, linear.layers[0].in_features, dtype=dtype)
        self.up = like.new_zeros(sum(self._rows), width, dtype=dtype)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``out`` [..., T, out], which may be overwritten, with the adapters' outputs for
        ``x`` [..., T, in] added."""
        if self._packed and x.shape[-2] >= ONEDNN_TOKENS:
            inner = torch.ops.mkldnn._linear_pointwise(x, self.down, None, "none", [], "")
            return torch.ops.mkldnn._linear_pointwise.binary(inner, out, self.up, None, "add")
        inner = nn.functional.linear(x.to(self.down.dtype), self.down)
        if x.dim() == 2 and out.dtype == inner.dtype:
            return out.addmm_(inner, self.up.t())
        return out + nn.functional.linear(inner, self.up)

    def places(self, layers: Sequence[str]) -> Iterator[Place]:
        """Return the places of the matrices of the ``layers`` that have an adapter."""
        yield Place(tuple(map(down_of, layers)), self, "down", self._stacked)
        yield Place(tuple(map(up_of, layers)), self, "up", self._diagonal)

    def _stacked(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)).to(self.down.dtype)

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


@dataclass(eq=False)
class MixedAdapter:
    """The adapters of several sets beside one linear layer. ``orders``: by the number of tokens
    that the layer gets, their order int64 [T] by sets, and how many each set has."""

    adapters: Sequence[JoinedAdapter | None]
    orders: Mapping[int, tuple[torch.Tensor, list[int]]]

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``out`` [..., T, out], overwritten, with the outputs for ``x`` [..., T, in] of
        each token's own set added. Raises RuntimeError in a layer that does not get all tokens."""
        inputs = x.flatten(0, -2)
        outputs = out.flatten(0, -2)
        if len(inputs) not in self.orders:
            raise RuntimeError(
                f"a layer with adapters gets {len(inputs)} of {max(self.orders)} tokens: sets of "
                "adapters cannot share a forward of this model"
            )
        order, counts = self.orders[len(inputs)]
        parts = zip(
            self.adapters,
            outputs.index_select(0, order).split(counts),
            inputs.index_select(0, order).split(counts),
            strict=True,
        )
        added = [
            part if adapter is None else adapter.add_to(part, inputs_of_set)
            for adapter, part, inputs_of_set in parts
        ]
        return outputs.index_copy_(0, order, torch.cat(added)).view_as(out)


class AdapterSet:
    """The adapters of one set: ``adapters`` has that of each of ``linears``, or None, and
    ``places`` where its matrices are kept. ``layers``: names of those that have one, of all
    ``names`` by id."""

    def __init__(
        self,
        linears: Sequence[Any],
        names: Mapping[int, str],
        layers: set[str],
        rank: int,
        scale: float,
    ) -> None:
        self.adapters: list[JoinedAdapter | None] = []
        self.places: list[Place] = []
        self.options = (rank, scale, layers)
        for linear in linears:
            joined = [names[id(layer)] for layer in linear.layers]
            has = [name in layers for name in joined]
            adapter = JoinedAdapter(linear, has, rank, scale) if any(has) else None
            self.adapters.append(adapter)
            if adapter is not None:
                self.places += adapter.places([name for name in joined if name in layers])
