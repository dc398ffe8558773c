"""The layers of a model that have an adapter, and the names of its two matrices in the model.

q_proj.weight ─▶ q_proj.base_layer.weight   q_proj.lora_A.default.weight   q_proj.lora_B.default.weight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stages.adapters.options import AdapterOptions
from stages.model.load import checkpoint_tensors

Shapes = dict[str, tuple[int, ...]]


def down_of(layer: str) -> str:
    """Return the name of A, [rank, in], of the layer of this name."""
    return f"{layer}.lora_A.default.weight"


def up_of(layer: str) -> str:
    """Return the name of B, [out, rank], of the layer of this name."""
    return f"{layer}.lora_B.default.weight"


def adapted_layers(model: Any, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the (inputs, outputs) of each linear layer of ``model`` that ``targets`` of
    :class:`AdapterOptions` mean, by name. The model may be on the device ``meta``. Where its
    checkpoints have experts one by one, layers with the names of an expert's are none of them: peft
    takes these names for the experts. Raises ValueError for a target that is no such layer."""
    head = head_name(model)
    parts = _names_of_parts(model)
    modules = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] not in parts}
    linear = {n: m for n, m in modules.items() if type(m) is nn.Linear}
    before_head = linear.keys() - {head}
    for target in targets:
        if not any(_is_meant(name, [target]) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in before_head})) or "none"
            raise ValueError(
                f"{target!r} is no linear layer of {type(model).__name__} before its "
                f"head; it has {known}"
            )
    if not before_head:
        raise ValueError(f"{type(model).__name__} has no linear layers before its head")
    return {
        n: (m.in_features, m.out_features)
        for n, m in linear.items()
        if (_is_meant(n, targets) if targets else n != head)
    }


def head_name(model: Any) -> str:
    """Return the name of the output head of ``model``; "" where that is no linear layer."""
    head = model.get_output_embeddings()
    names = (name for name, module in model.named_modules() if module is head)
    return next(names, "") if type(head) is nn.Linear else ""


def _names_of_parts(model: Any) -> set[str]:
    """Last names of the layers that are parts of a tensor in ``model``, as experts' are."""
    shapes = {
        name: torch.empty(value.shape, device="meta") for name, value in model.named_parameters()
    }
    parts = checkpoint_tensors(model, shapes).keys() - shapes.keys()
    return {name.removesuffix(".weight").rpartition(".")[2] for name in parts}


def _is_meant(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def adapter_shapes(model: Any, options: AdapterOptions) -> Shapes:
    """Return the shape of each matrix of the adapters on ``model``, which has none yet, by name.

    Raises ValueError.
    """
    shapes: Shapes = {}
    for layer, (inputs, outputs) in adapted_layers(model, options.targets).items():
        shapes |= {down_of(layer): (options.rank, inputs), up_of(layer): (outputs, options.rank)}
    return shapes


def peft_config(model: Any, options: AdapterOptions) -> dict[str, Any]:
    """Return the content of peft's ``adapter_config.json`` for adapters on ``model``, which has
    none yet.

    Raises ValueError.
    """
    layers = adapted_layers(model, options.targets)
    ends = {name.rpartition(".")[2] for name in layers}
    all_meant = all(n in layers for n, _ in model.named_modules() if n.rpartition(".")[2] in ends)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(getattr(model, "name_or_path", "")) or None,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "target_modules": sorted(ends) if all_meant else sorted(layers),
        "bias": "none",
    }
