"""Adapters beside the linear layers of a decoder, in sets by name.

    names of the sets of a forward's tokens ─▶ select ─▶ linear.adapter of every linear layer
        all ""        None: nothing more is computed (or the decoder's own adapters)
        all one set   its JoinedAdapter
        several       MixedAdapter: of each set the product for its own tokens

Adapters keep the weights W of the base: x·Wᵀ + (x·Aᵀ)·Bᵀ, not merged. Merged weights would need no
further product in a decode step, but a second copy of W to return from, and in bfloat16 most small
changes of W would be rounded away. docs/measurements/lora.md has both, measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages import device as devices
from stages.engines.checks import check_adapters
from stages.engines.torch.decoding.llama_forward import PackedLinear, Place

OWN = ""  # the name of the decoder's own weights
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
        from stages.adapters.names import down_of, up_of

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


class AdaptableModule:
    """A linear layer of the model's own modules. ``adapter``: as in :class:`PackedLinear`;
    ``dtype``: of what it returns."""

    def __init__(self, module: nn.Linear, dtype: torch.dtype) -> None:
        self.layers = (module,)
        self.dtype = dtype
        self._plain = module.forward

    @property
    def adapter(self) -> JoinedAdapter | MixedAdapter | None:
        return self._adapter

    @adapter.setter
    def adapter(self, adapter: JoinedAdapter | MixedAdapter | None) -> None:
        self._adapter = adapter
        plain = self._plain
        self.layers[0].forward = (  # type: ignore[method-assign]
            plain if adapter is None else lambda input: adapter.add_to(plain(input), input)
        )


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


class AdapterSets:
    """The sets of adapters beside the linear layers of ``model``, which are not replaced yet."""

    def __init__(self, model: Any) -> None:
        self._layers = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
        self._head = model.get_output_embeddings()
        self._names = {id(module): name for name, module in self._layers.items()}
        self._linears: list[Any] = []
        self._sets: dict[str, AdapterSet] = {}
        self._selected: str | Sequence[str] | None = OWN  # a name, or several
        self._runs: object = None  # of which self._orders are
        self._orders: dict[int, tuple[torch.Tensor, list[int]]] = {}

    def lay_out(self, joined: Sequence[Any]) -> None:
        """Take note of the linear layers that are computed ``joined``; others are modules of the
        model."""
        ids = {id(layer) for linear in joined for layer in linear.layers}
        rest = [module for module in self._layers.values() if id(module) not in ids]
        self._linears = [*joined, *(AdaptableModule(m, self._returns(m)) for m in rest)]

    def _returns(self, module: nn.Linear) -> torch.dtype:
        return torch.float32 if module is self._head else module.weight.dtype  # logits are float32

    def make(self, weights: Mapping[str, torch.Tensor], scale: float) -> AdapterSet:
        """Return a set of zeros for ``weights``. Raises WeightMismatch where they are none of
        adapters on linear layers of the model."""
        sizes = {name: (each.in_features, each.out_features) for name, each in self._layers.items()}
        rank, layers = check_adapters(weights, sizes)
        return AdapterSet(self._linears, self._names, layers, rank, scale)

    def of(self, name: str) -> AdapterSet | None:
        return self._sets.get(name)

    def put(self, name: str, adapters: AdapterSet) -> None:
        self._sets[name] = adapters
        self._use(None)

    def remove(self, name: str) -> None:
        del self._sets[name]
        self._use(None)

    def select(
        self, names: Sequence[str], counts: Sequence[int] | None, device: torch.device
    ) -> bool:
        """Compute the next forward with the sets of these ``names``: each for a run of ``counts``
        tokens (None: of one), the last of which has logits. Returns whether they are several."""
        if not self._sets:
            return False
        if names.count(names[0]) == len(names):
            self._use(names[0])
            return False
        present = sorted(set(names))
        runs = (list(names), counts)
        if runs != self._runs or present != self._selected:
            of_run = torch.tensor([present.index(name) for name in names])
            of_token = of_run if counts is None else of_run.repeat_interleave(torch.tensor(counts))
            self._orders.clear()
            for numbers in (of_run, of_token):
                order = devices.put(numbers.argsort(stable=True), device)
                self._orders[len(numbers)] = order, numbers.bincount().tolist()
            self._runs = runs
        if present != self._selected:
            sets = [self._sets.get(name) for name in present]
            for at, linear in enumerate(self._linears):
                adapters = [None if each is None else each.adapters[at] for each in sets]
                linear.adapter = MixedAdapter(adapters, self._orders) if any(adapters) else None
            self._selected = present
        return True

    def _use(self, name: str | None) -> None:
        """Compute with the set ``name``; None: with none, before one is selected."""
        if name == self._selected:
            return
        adapters = self._sets.get(name or OWN)
        for at, linear in enumerate(self._linears):
            linear.adapter = None if adapters is None else adapters.adapters[at]
        self._selected = name
