"""Replaces the attention of a transformers model, and checks that its logits stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface


def replace_attention(
    model: Any, name: str, attention: Callable[..., tuple[torch.Tensor, None]], state: object
) -> None:
    """Make ``model`` call ``attention``, which is registered in transformers' attention interface as ``name`` and finds
    ``state`` by :func:`state_of`: not every model hands options through to its attention."""
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    for module in model.modules():
        module._attention_state = state


def state_of(module: Any) -> Any:
    """The ``state`` of :func:`replace_attention`, for a ``module`` of the model."""
    return module._attention_state


def rope_change(config: Any) -> int:
    """Tokens up to which the rotary angles of a sequence do not depend on its length: above, longrope and dynamic rope turn
    all its tokens by other ones."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    found = [2**31]
    for rope in [ropes, *(part for part in ropes.values() if isinstance(part, dict))]:
        if rope.get("rope_type") in ("longrope", "dynamic"):
            found.append(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
    return min(found)


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
