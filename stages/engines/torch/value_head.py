"""The value head: a linear layer on a policy's last hidden states, which a critic on the policy's trunk consists of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel


def value_head(model: PreTrainedModel, device: torch.device) -> dict[str, nn.Parameter]:
    """Weight [1, d] and bias [1] of zeros, float32: every value is 0 until it is trained."""
    shapes = {"value_head.weight": (1, model.get_output_embeddings().weight.shape[1]), "value_head.bias": (1,)}
    return {name: nn.Parameter(torch.zeros(shape, device=device)) for name, shape in shapes.items()}


def values_of(hidden: torch.Tensor, head: Mapping[str, nn.Parameter], source: torch.Tensor) -> torch.Tensor:
    """Values float32 [T] of the hidden states [U, d] at ``source`` int64 [T]; empty without a ``head``."""
    if not head:
        return hidden.new_empty(0)
    return nn.functional.linear(hidden.float(), *head.values())[:, 0].index_select(0, source)
