"""DAPO (arXiv 2503.14476): a higher upper clip, token-level loss, dynamic sampling, and a penalty of overlong responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.declarations import Columns, Drop


@with_defaults(clip_high=0.28, drop_equal=True)
class DAPO(GRPO):
    """GRPO for long reasoning. ``drop_equal`` is its dynamic sampling (Eq. 11): groups that teach nothing are dropped, and
    others generated in their place. Set ``rollout.truncated = "mask"`` for its overlong filtering."""

    name: ClassVar[str] = "dapo"

    longest_response: int = Field(
        default=0,
        ge=0,
        description="Tokens from which a response gets the whole penalty of -1; usually `rollout.max_tokens`. 0: none.",
    )
    overlong_tokens: int = Field(
        default=0,
        ge=0,
        description="The penalty grows from 0 over this many tokens before `longest_response` (Eq. 13).",
    )

    @property
    def credit_reads(self) -> Columns:
        lengths = {"response_ids": "int64 ragged"} if self.longest_response else {}
        return {**super().credit_reads, **lengths}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """GRPO's of the rewards with the penalty ``(longest - overlong - length) / overlong``, cut to [-1, 0]."""
        if not self.longest_response:
            return super().credit(group)
        rewards = group["reward"].float()
        over = rewards.new_tensor([len(ids) for ids in group["response_ids"]]) - self.longest_response
        penalty = (over / self.overlong_tokens + 1).clamp(0, 1) if self.overlong_tokens else (over >= 0).float()
        return super().credit({"reward": rewards - penalty})
