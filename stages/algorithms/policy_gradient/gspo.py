"""Group Sequence Policy Optimization (arXiv 2507.18071): the ratio, and its clip, of whole responses."""

from __future__ import annotations

from typing import ClassVar

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.grpo import GRPO


@with_defaults(correction="none", ratio_level="geometric", loss_normalization="sequence", clip_low=3e-4, clip_high=4e-4)
class GSPO(GRPO):
    """GRPO with one importance ratio for each response, the geometric mean of its tokens' (Eq. 7). It is less noisy for a
    mixture of experts, whose routing differs between engines. The clip range is the paper's, far smaller than for tokens."""

    name: ClassVar[str] = "gspo"
