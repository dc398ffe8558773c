"""Kahneman-Tversky Optimization (arXiv 2402.01306): responses that are good or bad by themselves,
without pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from stages.algorithms.interface import Algorithm, LossOutput
from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch

NOW = "logprobs_before"


class KTO(Algorithm):
    """Raises good responses and lowers bad ones, each against the batch's mean divergence from the
    reference (Eq. 8).

    A response is good from the reward ``good_from`` on. Of ``prompts.responses`` =
    ``["chosen", "rejected"]`` the first is good.
    """

    name: ClassVar[str] = "kto"
    use_for: ClassVar[str] = "Single responses that are good or bad, without pairs."
    citation: ClassVar[str] = """
    @misc{ethayarajh2024kto,
      title = {{KTO}: Model Alignment as Prospect Theoretic Optimization},
      author = {Ethayarajh, Kawin and Xu, Winnie and Muennighoff, Niklas and Jurafsky, Dan and
        Kiela, Douwe},
      year = {2024},
      eprint = {2402.01306},
      archivePrefix = {arXiv},
    }
    """
    scores: ClassVar[Mapping[str, RunsOn]] = {"ref_logprobs": "frozen model", NOW: "policy"}
    credit_makes: ClassVar[Columns] = {"preference": "float32 finite"}
    prepare_makes: ClassVar[Columns] = {"centre": "float32 ragged"}
    loss_reads: ClassVar[Columns] = {
        "ref_logprobs": "float32 ragged",
        NOW: "float32 ragged",
        "preference": "float32",
        **prepare_makes,
    }

    beta: float = Field(
        default=0.1, gt=0, description="How strongly the policy is held to the reference."
    )
    good_from: float = Field(default=0.5, description="The least reward of a good response.")
    good_weight: float = Field(default=1.0, ge=0, description="λ of good responses.")
    bad_weight: float = Field(
        default=1.0,
        ge=0,
        description="λ of bad ones. Where they are few or many, choose it so that both together "
        "weigh about the same.",
    )

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return 1 for good responses and -1 for bad ones."""
        return {"preference": (group["reward"].float() >= self.good_from).float() * 2 - 1}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        """Return the centre: the mean log-ratio of the train batch's responses before the step, not
        below 0. It estimates KL(policy || reference)."""
        away = (batch[NOW] - batch["ref_logprobs"]).masked_fill(~batch.is_trained, 0)
        ratio = away.new_zeros(len(batch.lengths)).index_add(0, batch.row, away)
        return {"centre": away.new_full(away.shape, max(0.0, batch.moments(ratio)[0]))}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        """Return the mean over rows of ``λ · (1 - sigmoid(±beta (ratio - centre)))``."""
        ratio = tokens.row_sums(tokens.logprobs - tokens["ref_logprobs"])
        centre = tokens.row_sums(tokens["centre"]) / tokens.row_tokens.clamp(min=1)
        good = tokens.rows["preference"]
        trained = tokens.row_tokens > 0
        weight = good.new_full(good.shape, self.bad_weight)
        weight[good > 0] = self.good_weight
        losses = weight * (-good * self.beta * (ratio - centre)).sigmoid() * trained
        means = {
            "kl_reference": centre,
            "good_share": (good > 0).to(ratio.dtype),
            "reward_margin": self.beta * good * ratio.detach(),
        }
        metrics = {
            name: (value * trained).sum() / tokens.total_rows for name, value in means.items()
        }
        return LossOutput(losses.sum() / tokens.total_rows, metrics)
