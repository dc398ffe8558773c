"""Matrix products of training in float32 on a CPU, by oneDNN.

torch computes them by MKL, which uses 256-bit instructions on processors of other makers than Intel; oneDNN asks the
processor what it has.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def use_onednn(model: nn.Module) -> None:
    """Compute the linear layers of ``model``, and their gradients, by :func:`linear`, unless their forward was replaced
    before."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As torch's ``linear``, up to the order of sums, by the fastest matrix product for the dtype and the device."""
    if not _by_onednn(x, weight):
        return nn.functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a`` [n, k] @ ``b`` [k, m], without a gradient. ``b`` may be a transposed view; such an ``a`` is copied."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "") if _by_onednn(a, b) else a @ b  # type: ignore[no-any-return]


def _forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return linear(input, module.weight, module.bias)


def _by_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether both are plain float32 tensors on a CPU: tensor-parallel ranks have DTensors."""
    plain = type(x) is torch.Tensor and type(weight) in (torch.Tensor, nn.Parameter)
    wide = x.dtype == weight.dtype == torch.float32
    return plain and wide and x.device.type == "cpu" and x.numel() > 0 and torch.backends.mkldnn.is_available()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        gradient = gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            to_x = product(gradient, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = product(gradient.t(), x.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum(0)
        return to_x, to_weight, to_bias
