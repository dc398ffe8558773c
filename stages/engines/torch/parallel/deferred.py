"""Gradients of the matrices of linear layers that are computed after the backward pass: "W" of
zero-bubble schedules.

    backward ("B"): gradient of the input, at once; (input, gradient of the output) is kept
    later ("W"):    gradient of the matrix from them ─▶ FSDP, which scatters a layer's gradients then

Those of norms, of stacked experts, and of the output head are computed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stages.engines.torch.layers import linear, product
from stages.parallel.schedules import Action

Kept = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor
]  # weight, bias, input, gradient of the output


class DeferredGradients:
    """Defers those of the linear layers in ``layers``, whose modules FSDP gathers."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self._now: list[Kept] = []
        self._kept: dict[Action, list[Kept]] = {}
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    module.forward = partial(_forward, module, self._now)  # type: ignore[method-assign]
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(False, recurse=False)

    def keep(self, action: Action) -> None:
        """Keep what the backward pass ``action`` has left to do."""
        self._kept[action] = list(self._now)
        self._now.clear()

    @torch.no_grad()
    def compute(self, action: Action, units: Sequence[Any]) -> None:
        """Compute what :meth:`keep` has kept of the pass before ``action``, and add up the
        gradients of ``units``, the modules that FSDP gathers, over their ranks."""
        for weight, bias, x, gradient in self._kept.pop(action.needs):
            rows = gradient.flatten(0, -2)
            _add(weight, product(rows.t(), x.flatten(0, -2)))
            if bias is not None:
                _add(bias, rows.sum(0))
        for unit in reversed(units):  # as torch's own pipeline stages do it
            unit.set_requires_gradient_sync(True, recurse=False)
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                # others' gradients are kept in the dtype that is scattered
                for parameter in group.fsdp_params:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()
                group.post_backward()
            unit.set_requires_gradient_sync(False, recurse=False)
        units[0]._get_fsdp_state()._root_post_backward_final_callback()


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _forward(module: nn.Linear, kept: list[Kept], x: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(x, module.weight, module.bias, kept)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kept: list[Kept]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.kept = kept
        ctx.parameters = (weight, bias)  # activations computed again come with copies of parameters
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        ctx.kept.append((*ctx.parameters, x, gradients[0]))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return product(gradients[0].flatten(0, -2), weight).view(x.shape), None, None, None
