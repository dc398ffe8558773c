"""Process supervision: rewards within a response, by turn or by token, each for what led to it.

token_rewards of a group ─▶ normalised ─▶ a token's advantage: the sum of those that come with it or after it

By default as GRPO does it (DeepSeekMath, arXiv 2402.03300, section 4.1.3). Or what is still to come
at each step is compared with the same step of the group's other responses: a step ends with a
reward, so a turn is one where each turn has a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.base import GroupCompared
from stages.algorithms.policy_gradient.grpo import ADVANTAGE_EPS, GRPO
from stages.flow.catalogue import MASK, OPTIONAL, TOKEN_REWARDS
from stages.flow.declarations import Columns, Drop

if TYPE_CHECKING:
    import torch


@with_defaults(correction="auto")
class ProcessGRPO(GroupCompared):
    """GRPO with an advantage for each step of a response, from the rewards that reward functions
    give single turns or tokens. Where they give one a response, it is GRPO."""

    name: ClassVar[str] = "process_grpo"
    use_for: ClassVar[str] = "Rewards of single turns or tokens, as of a grader of steps."
    citation: ClassVar[str] = GRPO.citation
    credit_makes: ClassVar[Columns] = {"advantage": "float32 ragged finite"}

    normalize: Literal["rewards", "returns"] = Field(
        default="rewards",
        description="What is normalised within a group. `rewards`: all rewards of its responses; "
        "an advantage is the sum of the later ones. `returns`: of each step the sum of the rewards "
        "that come with it and after it, among the responses that have as many steps.",
    )
    gamma: float = Field(
        default=1.0, gt=0, le=1, description="Discount of later rewards, for each step."
    )
    scale_rewards: bool = Field(
        default=True, description="Divide by the standard deviation of what is normalised."
    )

    @property
    def credit_reads(self) -> Columns:
        return {TOKEN_REWARDS: "float32 ragged", **self.reads_kl}

    @property
    def credit_optional(self) -> Columns:
        return {MASK: OPTIONAL[MASK]}

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, **self.credit_makes}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return the advantage of each token; 0 after the last reward, and at tokens that
        ``loss_mask`` leaves out."""
        rows = [row.float() for row in group[TOKEN_REWARDS]]
        ends = [(~row.isnan()).nonzero()[:, 0] for row in rows]
        rewards = [row[at] for row, at in zip(rows, ends, strict=True)]
        penalties = rows[0].new_zeros(len(rows)) + self.penalties(group)
        for row, penalty in zip(rewards, penalties, strict=True):
            row[-1:] -= penalty  # as a part of the reward of the response
        to_go: Sequence[torch.Tensor]
        if self.normalize == "rewards":
            to_go = [self._to_go(row) for row in self._normalized(rewards)]
        else:
            to_go = self._normalized_by_step([self._to_go(row) for row in rewards])
        advantage = [
            _at_tokens(row, at, len(tokens))
            for row, at, tokens in zip(to_go, ends, rows, strict=True)
        ]
        if MASK in group:
            masked = zip(advantage, group[MASK], strict=True)
            advantage = [row.masked_fill(~mask, 0) for row, mask in masked]
        columns = {"advantage": advantage}
        if self.drop_equal and not any(bool(row.any()) for row in advantage):
            return Drop("equal rewards", instead=columns)
        return columns

    def advantage(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return ``(r - mean) / (std + 1e-4)`` of ``rewards`` [n]; zeros where all are equal."""
        if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
            return rewards.new_zeros(rewards.shape)
        centred = rewards - rewards.mean()
        return centred / (rewards.std() + ADVANTAGE_EPS) if self.scale_rewards else centred

    def _normalized(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the numbers of all ``rows`` together, normalised."""
        import torch

        return self.advantage(torch.cat([*rows])).split([len(row) for row in rows])

    def _normalized_by_step(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the numbers of ``rows``, those of each place of all rows normalised."""
        normalized = [row.clone() for row in rows]
        for place in range(max(map(len, rows))):
            there = [row for row in normalized if len(row) > place]
            numbers = self._normalized([row[place : place + 1] for row in there])
            for row, number in zip(there, numbers, strict=True):
                row[place] = number
        return normalized

    def _to_go(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return at each step the discounted sum of its reward and of the later ones."""
        sums = rewards.clone()
        for step in range(len(sums) - 2, -1, -1):
            sums[step] += self.gamma * sums[step + 1]
        return sums


def _at_tokens(numbers: torch.Tensor, ends: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return at each of so many ``tokens`` the number of the step that it is in. ``ends``: the last
    token of each step; 0 after the last step."""
    import torch

    steps = torch.searchsorted(ends, torch.arange(tokens))
    return torch.cat([numbers, numbers.new_zeros(1)])[steps]
