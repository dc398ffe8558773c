"""Preference optimization without a reference model: SimPO (arXiv 2405.14734) and ORPO (arXiv
2403.07691), on pairs as DPO has them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from stages.algorithms.interface import LossOutput, with_defaults
from stages.algorithms.supervised.dpo import DPO, softplus
from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch


class ReferenceFree(DPO):
    """What both share: the implicit reward of a response is the mean logprob of its tokens."""

    scores: ClassVar[Mapping[str, RunsOn]] = {}
    loss_reads: ClassVar[Columns] = {"preference": "float32"}

    @abstractmethod
    def pair_losses(
        self, chosen: torch.Tensor, rejected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses [P] of pairs with these mean logprobs, and their margins [P]."""

    def loss(self, tokens: TokenBatch) -> LossOutput:
        """Return the mean over groups of each group's mean over pairs."""
        mean = tokens.row_sums(tokens.logprobs) / tokens.row_tokens.clamp(min=1)
        chosen, rejected, weight = self.pairs_of(tokens)
        losses, margin = self.pair_losses(mean[chosen], mean[rejected])
        means = {
            "preference_accuracy": (mean[chosen] > mean[rejected]).to(weight.dtype),
            "reward_margin": margin,
            "chosen_logprob": tokens.row_sums(tokens.logprobs)[chosen],
        }
        metrics = {name: (value.detach() * weight).sum() for name, value in means.items()}
        return LossOutput((losses * weight).sum(), metrics)


@with_defaults(beta=2.0, margin=1.0)
class SimPO(ReferenceFree):
    """DPO without a reference, by mean logprobs, which a preferred response must exceed by
    ``margin`` (Eq. 6)."""

    name: ClassVar[str] = "simpo"
    use_for: ClassVar[str] = (
        "Pairs, where there is no memory for a reference, or long responses win by their length."
    )
    citation: ClassVar[str] = """
    @misc{meng2024simpo,
      title = {{SimPO}: Simple Preference Optimization with a Reference-Free Reward},
      author = {Meng, Yu and Xia, Mengzhou and Chen, Danqi},
      year = {2024},
      eprint = {2405.14734},
      archivePrefix = {arXiv},
    }
    """

    def pair_losses(
        self, chosen: torch.Tensor, rejected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        margin = self.beta * (chosen - rejected)
        logits = margin - self.margin
        smoothing = self.label_smoothing
        return (1 - smoothing) * softplus(-logits) + smoothing * softplus(logits), margin


class ORPO(ReferenceFree):
    """Supervised fine-tuning on the preferred response, with a penalty by the odds of the other
    one (Eq. 6); ``beta`` weighs the penalty (the paper's λ)."""

    name: ClassVar[str] = "orpo"
    use_for: ClassVar[str] = "Pairs, in one stage with supervised fine-tuning."
    citation: ClassVar[str] = """
    @misc{hong2024orpo,
      title = {{ORPO}: Monolithic Preference Optimization without Reference Model},
      author = {Hong, Jiwoo and Lee, Noah and Thorne, James},
      year = {2024},
      eprint = {2403.07691},
      archivePrefix = {arXiv},
    }
    """

    def pair_losses(
        self, chosen: torch.Tensor, rejected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        odds = (chosen - rejected) - ((-chosen.exp()).log1p() - (-rejected.exp()).log1p())
        return -chosen + self.beta * softplus(-odds), odds
