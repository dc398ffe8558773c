"""Groups in which a reward function failed, at the credit stage."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict

from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow import Drop
from stages.flow.catalogue import CREDIT, UPDATE, catalogue
from stages.flow.resolver import resolve
from stages.training.advantage import credits

SCORES = {"scores": "float32 [2]"}


def rows() -> TensorDict:
    """Three groups of two rows; function 1 failed on a row of the second."""
    scores = torch.tensor([[1.0, 0.0], [0.0, math.nan], [1.0, 0.0], [0.0, math.inf], [0.0, 1.0], [1.0, 1.0]])
    total = scores.nan_to_num(nan=0.0, posinf=0.0).sum(dim=1)
    return TensorDict({"reward": total, "scores": scores}, batch_size=[6])


def test_a_group_with_a_failed_row_is_dropped_and_the_others_have_their_credit() -> None:
    members, results = credits(GRPO(), rows(), [3, 3, 4, 4, 5, 5], rewards=("exact", "judge"))
    assert members == [[0, 1], [2, 3], [4, 5]]
    assert results[1] == Drop("reward judge failed")
    assert [isinstance(result, Drop) for result in results] == [False, True, False]
    assert credits(GRPO(), rows(), [3, 3, 4, 4, 5, 5])[1][1].keys() == {"advantage"}, "as long as nobody asks for it"  # type: ignore[union-attr]


class RewardWeighted(GRPO):
    """Its loss reads the reward; it has no credit."""

    @property
    def credit_makes(self):  # type: ignore[no-untyped-def]
        return {}

    @property
    def loss_reads(self):  # type: ignore[no-untyped-def]
        return {"rollout_logprobs": "float32 ragged", "reward": "float32"}


def test_an_algorithm_without_credit_gets_a_stage_that_only_drops() -> None:
    flow = resolve(RewardWeighted(), catalogue(rewards=2), drops=SCORES)
    assert dict(flow[CREDIT].needs) == SCORES
    assert set(flow[CREDIT].makes) <= set(flow[UPDATE].needs), "training waits for it"
    _, results = credits(RewardWeighted(), rows(), [3, 3, 4, 4, 5, 5], rewards=("exact", "judge"))
    assert [isinstance(result, Drop) or set(result) == set(flow[CREDIT].makes) for result in results] == [True] * 3
    assert CREDIT not in resolve(RewardWeighted(), catalogue(rewards=2))
