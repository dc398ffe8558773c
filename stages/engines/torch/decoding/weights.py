"""The weights of a decoder: checked, prepared beside the running ones, and exchanged.

    new weights ─▶ check: names, shapes, dtypes ─▶ prepare: a second set on the device ─▶ install: at a token boundary

On CPU the weights of linear layers are kept in oneDNN's blocked layout: in float32, a step of 64
rows of a model with 135M parameters takes 92 ms instead of 140 in linear layers (2 cores).
Elsewhere they are the modules' own parameters, and new ones are copied in place, where recorded
steps read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stages.adapters.options import AdapterOptions
from stages.engines.checks import Layout, check_weights, layout_of
from stages.engines.protocols import WeightMismatch
from stages.engines.torch.decoding.adapters import OWN, AdapterSets
from stages.engines.torch.decoding.llama_forward import (
    LlamaForward,
    PackedLinear,
    Place,
    own_places,
)
from stages.resharding.tensors import separate

if TYPE_CHECKING:
    from stages.engines.torch.decoding.adapter_products import AdapterSet

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
        self.adapters = AdapterSets(model)
        self._options = adapters
        self._layout: Layout = layout_of(dict(model.named_parameters()))
        if adapters is not None:
            from stages.adapters.names import adapter_shapes

            shapes = adapter_shapes(model, adapters)
            self._layout = {name: (shape, model.dtype) for name, shape in shapes.items()}
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
        self.adapters.lay_out(linears or (llama.linears() if llama is not None else []))
        if self._options is not None:
            zeros = {name: torch.empty(shape) for name, (shape, _) in self._layout.items()}
            adapters = self.adapters.make(zeros, self._options.scale)
            self.adapters.put(OWN, adapters)
            self._places = adapters.places

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
        if self._options is not None:
            tensors |= {
                place.names[0]: getattr(place.holder, place.attribute) for place in self._places
            }
        return tensors | {n: p.detach() for n, p in self.model.named_parameters() if n not in parts}

    @torch.no_grad()
    def prepare(self, weights: Mapping[str, torch.Tensor]) -> WeightSet:
        """Copy ``weights`` to the device, in the layout that is computed with, while the present
        ones are in use."""
        return self._built(self._places, weights)

    @torch.no_grad()
    def prepare_adapters(
        self, name: str, weights: Mapping[str, torch.Tensor], scale: float
    ) -> tuple[AdapterSet, WeightSet]:
        """Return the set ``name``, a new one of zeros where there is none, and copies of
        ``weights`` for it. Raises WeightMismatch."""
        offered = self.adapters.make(weights, scale)
        present = self.adapters.of(name) or offered
        if present.options != offered.options:
            raise WeightMismatch(
                f"adapters {name!r} have another rank, scale or other layers than before; "
                "remove them first"
            )
        return present, self._built(present.places, weights)

    def _built(self, places: Sequence[Place], weights: Mapping[str, torch.Tensor]) -> WeightSet:
        device = self.model.device
        return [
            (
                place.holder,
                place.attribute,
                place.build([weights[n].detach().to(device) for n in place.names]),
            )
            for place in places
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
