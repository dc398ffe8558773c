"""Trajectory Balance with Asynchrony (TBA, arXiv 2503.18929): an objective of GFlowNets that
samples of any policy can be trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from stages.algorithms.interface import Algorithm, LossOutput
from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch


class TrajectoryBalance(Algorithm):
    """Draws the policy to ``reference · exp(reward / beta)``, without importance weights.

    It is reached where the log-ratio of policy and reference less ``reward / beta`` is the same for
    all responses to a prompt: minus the log of the partition function, of which the group's mean is
    the VarGrad estimate (Eq. 4). Whose samples they are does not matter, so old ones serve as well
    (``train.replay_groups``).
    """

    name: ClassVar[str] = "trajectory_balance"
    use_for: ClassVar[str] = "Very old samples, with replay: a sample's age does not matter."
    citation: ClassVar[str] = """
    @misc{bartoldson2025trajectory,
      title = {Trajectory Balance with Asynchrony: Decoupling Exploration and Learning for Fast,
        Scalable {LLM} Post-Training},
      author = {Bartoldson, Brian R. and Venkatraman, Siddarth and Diffenderfer, James and others},
      year = {2025},
      eprint = {2503.18929},
      archivePrefix = {arXiv},
    }
    """
    unit: ClassVar = "group"
    least_group_size: ClassVar[int] = 2
    scores: ClassVar[Mapping[str, RunsOn]] = {"ref_logprobs": "frozen model"}
    credit_makes: ClassVar[Columns] = {"log_target": "float32 finite"}
    loss_reads: ClassVar[Columns] = {"ref_logprobs": "float32 ragged", "log_target": "float32"}

    beta: float = Field(
        default=0.1, gt=0, description="How strongly the policy is held to the reference."
    )

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``reward / beta``: what the policy's log-ratio to the reference should be, but for
        a constant of the group."""
        return {"log_target": group["reward"].float() / self.beta}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        """Return the mean over rows of the squared distance from balance (Eq. 5)."""
        ratio = tokens.row_sums(tokens.logprobs - tokens["ref_logprobs"])  # [R]
        away = ratio - tokens.rows["log_target"]
        log_partition = -_group_means(away.detach(), tokens)
        residual = log_partition + away
        metrics = {
            "log_partition": tokens.mean_of_rows(log_partition[tokens.row]),
            "reference_log_ratio": tokens.mean_of_rows(ratio.detach()[tokens.row]),
        }
        return LossOutput(tokens.mean_of_rows(residual.square()[tokens.row]), metrics)


def _group_means(values: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """Return at each row [R] the mean of ``values`` [R] over its group's rows with trained
    tokens."""
    group = tokens.group
    assert group is not None
    trained = (tokens.row_tokens > 0).to(values.dtype)
    sums = values.new_zeros(len(values)).index_add(0, group, values * trained)
    counts = values.new_zeros(len(values)).index_add(0, group, trained)
    return (sums / counts.clamp(min=1))[group]
