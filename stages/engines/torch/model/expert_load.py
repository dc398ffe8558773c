"""The experts of a model, and how many tokens each of them gets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the modules of ``model`` that hold a layer's experts, stacked along dimension 0.
    Their forward takes tokens [T, H], the experts of each [T, k], and the experts' weights [T, k].
    """
    stacked = ((module, module._parameters.get("down_proj")) for module in model.modules())
    return [module for module, down in stacked if down is not None and down.ndim == 3]


class ExpertLoad:
    """Counts each expert's tokens inside ``with``: ``counts`` int64 [layers, experts], of this
    process."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        modules = expert_modules(model)
        experts = max((module.num_experts for module in modules), default=0)
        self.counts = torch.zeros(len(modules), experts, dtype=torch.int64).to(device)
        self._on = False
        for layer, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._count, layer))

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *error: object) -> None:
        self._on = False

    def _count(self, layer: int, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        is_recomputed = torch._C._current_graph_task_id() >= 0  # by a backward pass
        if self._on and not is_recomputed:
            experts = arguments[1].flatten()
            self.counts[layer] += torch.bincount(experts, minlength=self.counts.shape[1])

    def metrics(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return ``max_expert_load``: tokens of the expert that got most, over those of the mean
        expert of its layer; the largest of all layers. ``total`` adds up over ranks."""
        if not len(self.counts):
            return {}
        counts = total(self.counts).cpu().double()
        return {"max_expert_load": float((counts.amax(1) / counts.mean(1)).max())}
