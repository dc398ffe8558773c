"""The output layers of a model in float32, whatever dtype its weights have: logits, and the values
of a critic.

Between 16 and 32, bfloat16 numbers are 0.125 apart: a difference in the last bit of a hidden state
would change a logprob by as much. The product of two bfloat16 numbers is exact in float32, so only
the sum is rounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stages import device
from stages.adapters.options import is_adapted
from stages.engines.torch.model.layers import linear

# weights that are held in float32 at once where the device has no matmul with float32 output: 4 MiB
PIECE = 2**20


def logit_scale(config: Any) -> tuple[float, float | None]:
    """Return the divisor of the products of hidden states and head in a model of ``config``, and
    its softcap of them, or None."""
    text = config.get_text_config()
    divisor = float(getattr(text, "logits_scaling", None) or 1.0) / float(
        getattr(text, "logit_scale", None) or 1.0
    )
    return divisor, getattr(text, "final_logit_softcapping", None)


@torch.no_grad()
def float32_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits float32 [..., V] of ``hidden`` [..., d] by ``weight`` [V, d] and ``bias``
    [V], without a gradient. In float32 they are those of
    :func:`~stages.engines.torch.model.layers.linear`, bit for bit."""
    if weight.dtype == torch.float32:
        return linear(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if device.multiplies_into_float32(hidden.device):
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:
        logits = _by_pieces(rows.float(), weight)
    if bias is not None:
        logits += bias
    return logits.view(*hidden.shape[:-1], len(weight))


def head_adapter(
    head: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return, of the adapter of ``head``, alpha / rank · A·h float32 [..., rank] of ``hidden``
    [..., d], and B [V, rank]: their product is what it adds to the logits. None: it has none, or
    its adapter is off."""
    if not is_adapted(head) or head.disable_adapters:
        return None, None
    inner = linear(hidden.float(), head.lora_A["default"].weight.float(), None)
    return inner * head.scaling["default"], head.lora_B["default"].weight


def _by_pieces(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    logits = rows.new_empty(len(rows), len(weight))
    size = max(1, PIECE // weight.shape[1])
    for start in range(0, len(weight), size):
        part = slice(start, start + size)
        logits[:, part] = linear(rows, weight[part].float(), None)
    return logits


def use_float32(head: nn.Linear) -> None:
    """Make ``head`` return float32 logits. Its parameters stay unchanged and get no gradients."""
    head.forward = lambda input: float32_logits(input, head.weight, head.bias)  # type: ignore[method-assign]


def value_head(model: PreTrainedModel, device: torch.device) -> dict[str, nn.Parameter]:
    """Weight [1, d] and bias [1] of zeros, float32: every value is 0 until it is trained."""
    shapes = {
        "value_head.weight": (1, model.get_output_embeddings().weight.shape[1]),
        "value_head.bias": (1,),
    }
    return {name: nn.Parameter(torch.zeros(shape, device=device)) for name, shape in shapes.items()}


def values_of(
    hidden: torch.Tensor, head: Mapping[str, nn.Parameter], source: torch.Tensor
) -> torch.Tensor:
    """Return the values float32 [T] of the hidden states [U, d] at ``source`` int64 [T]; empty
    without a ``head``."""
    if not head:
        return hidden.new_empty(0)
    return nn.functional.linear(hidden.float(), *head.values())[:, 0].index_select(0, source)
