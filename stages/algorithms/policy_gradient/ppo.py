"""Proximal Policy Optimization (arXiv 1707.06347) with generalised advantage estimation
(1506.02438), and with policy filtration (2409.06957): responses whose rewards are unreliable weigh
less.

reward, values ─▶ prepare: GAE over each response ─▶ advantage (whitened), returns ─▶ loss of policy and values, both clipped
                                                                      └▶ value_errors: clipped around the values before
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from stages.algorithms.interface import Algorithm, LossOutput, with_defaults
from stages.algorithms.policy_gradient.base import PolicyGradient
from stages.algorithms.policy_gradient.terms.kl_reward import KLReward
from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import TOKEN_REWARDS
from stages.flow.declarations import Columns, RunsOn
from stages.json_schema import CRITIC_IN_CHECKPOINT, faults

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch

HEAD_RATE = 10  # times the policy's learning rate (docs/measurements/algorithms.md)


LEAST_VARIANCE = 1e-6  # of returns, as a share of their mean square


class ValueLearner(KLReward):
    """The options and formulas that a policy with a critic and a critic of its own share."""

    gamma: float = Field(
        default=1.0, gt=0, le=1, description="Discount of later rewards, for each trained token."
    )
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="λ of GAE (Eq. 16): 0 trusts the critic, 1 the rewards alone.",
    )
    critic_lambda: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="λ of the returns that the critic learns (decoupled GAE, VC-PPO, arXiv "
        "2503.01491, section 3.2): with 1 it learns from the rewards themselves, which reach the "
        "first tokens of long responses. Default: `gae_lambda`.",
    )
    value_clip: float = Field(
        default=0.2,
        ge=0,
        description="A value gains nothing farther than this from the one before the step. 0: no "
        "clip.",
    )

    reward_level: Literal["response", "token"] = Field(
        default="response",
        description="`response`: its reward comes with its last token. `token`: rewards come where "
        "the reward functions have given them, with single turns or tokens; each counts for what "
        "was generated before it.",
    )

    @property
    def reads_rewards(self) -> Columns:
        """The column that rewards are read from."""
        if self.reward_level == "token":
            return {TOKEN_REWARDS: "float32 ragged"}
        return {"reward": "float32"}

    def rewards(self, batch: TrainBatch, last: torch.Tensor) -> torch.Tensor:
        """Return the reward of each trained token. ``last``: the last one of each branch.

        What comes in a trajectory after the end of a branch comes, for the branch, with its last
        token. A reward at a token that is not trained on comes with the trained one before it, or
        with the first one of the row."""
        row = batch.row[batch.is_trained]
        if self.reward_level == "response":
            rewards = batch["reward"].new_zeros(len(row))
            rewards[last] = batch["reward"][row[last]]
            return rewards
        firsts = batch.trained.cumsum(0) - batch.trained
        places = (batch.is_trained.cumsum(0) - 1).maximum(firsts[batch.row])
        has_tokens = batch.trained[batch.row] > 0
        of_tokens = batch[TOKEN_REWARDS].nan_to_num(nan=0.0).double()
        rewards = of_tokens.new_zeros(len(row))
        rewards.index_add_(0, places[has_tokens], of_tokens[has_tokens])
        so_far = rewards.cumsum(0)
        last_of_row = (firsts + batch.trained - 1)[row[last]]
        rewards[last] += so_far[last_of_row] - so_far[last]
        return rewards

    def gae(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages and returns [T] of each response, of a trajectory with branches of
        each branch: its own tokens, with the rewards of :meth:`rewards`.

        Time counts its trained tokens alone, as if the others were not there, and nothing follows
        the last one of them. Tokens that are not trained on have an advantage of 0.
        """
        at = batch.is_trained
        counts = batch.sequence[at].unique_consecutive(return_counts=True)[1]
        values = batch["values"][at]
        last = counts.cumsum(0) - 1
        rewards = self.rewards(batch, last).to(values.dtype)
        if self.kl_reward:
            penalties = self.token_penalties(batch["rollout_logprobs"], batch["ref_logprobs"])
            rewards = rewards - penalties[at]
        following = values.roll(-1)
        following[last] = 0
        errors = rewards + self.gamma * following - values
        critic_lambda = self.gae_lambda if self.critic_lambda is None else self.critic_lambda
        lambdas = dict.fromkeys((self.gae_lambda, critic_lambda))
        decay = errors.new_tensor([self.gamma * each for each in lambdas])[:, None]
        sums = errors.repeat(len(lambdas), 1)  # [1 or 2, T]
        # backwards, all responses at once
        for place in range(max(counts.tolist(), default=0) - 2, -1, -1):
            now = (last - counts + 1 + place)[counts > place + 1]
            sums[:, now] += decay * sums[:, now + 1]
        of_tokens = values.new_zeros(len(sums), len(at))
        of_tokens[:, at] = sums
        return of_tokens[0], of_tokens[-1] + batch["values"]

    def value_errors(self, now: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        """Return half the squared errors [T] of the values ``now``: the larger of the plain and the
        clipped one."""
        returns = tokens["returns"]
        errors = (now - returns).square()
        if not self.value_clip:
            return errors / 2
        before = tokens["values"]
        near = before + (now - before).clamp(-self.value_clip, self.value_clip)
        return errors.maximum((near - returns).square()) / 2

    def value_metrics(self, tokens: TokenBatch) -> dict[str, torch.Tensor]:
        """Return the sums from which :meth:`explained` computes, as means over the mini-batch's
        tokens."""
        returns = tokens["returns"]
        errors = tokens["values"] - tokens["returns"]
        means = {"value_error": errors.square(), "value_bias": errors}
        means |= {"return_square": returns.square(), "return_mean": returns}
        return {name: value.detach().sum() / tokens.total_tokens for name, value in means.items()}

    def explained(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return ``metrics`` with ``explained_variance`` of the returns by the values before the
        step: 1 is a perfect critic."""
        shown = dict(metrics)
        error = shown.pop("value_error") - shown.pop("value_bias") ** 2
        variance = shown.pop("return_square") - shown["return_mean"] ** 2
        # A difference of sums in float32: below this share it is rounding, of returns that are all
        # equal.
        varies = variance > LEAST_VARIANCE * (variance + shown["return_mean"] ** 2)
        return shown | {"explained_variance": 1 - error / variance if varies else 0.0}


class CriticTraining(ValueLearner):
    """The algorithm that trains a critic with an engine of its own: the value loss, on the column
    ``values`` that it has made."""

    scores: ClassVar[Mapping[str, RunsOn]] = {}
    credit_makes: ClassVar[Columns] = {}
    prepare_makes: ClassVar[Columns] = {"returns": "float32 ragged"}

    @property
    def loss_reads(self) -> Columns:
        return {
            **self.reads_kl,
            "values": "float32 ragged",
            **self.reads_rewards,
            **self.prepare_makes,
        }

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        return {"returns": self.gae(batch)[1]}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        assert tokens.values is not None
        errors = self.value_errors(tokens.values, tokens)
        return LossOutput(
            tokens.mean(errors), {"value_loss": errors.detach().sum() / tokens.total_tokens}
        )


@with_defaults(epochs=2)
class PPO(PolicyGradient, ValueLearner):
    """Clipped policy gradient with a learned critic.

    It needs no group (``algorithm.group_size = 1`` will do), and gives each token its own
    advantage.
    """

    name: ClassVar[str] = "ppo"
    use_for: ClassVar[str] = (
        "Long trajectories, one response to a prompt: a critic says which tokens were good."
    )
    citation: ClassVar[str] = """
    @misc{schulman2017proximal,
      title = {Proximal Policy Optimization Algorithms},
      author = {Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec
        and Klimov, Oleg},
      year = {2017},
      eprint = {1707.06347},
      archivePrefix = {arXiv},
    }
    """
    credit_makes: ClassVar[Columns] = {}

    critic: Annotated[Literal["trunk", "own"], CRITIC_IN_CHECKPOINT] = Field(
        default="trunk",
        description="`trunk`: values are those of a linear layer on the policy's last hidden "
        "states, which is trained with it. `own`: of another model, with an engine and "
        "a worker of its own (the recipe's section `critic`).",
    )
    value_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Epochs of a critic of its own on each train batch. Default: `epochs`.",
    )
    value_coef: float = Field(
        default=0.5, ge=0, description="Weight of the value loss of a critic on the policy's trunk."
    )
    value_learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="Peak learning rate of the value head on the policy's trunk, by the schedule "
        "of `train`. A critic of its own has `critic.learning_rate`. Default: ten "
        "times `train.learning_rate`.",
    )
    critic_warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Train batches at the beginning from which the critic alone learns. They count "
        "as policy versions; the policy's schedule begins after them.",
    )
    whiten: bool = Field(
        default=True, description="Advantages get mean 0 and variance 1 over the train batch."
    )

    @pydantic.model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.critic == "own" and self.value_learning_rate is not None:
            rate = self.value_learning_rate
            problem = 'is of the value head on the trunk, and critic = "own" has none'
            fix = f"set critic.learning_rate = {rate:g} in its place"
            faults(self, [("value_learning_rate", problem, fix)])
        return self

    @property
    def policy_begins(self) -> int:
        return self.critic_warmup_steps

    def value_rate(self, learning_rate: float) -> float:
        return self.value_learning_rate or HEAD_RATE * learning_rate

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {
            **super().scores,
            "values": "critic" if self.critic == "own" else "value head",
        }

    def critic_algorithm(self) -> Algorithm | None:
        if self.critic == "trunk":
            return None
        shared = self.model_dump(include=set(CriticTraining.model_fields))
        return CriticTraining(**shared | {"epochs": self.value_epochs or self.epochs})

    @property
    def prepare_makes(self) -> Columns:
        return {
            **super().prepare_makes,
            **dict.fromkeys(("advantage", "returns"), "float32 ragged"),
        }

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, **self.reads_rewards, **self.prepare_makes}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        advantage, returns = self.gae(batch)
        return {
            **super().prepare(batch),
            "advantage": batch.whitened(advantage) if self.whiten else advantage,
            "returns": returns,
        }

    def loss(self, tokens: TokenBatch) -> LossOutput:
        policy = super().loss(tokens)
        metrics = {**policy.metrics, **self.value_metrics(tokens)}
        if tokens.values is None:  # a critic of its own learns them
            return LossOutput(policy.loss, metrics)
        errors = self.value_errors(tokens.values, tokens)
        metrics["value_loss"] = errors.detach().sum() / tokens.total_tokens
        return LossOutput(policy.loss + self.value_coef * self._mean(errors, tokens), metrics)

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add ``explained_variance`` of the returns by the values before the step: 1 is a perfect
        critic, 0 none."""
        return self.explained(super().finish(metrics))


class PFPPO(PPO):
    """PPO in which each response of a group is weighted by the rank of its reward.

    A reward model errs most where responses are mediocre; its best and its worst ones are most
    surely good and bad.
    """

    name: ClassVar[str] = "pf_ppo"
    use_for: ClassVar[str] = "A learned reward model whose grades in the middle are unreliable."
    citation: ClassVar[str] = """
    @misc{shen2024policy,
      title = {Policy Filtration in {RLHF} to Fine-Tune {LLM} for Code Generation},
      author = {Shen, Wei and Zhang, Chuheng},
      year = {2024},
      eprint = {2409.06957},
      archivePrefix = {arXiv},
    }
    """
    least_group_size: ClassVar[int] = 2
    credit_makes: ClassVar[Columns] = {"row_weight": "float32 finite"}

    filtration: Literal["best_worst", "best_random", "best"] = Field(
        default="best_worst",
        description="Weight by rank of N responses, times N: half each for the first and the last; "
        "half for the first, the other half for all others; or all for the first "
        "(section 4).",
    )

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the weights, whose mean is 1. Responses with equal rewards share those of their
        ranks."""
        rewards = group["reward"].float()
        count = len(rewards)
        ranked = rewards.new_zeros(count)
        match self.filtration:
            case "best_worst":
                ranked[0] = ranked[-1] = 0.5
            case "best_random":
                ranked[:] = 0.5 / (count - 1)
                ranked[0] = 0.5
            case "best":
                ranked[0] = 1.0
        order = rewards.argsort(descending=True, stable=True)
        weights = rewards.new_zeros(count)
        weights[order] = ranked * count
        for value in rewards.unique():
            same = rewards == value
            weights[same] = weights[same].mean()
        return {"row_weight": weights}
