"""Replaces the attention of a transformers model, and checks that its logits stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

PROBE = 24  # tokens of the comparison with the plain forward


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


def check_logits(
    model: Any, what: str, compute: Callable[[], torch.Tensor], expected: torch.Tensor, dtype: torch.dtype
) -> None:
    """Raise ``ValueError`` unless ``compute``, called ``what``, returns the logits ``expected`` [T, V] of the plain forward;
    both are computed in ``dtype``.

    In float32 each logit counts. In a lower dtype roundings of all layers add up, and may route a token to another expert:
    there the median of the tokens' root mean square differences counts, relative to the spread of the token's logits. (How
    a layer that matters little is computed shows in float32 only: stages/engines/torch/model_check.py.)"""
    kind = type(model).__name__
    try:
        found = compute().float() - expected
    except Exception as error:
        raise ValueError(f"model: {kind} does not work through transformers' attention interface: {error!r}") from error
    epsilon = torch.finfo(dtype).eps
    if dtype == torch.float32:
        gap, limit = float(found.abs().max()), epsilon**0.5 * max(1.0, float(expected.abs().max()))
    else:
        gap = float((found.std(-1) / expected.std(-1).clamp(min=1e-6)).median())
        limit = 3 * epsilon * model.config.get_text_config().num_hidden_layers ** 0.5
    if not gap <= limit:
        raise ValueError(f"model: {what} gives {kind} logits that are off by {gap:.2g} (limit {limit:.2g})")
