"""Rewards by turn and by token: what functions may return, where it counts, and what it adds up to."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from stages.model.load import load_tokenizer
from stages.rewards.by_token import turn_ends
from stages.rewards.calls import plain_scores
from stages.rewards.scores import RewardScores, has_failed
from stages.rewards.stage import ErrorPolicy, RewardSet, score_rows
from stages.tasks.tasks import environment_turns

Returned = list[Any]


def listed(completions: list[str], numbers: list[Any], **_: Any) -> Returned:
    """What the rows say."""
    return numbers


def whole(completions: list[str], **_: Any) -> Returned:
    return [1.0] * len(completions)


def score(
    numbers: Returned,
    lengths: list[int],
    *,
    ends: list[list[int]] | None = None,
    weights: tuple[float, ...] = (1.0,),
    **policy: Any,
) -> RewardScores:
    functions = [
        (f"{__name__}:{name}", w) for name, w in zip(("listed", "whole"), weights, strict=False)
    ]
    rewards = RewardSet(functions, policy=ErrorPolicy(**{"max_error_share": 1.0, **policy}))
    rows = len(lengths)
    return asyncio.run(
        rewards.score(
            ["q"] * rows,
            ["a"] * rows,
            [[7] * length for length in lengths],
            [{"numbers": row} for row in numbers],
            {},
            ends or (),
            by_token=True,
        )
    )


def plain(row: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(x) else round(x, 6) for x in row.tolist()]


def test_numbers_of_turns_and_tokens_count_where_they_belong_and_add_up() -> None:
    scores = score(
        [[0.5, None], [0.25, None, 0.5, None, -1.0], 2.0, [None, None], None],
        [5, 5, 3, 4, 2],
        ends=[[1, 4], [1, 4], [2], [0, 3], [1]],
        weights=(2.0, 0.5),
    )
    first, second = scores.scores.T.tolist()
    assert [None if math.isnan(x) else x for x in first] == [0.5, -0.25, 2.0, None, None]
    assert second == [1.0] * 5
    assert scores.total.tolist() == [1.5, 0.0, 4.5, 0.5, 0.5]
    assert [plain(row) for row in scores.by_token] == [
        [None, 1.0, None, None, 0.5],
        [0.5, None, 1.0, None, -1.5],
        [None, None, 4.5],
        [None, None, None, 0.5],
        [None, 0.5],
    ]
    sums = [float(row.nansum()) for row in scores.by_token]
    assert sums == pytest.approx(scores.total.tolist())


def test_a_response_without_an_environment_is_one_turn() -> None:
    scores = score([[3.0], [1.0, 2.0]], [4, 2])
    assert [plain(row) for row in scores.by_token] == [[None, None, None, 3.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1.0, 2.0, 3.0], "returned 3 rewards for a response of 2 turns and 5 tokens; return one"),
        ([], "returned 0 rewards for a response of 2 turns"),
        (["good", 1.0], "returned 'good' as a score"),
        ([math.nan, 1.0], "returned nan as a score; a finite number"),
        ([[1.0], 1.0], r"returned \[1.0\] within a list"),
        ([3e38, 3e38], "too large for its weight"),
    ],
)
def test_lists_that_fit_neither_turns_nor_tokens_fail_their_row(
    numbers: Returned, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        score([numbers], [5], ends=[[1, 4]], on_error="fail")
    scores = score([numbers, 1.0], [5, 5], ends=[[1, 4]] * 2, on_error="drop")
    assert has_failed(scores.scores)[:, 0].tolist() == [True, False]
    assert plain(scores.by_token[0]) == [None] * 5
    zero = score([numbers], [5], ends=[[1, 4]], on_error="zero")
    assert plain(zero.by_token[0]) == [None, None, None, None, 0.0]


def test_lists_may_be_tensors_and_come_through_a_pool_as_json() -> None:
    returned = plain_scores([torch.tensor([0.5, 1.0]), (1, None), torch.tensor([2.0]), 3], 4)
    assert json.loads(json.dumps(returned)) == [[0.5, 1.0], [1.0, None], 2.0, 3.0]


def test_the_rewards_of_an_environments_turns_come_with_their_last_tokens() -> None:
    """Three turns with observations between and behind them; of a trajectory whose environment
    failed the reward is that of the whole."""
    masks = [[True, True, False, True, True, False], [True, True]]
    assert turn_ends([0, 3, 4], masks[0]) == [1, 3, 4]
    assert turn_ends([], [False, False]) == [1]
    rows = TensorDict(
        {
            "response_ids": torch.nested.nested_tensor(
                [torch.arange(6) + 5, torch.arange(2) + 5], layout=torch.jagged
            ),
            "loss_mask": torch.nested.nested_tensor(
                [torch.tensor(mask) for mask in masks], layout=torch.jagged
            ),
            "turn_starts": torch.nested.nested_tensor(
                [torch.tensor([0, 3, 4]), torch.tensor([0])], layout=torch.jagged
            ),
            "turn_reward": torch.nested.nested_tensor(
                [torch.tensor([0.5, math.nan, 2.0]), torch.empty(0)], layout=torch.jagged
            ),
            "branches": torch.nested.nested_tensor(
                [torch.empty(0, dtype=torch.int64)] * 2, layout=torch.jagged
            ),
            "environment_reward": torch.tensor([2.5, -1.0]),
        },
        batch_size=[2],
    )
    rows["given"] = NonTensorStack('"q"', '"q"')
    rows["fields"] = NonTensorStack("{}", "{}")
    reads = ["turn_starts", "turn_reward", "environment_reward"]
    rewards = RewardSet([("environment_turns", 1.0)])
    scores = asyncio.run(score_rows(rewards, load_tokenizer("tiny"), rows, reads, by_token=True))
    assert scores.total.tolist() == [2.5, -1.0]
    assert [plain(row) for row in scores.by_token] == [
        [None, 0.5, None, None, 2.0, None],
        [None, -1.0],
    ]
    nothing = environment_turns(["a"], [[0]], [[]], [math.nan])
    assert nothing == [None]
