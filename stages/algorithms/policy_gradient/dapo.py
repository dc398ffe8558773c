"""DAPO (arXiv 2503.14476): a higher upper clip, dynamic sampling, and a penalty of overlong
responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import MASK, OPTIONAL
from stages.flow.declarations import Columns, Drop


@with_defaults(clip_high=0.28, drop_equal=True)
class DAPO(GRPO):
    """GRPO for long reasoning.

    ``drop_equal`` is its dynamic sampling (Eq. 11): groups that teach nothing are dropped, and
    others generated in their place. Set ``rollout.truncated = "mask"`` for its overlong filtering.
    """

    name: ClassVar[str] = "dapo"
    use_for: ClassVar[str] = (
        "Long reasoning with rewards of 0 and 1: entropy falls, and many groups are solved or "
        "hopeless."
    )
    citation: ClassVar[str] = """
    @misc{yu2025dapo,
      title = {{DAPO}: An Open-Source {LLM} Reinforcement Learning System at Scale},
      author = {Yu, Qiying and Zhang, Zheng and Zhu, Ruofei and Yuan, Yufeng and others},
      year = {2025},
      eprint = {2503.14476},
      archivePrefix = {arXiv},
    }
    """

    longest_response: int = Field(
        default=0,
        ge=0,
        description="Tokens from which a response gets the whole penalty of -1; usually "
        "`rollout.max_tokens`. 0: none.",
    )
    overlong_tokens: int = Field(
        default=0,
        ge=0,
        description="The penalty grows from 0 over this many tokens before `longest_response` (Eq. "
        "13).",
    )

    drop_by: Literal["correctness", "penalized"] = Field(
        default="correctness",
        description="The rewards that `drop_equal` compares: those before the length penalty (Eq. "
        "11 drops groups that are all correct or all wrong), or those after it.",
    )

    @property
    def credit_reads(self) -> Columns:
        lengths = {"response_ids": "int64 ragged"} if self.longest_response else {}
        return {**super().credit_reads, **lengths}

    @property
    def credit_optional(self) -> Columns:
        mask = {MASK: OPTIONAL[MASK]} if self.longest_response else {}
        return {**super().credit_optional, **mask}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return GRPO's credit of the rewards with the penalty ``(longest - overlong - length) /
        overlong``, cut to [-1, 0]. Tokens that ``loss_mask`` leaves out do not count."""
        if not self.longest_response:
            return super().credit(group)
        rewards = group["reward"].float()
        lengths = (
            [int(row.sum()) for row in group[MASK]]
            if MASK in group
            else list(map(len, group["response_ids"]))
        )
        over = rewards.new_tensor(lengths) - self.longest_response
        penalty = (
            (over / self.overlong_tokens + 1).clamp(0, 1)
            if self.overlong_tokens
            else (over >= 0).float()
        )
        penalized = rewards - penalty - self.penalties(group)
        return self.compared(
            penalized, dropped_by=rewards if self.drop_by == "correctness" else penalized
        )
