"""Supervised fine-tuning: the cross-entropy of given responses."""

from __future__ import annotations

from typing import ClassVar

from stages.algorithms.interface import Algorithm, LossOutput
from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import Columns


class SFT(Algorithm):
    """Next-token cross-entropy on the response tokens, as for warming a model up before RL.

    ``prompts.responses`` names the column with the responses; rows are packed, and the prompt's
    tokens are not in the loss.
    """

    name: ClassVar[str] = "sft"
    credit_makes: ClassVar[Columns] = {}
    loss_reads: ClassVar[Columns] = {}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        return LossOutput(tokens.mean(-tokens.logprobs))
