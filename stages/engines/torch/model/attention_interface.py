"""Replaces the attention of a transformers model, fixes its rotary angles, and checks that its
logits stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stages.engines.protocols import ModelRefused

PROBE = 24  # tokens of the comparison with the plain forward


def replace_attention(
    model: Any, name: str, attention: Callable[..., tuple[torch.Tensor, None]], state: object
) -> None:
    """Make ``model`` call ``attention``, which is registered in transformers' attention interface
    as ``name`` and finds ``state`` by :func:`state_of`: not every model hands options through to
    its attention."""
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    for module in model.modules():
        module._attention_state = state


def state_of(module: Any) -> Any:
    """Return the ``state`` of :func:`replace_attention`, for a ``module`` of the model."""
    return module._attention_state


def rope_change(config: Any) -> int:
    """Return the number of tokens up to which the rotary angles of a sequence do not depend on its
    length: above, longrope and dynamic rope turn all its tokens by other ones."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    limits = [2**31]
    for rope in [ropes, *(part for part in ropes.values() if isinstance(part, dict))]:
        if rope.get("rope_type") in ("longrope", "dynamic"):
            limits.append(
                rope.get("original_max_position_embeddings") or text.max_position_embeddings
            )
    return min(limits)


@torch.no_grad()
def fix_rope(model: Any, context: int | None) -> int:
    """Make the angles of longrope in ``model`` the same for sequences of all lengths: by its long
    factors where ``context``, tokens of the longest sequence, is above :func:`rope_change`, else by
    the short ones (None: by the short ones). vLLM decides in the same way, by its
    ``max_model_len``; transformers decides anew for each forward, by the longest sequence that it
    has.

    Returns the tokens that a sequence may have. Raises ``ValueError`` for a ``context`` above the
    change when the angles still depend on a sequence's length."""
    change = rope_change(model.config)
    fixed = [
        module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"
    ]
    is_long = context is not None and context > change and bool(fixed)
    for module in fixed:
        device = module.inv_freq.device
        if is_long:
            factors, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=change + 1)
            module.inv_freq.copy_(factors)
        module.rope_type = "default"  # transformers computes with inv_freq as it is
        positions = torch.tensor([[*range(PROBE), change]], device=device)
        probe = torch.zeros(1, device=device)
        near, far = (
            module(probe, position_ids=some)[0][0, :PROBE]
            for some in (positions[:, :PROBE], positions)
        )
        if is_long and not torch.equal(near, far):
            problem = f"longrope of {type(model).__name__} depends on a sequence's length otherwise"
            raise ModelRefused("model", problem)
    return 2**31 if is_long else change


def check_logits(
    model: Any,
    what: str,
    compute: Callable[[], torch.Tensor],
    expected: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Raise ``ValueError`` unless ``compute``, called ``what``, returns the logits ``expected`` [T,
    V] of the plain forward; both are computed in ``dtype``.

    In float32 each logit counts. In a lower dtype roundings of all layers add up, and may route a
    token to another expert: there the median of the tokens' root mean square differences counts,
    relative to the spread of the token's logits. (How a layer that matters little is computed shows
    in float32 only: stages/engines/torch/model_check.py.)"""
    kind = type(model).__name__
    try:
        difference = compute().float() - expected
    except Exception as error:
        problem = f"{kind} does not work through transformers' attention interface: {error!r}"
        raise ModelRefused("model", problem) from error
    # of norms and rotations in float64 too
    epsilon = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    if epsilon == torch.finfo(torch.float32).eps:
        gap = float(difference.abs().max())
        limit = epsilon**0.5 * max(1.0, float(expected.abs().max()))
    else:
        gap = float((difference.std(-1) / expected.std(-1).clamp(min=1e-6)).median())
        limit = 3 * epsilon * model.config.get_text_config().num_hidden_layers ** 0.5
    if not gap <= limit:
        off = f"{gap:.2g} (limit {limit:.2g})"
        raise ModelRefused("model", f"{what} gives {kind} logits that are off by {off}")
