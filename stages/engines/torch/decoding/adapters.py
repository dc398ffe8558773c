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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stages import device as devices
from stages.engines.checks import check_adapters

if TYPE_CHECKING:
    from stages.engines.torch.decoding.adapter_products import (
        AdapterSet,
        JoinedAdapter,
        MixedAdapter,
    )

OWN = ""  # the name of the decoder's own weights


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
        from stages.engines.torch.decoding.adapter_products import AdapterSet

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
            from stages.engines.torch.decoding.adapter_products import MixedAdapter

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
