"""Replaces the attention of a transformers model, and checks that its logits stay the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AttentionInterface


def replace_attention(model: Any, name: str, attention: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Make ``model`` call ``attention``, which is registered in transformers' attention interface as ``name``."""
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ``NotImplementedError`` for options of a model's attention that no torch engine computes."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention option {name}")


def check_logits(model: Any, what: str, compute: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    """Raise ``ValueError`` unless ``compute``, called ``what``, returns the logits ``expected`` of the plain forward."""
    kind = type(model).__name__
    try:
        gap = float((compute() - expected).abs().max())
    except Exception as error:
        raise ValueError(f"model: {kind} does not work through transformers' attention interface: {error!r}") from error
    limit = torch.finfo(model.dtype).eps ** 0.5 * max(1.0, float(expected.abs().max()))
    if not gap <= limit:
        raise ValueError(f"model: {what} gives {kind} logits that are off by {gap:.2g} (limit {limit:.2g})")
