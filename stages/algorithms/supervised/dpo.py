"""Direct Preference Optimization (arXiv 2305.18290) and IPO (2310.12036), on given pairs, or those
of a group by reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from stages.algorithms.interface import Algorithm, LossOutput
from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import MASK, OPTIONAL
from stages.flow.declarations import Columns, Drop, RunsOn

if TYPE_CHECKING:
    import torch


class DPO(Algorithm):
    """Raises the likelihood of preferred responses over that of others, against a frozen reference.

    ``prompts.responses = ["chosen", "rejected"]`` gives the pairs; without it they are generated,
    and the reward says which is preferred. Either way a sample's age does not matter: nothing is
    weighted by the policy that generated it.
    """

    name: ClassVar[str] = "dpo"
    use_for: ClassVar[str] = "Pairs of a preferred and a rejected response."
    citation: ClassVar[str] = """
    @misc{rafailov2023direct,
      title = {Direct Preference Optimization: Your Language Model is Secretly a Reward Model},
      author = {Rafailov, Rafael and Sharma, Archit and Mitchell, Eric and others},
      year = {2023},
      eprint = {2305.18290},
      archivePrefix = {arXiv},
    }
    """
    unit: ClassVar = "group"
    least_group_size: ClassVar[int] = 2
    scores: ClassVar[Mapping[str, RunsOn]] = {"ref_logprobs": "frozen model"}
    credit_makes: ClassVar[Columns] = {"preference": "float32 finite"}
    loss_reads: ClassVar[Columns] = {"ref_logprobs": "float32 ragged", "preference": "float32"}

    beta: float = Field(
        default=0.1, gt=0, description="How strongly the policy is held to the reference."
    )
    loss_type: Literal["sigmoid", "ipo"] = Field(
        default="sigmoid",
        description="`sigmoid`: DPO (Eq. 7). `ipo`: the squared loss of IPO (Eq. 17), per token as "
        "in TRL.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        description="By how much `beta` × the difference of log-ratios should "
        "exceed 0 (`sigmoid`).",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of the pairs that are taken to be the wrong way round (`sigmoid`).",
    )
    length_normalized: bool = Field(
        default=False,
        description="Compare the mean log-ratio of a response's tokens instead of their sum "
        "(`sigmoid`; TRL's `sigmoid_norm`), so that long responses weigh no more; `beta` is then "
        "usually 2 to 10.",
    )
    pairs: Literal["best_worst", "all"] = Field(
        default="best_worst",
        description="Of a group: the response with the highest reward against that with the "
        "lowest; or all with different rewards, each group weighing the same.",
    )

    @property
    def credit_optional(self) -> Columns:
        return {MASK: OPTIONAL[MASK]}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return 1 for the best, -1 for the worst and 0 for the others with ``best_worst``, and the
        rewards with ``all``. Responses of which ``loss_mask`` leaves no token are compared with
        none."""
        rewards = group["reward"].float()
        masks = group.get(MASK, [])
        trained = [at for at in range(len(rewards)) if not masks or bool(masks[at].any())]
        if len(trained) < self.least_group_size:
            return Drop("nothing to compare")
        compared = rewards[trained]
        if bool((compared == compared[0]).all()):
            return Drop("equal rewards")
        if self.pairs == "all":
            return {"preference": rewards}
        preference = rewards.new_zeros(len(rewards))
        preference[trained[int(compared.argmax())]] = 1.0
        preference[trained[int(compared.argmin())]] = -1.0
        return {"preference": preference}

    def pairs_of(self, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return int64 [P], the rows that are preferred, int64 [P], those that they are preferred
        to, and the weight [P] of each pair: of a group all together 1, over the mini-batch's
        groups."""
        preference = tokens.rows["preference"]
        group = tokens.group
        assert group is not None
        better = (preference[:, None] - preference[None]) >= (
            2 if self.pairs == "best_worst" else 1e-12
        )
        trained = tokens.row_tokens > 0
        comparable = (group[:, None] == group[None]) & trained[:, None] & trained[None]
        chosen, rejected = (better & comparable).nonzero().unbind(1)
        of_group = group.new_zeros(len(preference)).index_add(
            0, group[chosen], group.new_ones(len(chosen))
        )
        weight = 1 / (of_group[group[chosen]] * tokens.total_groups)
        return chosen, rejected, weight

    def loss(self, tokens: TokenBatch) -> LossOutput:
        """Return the mean over groups of each group's mean over pairs.

        A response without a trained token is in no pair.
        """
        ratio = tokens.row_sums(tokens.logprobs - tokens["ref_logprobs"])  # [R]
        per_token = ratio / tokens.row_tokens.clamp(min=1)
        compared = per_token if self.length_normalized else ratio
        chosen, rejected, weight = self.pairs_of(tokens)
        difference = compared[chosen] - compared[rejected]
        if self.loss_type == "ipo":
            losses = (per_token[chosen] - per_token[rejected] - 1 / (2 * self.beta)).square()
        else:
            logits = self.beta * difference - self.margin
            losses = (1 - self.label_smoothing) * softplus(
                -logits
            ) + self.label_smoothing * softplus(logits)
        means = {
            "preference_accuracy": (difference > 0).to(weight.dtype),
            "reward_margin": self.beta * difference,
            "chosen_logprob": tokens.row_sums(tokens.logprobs)[chosen],
        }
        metrics = {name: (value.detach() * weight).sum() for name, value in means.items()}
        return LossOutput((losses * weight).sum(), metrics)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 + exp(x))``, which is minus the log of the sigmoid of -x."""
    return x.clamp(min=0) + (-x.abs()).exp().log1p()
