"""The output layer of a language model in float32, whatever dtype its weights have.

A logit of 30 in bfloat16 is one of 16, 16.125, …, 31.875: two engines that differ in the last bit of a hidden state would
differ by 0.125 in a logprob. The products of two bfloat16 numbers are exact in float32, so only the sum is rounded there.
"""

from __future__ import annotations

import torch
from torch import nn

from stages import device

PIECE = 2**20  # weights that are held in float32 at once where the device has no matmul with float32 output: 4 MiB


@torch.no_grad()
def float32_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Logits float32 [..., V] of ``hidden`` [..., d] by ``weight`` [V, d] and ``bias`` [V], without a gradient. In float32
    this is ``linear``, bit for bit."""
    if weight.dtype == torch.float32:
        return nn.functional.linear(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if device.multiplies_into_float32(hidden.device):
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:
        logits = _by_pieces(rows.float(), weight)
    if bias is not None:
        logits += bias
    return logits.view(*hidden.shape[:-1], len(weight))


def _by_pieces(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    logits = rows.new_empty(len(rows), len(weight))
    size = max(1, PIECE // weight.shape[1])
    for start in range(0, len(weight), size):
        part = slice(start, start + size)
        torch.mm(rows, weight[part].float().t(), out=logits[:, part])
    return logits


def use_float32(head: nn.Linear) -> None:
    """From now on ``head`` gives float32 logits; its parameters stay as they are, and learn nothing."""
    head.forward = lambda input: float32_logits(input, head.weight, head.bias)  # type: ignore[method-assign]
