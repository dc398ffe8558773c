"""CISPO (MiniMax-M1, arXiv 2506.13585): clipped importance weights in place of a clipped objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from stages.algorithms.interface import TokenBatch, with_defaults
from stages.algorithms.policy_gradient.grpo import GRPO

if TYPE_CHECKING:
    import torch


@with_defaults(correction="none", clip_high=4.0)
class CISPO(GRPO):
    """REINFORCE with the ratio, cut at ``1 + clip_high`` and without a gradient, as its weight (Eq. 4 and 5). PPO's clip
    takes rare tokens, on which a response often turns, out of the gradient; here each token stays in it. ``clip_low`` and
    ``max_ratio`` have no effect."""

    name: ClassVar[str] = "cispo"

    def surrogate(self, ratio: torch.Tensor, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        most = 1 + self.clip_high
        return ratio.clamp(max=most).detach() * tokens["advantage"] * tokens.logprobs, ratio > most
