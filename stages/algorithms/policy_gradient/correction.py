"""Which policy a step is measured against, and what corrects for samples of another one.

Three policies have a part in a step on a token (AReaL, arXiv 2505.24298, Eq. 5):

    rollout    generated it: an older version, computed by another engine      rollout_logprobs
    proximal   the centre of the trust region: what the ratio is clipped around
    current    is trained: it leaves the proximal one within the step          tokens.logprobs

    current / proximal: the ratio, clipped          proximal / rollout: a weight, truncated or masked, without gradient
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.algorithms.interface import MOST_LOG_RATIO, TokenBatch

if TYPE_CHECKING:
    import torch

Level = Literal["token", "geometric", "sequence"]


def at_level(log_ratio: torch.Tensor, tokens: TokenBatch, level: Level) -> torch.Tensor:
    """Log-ratios [T] clamped to ±``MOST_LOG_RATIO``: each token's own; or at each token its response's: their sum
    (``sequence``), or their mean (``geometric``, of the ratios)."""
    if level != "token":
        log_ratio = tokens.row_sums(log_ratio)
        log_ratio = (log_ratio / tokens.row_tokens if level == "geometric" else log_ratio)[tokens.row]
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def interpolated(tokens: TokenBatch) -> torch.Tensor:
    """Logprobs [T] between those of the rollout and the current ones, in place of a pass through the model (A-3PO, arXiv
    2512.06547): the share of the rollout is 1 / staleness, and 0 of a sample of the current version."""
    staleness = tokens["staleness"].to(tokens.logprobs.dtype)
    share = staleness.clamp(min=1).reciprocal() * (staleness > 0)
    return share * tokens["rollout_logprobs"] + (1 - share) * tokens.logprobs.detach()


def weights(
    log_weight: torch.Tensor,
    tokens: TokenBatch,
    correction: Literal["truncate", "mask"],
    level: Level,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The importance weights [T] of ``log_weight`` (no gradient) and which tokens stay in the loss, bool [T]. ``truncate``:
    at most ``high``. ``mask``: tokens (responses, at the levels of a response) with a weight outside ``low`` to ``high`` are
    left out (IcePop, arXiv 2510.18855)."""
    weight = at_level(log_weight.detach(), tokens, level).exp()
    if correction == "truncate":
        return weight.clamp(max=high), weight >= 0
    return weight, (weight >= low) & (weight <= high)
