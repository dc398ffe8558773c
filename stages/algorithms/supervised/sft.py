"""Supervised fine-tuning: the cross-entropy of given responses, or of the best of those that the
policy has generated (arXiv 2304.06767)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from stages.algorithms.interface import Algorithm, LossOutput
from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import OPTIONAL, ROW_MASK
from stages.flow.declarations import Columns, Drop


class SFT(Algorithm):
    """Next-token cross-entropy on the response tokens, as for warming a model up before RL.

    ``prompts.responses`` names the column with the responses; rows are packed, and the prompt's
    tokens are not in the loss.
    """

    name: ClassVar[str] = "sft"
    use_for: ClassVar[str] = "Good responses are given: before RL, to teach a form."
    credit_makes: ClassVar[Columns] = {}
    loss_reads: ClassVar[Columns] = {}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        return LossOutput(tokens.mean(-tokens.logprobs))


class BestOfN(SFT):
    """Fine-tuning on the best responses of each group, by reward.

    With ``best`` = 1 it is best-of-n distillation into the policy itself; with ``least_reward``
    alone it is rejection-sampling fine-tuning (RAFT, arXiv 2304.06767).
    """

    name: ClassVar[str] = "best_of_n"
    use_for: ClassVar[str] = (
        "A simple start with rewards: the policy learns to say its own best responses."
    )
    citation: ClassVar[str] = """
    @misc{dong2023raft,
      title = {{RAFT}: Reward {rAnked} {FineTuning} for Generative Foundation Model Alignment},
      author = {Dong, Hanze and Xiong, Wei and others},
      year = {2023},
      eprint = {2304.06767},
      archivePrefix = {arXiv},
    }
    """
    credit_makes: ClassVar[Columns] = {ROW_MASK: OPTIONAL[ROW_MASK]}

    best: int | None = Field(
        default=1, ge=1, description="Responses of a group that are trained. Default: 1."
    )
    least_reward: float | None = Field(
        default=None, description="Responses below it are not trained. Default: none."
    )

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return which responses are trained. Of equal rewards the first are."""
        rewards = group["reward"].float()
        is_trained = rewards >= (-float("inf") if self.least_reward is None else self.least_reward)
        order = rewards.argsort(descending=True, stable=True)
        is_trained[order[self.best or len(order) :]] = False
        return {ROW_MASK: is_trained} if bool(is_trained.any()) else Drop("no good response")
