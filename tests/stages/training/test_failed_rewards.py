"""Groups in which a reward function failed, at the credit stage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from stages.algorithms.policy_gradient.grpo import GRPO, RLOO
from stages.algorithms.policy_gradient.ppo import PPO
from stages.algorithms.policy_gradient.reinforce_pp import ReinforcePlusPlus
from stages.algorithms.supervised.dpo import DPO
from stages.flow import Drop
from stages.flow.catalogue import CREDIT, UPDATE, catalogue
from stages.flow.resolver import resolve
from stages.training.advantage import ABSENT, credits, rewards_of_groups
from stages.training.update import step_event, variety

SCORES = {"scores": "float32 [2]"}


def rows() -> TensorDict:
    """Three groups of two rows; function 1 failed on a row of the second."""
    scores = torch.tensor(
        [[1.0, 0.0], [0.0, math.nan], [1.0, 0.0], [0.0, math.inf], [0.0, 1.0], [1.0, 1.0]]
    )
    total = scores.nan_to_num(nan=0.0, posinf=0.0).sum(dim=1)
    return TensorDict({"reward": total, "scores": scores}, batch_size=[6])


def test_a_group_with_a_failed_row_is_dropped_and_the_others_have_their_credit() -> None:
    members, results = credits(GRPO(), rows(), [3, 3, 4, 4, 5, 5], rewards=("exact", "judge"))
    assert members == [[0, 1], [2, 3], [4, 5]]
    assert results[1] == Drop("reward judge failed")
    assert [isinstance(result, Drop) for result in results] == [False, True, False]
    assert credits(GRPO(), rows(), [3, 3, 4, 4, 5, 5])[1][1].keys() == {"advantage"}, (
        "as long as nobody asks for it"
    )  # type: ignore[union-attr]


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
    assert [
        isinstance(result, Drop) or set(result) == set(flow[CREDIT].makes) for result in results
    ] == [True] * 3
    assert CREDIT not in resolve(RewardWeighted(), catalogue(rewards=2))


# no function applies; a function failed, and counts as 0
NONE = math.nan
ZERO = -0.0


def group_of(*scores: float) -> TensorDict:
    column = torch.tensor(scores)[:, None]
    return TensorDict(
        {"reward": column.nan_to_num(nan=0.0, posinf=0.0)[:, 0], "scores": column}, [len(scores)]
    )


def test_a_row_without_a_reward_is_not_in_the_baseline_and_has_no_advantage() -> None:
    """As TRL 1.16 computes it: nanmean and nanstd of the group, and NaN becomes 0."""
    (members,), (result,) = credits(
        GRPO(), group_of(1.0, NONE, 0.0, 0.5), [7] * 4, rewards=("judge",)
    )
    scored = np.array([1.0, 0.0, 0.5])
    expected = (scored - scored.mean()) / (scored.std(ddof=1) + 1e-4)
    assert not isinstance(result, Drop)
    assert members == [0, 1, 2, 3]
    np.testing.assert_allclose(result["advantage"][[0, 2, 3]], expected, rtol=1e-6)
    assert result["advantage"][1] == 0
    (_,), (leave_one_out,) = credits(
        RLOO(), group_of(1.0, NONE, 0.0, 0.5), [7] * 4, rewards=("judge",)
    )
    assert not isinstance(leave_one_out, Drop)
    # r - mean of the two others
    assert leave_one_out["advantage"].tolist() == [0.75, 0.0, -0.75, 0.0]


@pytest.mark.parametrize(
    ("algorithm", "scores"),
    [
        (GRPO(), (1.0, NONE, NONE)),  # one alone is compared with nothing
        (ReinforcePlusPlus(), (1.0, NONE, 0.0)),  # a 0 would be whitened with the others
        (PPO(), (1.0, NONE, 0.0)),  # the critic would learn that it is worth 0
        (DPO(), (1.0, NONE, 0.0)),  # it would be the worst
    ],
)
def test_where_zeros_would_teach_something_the_group_is_dropped(
    algorithm: object, scores: tuple[float, ...]
) -> None:
    columns = group_of(*scores)
    (_,), (result,) = credits(algorithm, columns, [7] * 3, (1, 1, 1), rewards=("judge",))  # type: ignore[arg-type]
    assert isinstance(result, Drop)
    assert result.reason == ABSENT
    assert result.instead is not None, "a step that may drop no more trains it"


def test_the_pass_rate_of_a_prompt_is_that_of_the_rows_with_a_reward() -> None:
    columns = group_of(1.0, ZERO, 0.5, NONE, ZERO, NONE, 1.0, math.inf)
    groups = [3, 3, 3, 3, 4, 4, 5, 5]
    members = [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert rewards_of_groups(columns, groups, members, scored=True) == {3: [1.0, 0.5]}


class Claimed:
    """A claim of rows of one token."""

    def __init__(self, groups: list[int]) -> None:
        self.group = np.array(groups)
        self.tokens = np.ones(len(groups), np.int64)

    def __len__(self) -> int:
        return len(self.group)


def test_a_steps_mean_is_of_the_rows_with_a_reward() -> None:
    """By hand: 1, 0.5 and 0.25 of six rows; failed 2, none applies to 1."""
    columns = group_of(1.0, ZERO, 0.5, NONE, 0.25, ZERO)
    ledger = dict.fromkeys(("generated_tokens", "trained_tokens", "filtered_tokens"), 0)
    claim: Any = Claimed([1, 1, 2, 2, 3, 3])
    event = step_event(0, claim, dict(columns.items()), [0] * 6, {}, ledger, (1.0, 1.0))
    assert event.reward_mean == pytest.approx(1.75 / 3)
    assert event.reward_std == pytest.approx(float(np.std([1, 0.5, 0.25])))
    assert (event.reward_failed, event.reward_absent) == (2, 1)
    assert variety(claim, columns)["equal_groups"] == 1.0  # each group has one reward
    nothing = dict(group_of(ZERO, NONE).items())
    two: Any = Claimed([1, 1])
    event = step_event(0, two, nothing, [0] * 2, {}, ledger, (1.0, 1.0))
    assert (event.reward_mean, event.reward_std, event.reward_failed, event.reward_absent) == (
        None,
        None,
        1,
        1,
    )
    assert "equal_groups" not in variety(two, group_of(ZERO, NONE))
