"""What differs from GRPO by the ratio of a token, or by what bounds it.

gspo        the ratio, and its clip, of whole responses (2507.18071)
cispo       clipped importance weights in place of a clipped objective (MiniMax-M1, 2506.13585)
aipo        the same with a lower cut and no other correction (LlamaRL, 2505.24034, Eq. 4)
sapo        a smooth gate of the ratio in place of the clip (2511.20347, Eq. 5)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.algorithms.token_batch import TokenBatch

if TYPE_CHECKING:
    import torch


@with_defaults(
    correction="none",
    ratio_level="geometric",
    loss_normalization="sequence",
    clip_low=3e-4,
    clip_high=4e-4,
)
class GSPO(GRPO):
    """GRPO with one importance ratio for each response, the geometric mean of its tokens' (Eq. 7).

    It is less noisy for a mixture of experts, whose routing differs between engines. The clip range
    is the paper's, far smaller than for tokens.
    """

    name: ClassVar[str] = "gspo"
    use_for: ClassVar[str] = "Models with experts, whose ratios of single tokens are noisy."
    citation: ClassVar[str] = """
    @misc{zheng2025group,
      title = {Group Sequence Policy Optimization},
      author = {Zheng, Chujie and Liu, Shixuan and Li, Mingze and Chen, Xiong-Hui and others},
      year = {2025},
      eprint = {2507.18071},
      archivePrefix = {arXiv},
    }
    """


@with_defaults(correction="none", clip_high=4.0)
class CISPO(GRPO):
    """REINFORCE with the ratio, cut at ``1 + clip_high`` and without a gradient, as its weight (Eq.
    4 and 5). PPO's clip takes rare tokens, on which a response often turns, out of the gradient;
    here each token stays in it. ``clip_low`` and ``max_ratio`` have no effect."""

    name: ClassVar[str] = "cispo"
    use_for: ClassVar[str] = "Rare tokens on which a response turns have to keep their gradient."
    citation: ClassVar[str] = """
    @misc{minimax2025m1,
      title = {{MiniMax-M1}: Scaling Test-Time Compute Efficiently with Lightning Attention},
      author = {{MiniMax}},
      year = {2025},
      eprint = {2506.13585},
      archivePrefix = {arXiv},
    }
    """

    def surrogate(
        self, ratio: torch.Tensor, tokens: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        most = 1 + self.clip_high
        return ratio.clamp(max=most).detach() * tokens["advantage"] * tokens.logprobs, ratio > most


@with_defaults(clip_high=1.0)
class AIPO(CISPO):
    """Asynchronous importance-weighted policy optimization: the ratio to the policy that generated
    the token, cut at ``1 + clip_high`` (the paper's ρ, 2 to 10), is the one correction for
    staleness."""

    name: ClassVar[str] = "aipo"
    use_for: ClassVar[str] = (
        "Samples that are several versions old, with one truncated weight as the whole correction."
    )
    citation: ClassVar[str] = """
    @misc{wu2025llamarl,
      title = {{LlamaRL}: A Distributed Asynchronous Reinforcement Learning Framework
        for Efficient Large-scale {LLM} Training},
      author = {Wu, Bo and Wang, Sid and Tang, Yunhao and Ding, Jia and others},
      year = {2025},
      eprint = {2505.24034},
      archivePrefix = {arXiv},
    }
    """


@with_defaults(correction="none", loss_normalization="sequence")
class SAPO(GRPO):
    """GRPO with a gate that closes smoothly around a ratio of 1, where a clip stops at once.

    A token's gain is ``4 / τ · sigmoid(τ (ratio - 1)) · advantage``. ``clip_low``, ``clip_high`` and
    ``max_ratio`` have no effect.
    """

    name: ClassVar[str] = "sapo"
    use_for: ClassVar[str] = "As `grpo`, where the clip stops tokens too abruptly."
    citation: ClassVar[str] = """
    @misc{gao2025soft,
      title = {Soft Adaptive Policy Optimization},
      author = {Gao, Chang and Zheng, Chujie and Chen, Xiong-Hui and others},
      year = {2025},
      eprint = {2511.20347},
      archivePrefix = {arXiv},
    }
    """

    gate_positive: float = Field(
        default=1.0, gt=0, description="τ of tokens with a positive advantage."
    )
    gate_negative: float = Field(
        default=1.05,
        gt=0,
        description="τ of the others, higher: they raise tokens that were not sampled, so their "
        "gate closes sooner.",
    )

    def surrogate(
        self, ratio: torch.Tensor, tokens: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        advantage = tokens["advantage"]
        is_positive = advantage > 0
        steepness = ratio.new_full(ratio.shape, self.gate_negative)
        steepness[is_positive] = self.gate_positive
        gate = (steepness * (ratio - 1)).sigmoid() * 4 / steepness
        return gate * advantage, advantage != advantage
