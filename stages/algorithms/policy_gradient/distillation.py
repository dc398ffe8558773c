"""On-policy distillation (GKD, arXiv 2306.13649, with reverse KL): a teacher judges each token of a
student's response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from stages.algorithms.interface import LossOutput
from stages.algorithms.policy_gradient.base import PolicyGradient
from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import MASK, OPTIONAL
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


class Distillation(PolicyGradient):
    """Policy gradient on the reverse KL to the teacher ``model.reference``.

    A token's advantage is the teacher's logprob of it minus that of the policy that generated it:
    each token has one, in the states that the student really reaches. No reward is needed;
    ``reward.functions`` score evaluations.
    """

    name: ClassVar[str] = "distillation"
    use_for: ClassVar[str] = "A larger teacher with the same tokenizer; no rewards are needed."
    citation: ClassVar[str] = """
    @misc{agarwal2023gkd,
      title = {On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes},
      author = {Agarwal, Rishabh and Vieillard, Nino and Zhou, Yongchao and others},
      year = {2023},
      eprint = {2306.13649},
      archivePrefix = {arXiv},
    }
    """
    credit_reads: ClassVar[Columns] = {
        "ref_logprobs": "float32 ragged",
        "rollout_logprobs": "float32 ragged",
    }
    credit_optional: ClassVar[Columns] = {MASK: OPTIONAL[MASK]}
    credit_makes: ClassVar[Columns] = {"advantage": "float32 ragged finite"}

    whiten: bool = Field(
        default=True,
        description="Advantages get mean 0 and variance 1 over the train batch: tokens that the "
        "teacher finds less unlikely than others gain, where all of them are unlikely. "
        "The mean is a baseline, without which a student on `tiny` needs more tokens "
        "on each of three seeds (docs/measurements/algorithms.md).",
    )

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {**super().scores, "ref_logprobs": "frozen model"}

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, **self.credit_makes}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return teacher minus student; 0 at tokens that ``loss_mask`` leaves out."""
        pairs = zip(group["ref_logprobs"], group["rollout_logprobs"], strict=True)
        advantage = [teacher - student for teacher, student in pairs]
        if MASK in group:
            masked = zip(advantage, group[MASK], strict=True)
            advantage = [of_row.masked_fill(~mask, 0) for of_row, mask in masked]
        return {"advantage": advantage}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        if not self.whiten:
            return super().prepare(batch)
        return {**super().prepare(batch), "advantage": batch.whitened(batch["advantage"])}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        """Add the metric ``reverse_kl``, the mean of student minus teacher over the generated
        tokens (nats)."""
        output = super().loss(tokens)
        reverse_kl = (
            tokens["rollout_logprobs"] - tokens["ref_logprobs"]
        ).sum() / tokens.total_tokens
        return LossOutput(output.loss, {**output.metrics, "reverse_kl": reverse_kl})
