"""What a reward function may return, and what becomes of the rest: rows without a score, and calls
with a wrong number."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from orchestration.recipe.loading.load import parse_recipe
from orchestration.rewards.functions import reward_set
from stages.model.load import tiny_tokenizer
from stages.rewards.calls import CallFailed, plain_number, plain_scores
from stages.rewards.registry import RewardError
from stages.rewards.stage import ErrorPolicy, RewardScores, RewardSet
from tests.orchestration.rewards.faulty import ranks_too_few, ranks_too_few_async, ranks_with_a_nan
from tests.orchestration.runs import TINY

TEXTS = ["a", "bbb", "cc", "dddd"]


class Raising:
    """Has a length, and no items."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        raise ConnectionError("gone")


SCORES: list[Callable[[], Any]] = [
    lambda: [0.5, 1],
    lambda: (0.5, 1),
    lambda: (x for x in (0.5, 1.0)),
    lambda: map(float, ("0.5", "1")),
    lambda: {"a": 0.5, "b": 1.0}.values(),
    lambda: np.array([0.5, 1.0]),
    lambda: np.array([[0.5], [1.0]], dtype=np.float32),
    lambda: [np.float64(0.5), np.int64(1)],
    lambda: torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
    lambda: torch.tensor([[0.5], [1.0]], requires_grad=True),
    lambda: [torch.tensor(0.5), torch.tensor([1.0])],
    lambda: [Fraction(1, 2), True],
    lambda: [Decimal("0.5"), np.True_],
]


@pytest.mark.parametrize("make", SCORES)
def test_scores_of_any_form_are_read_in_their_order(make: Callable[[], Any]) -> None:
    assert plain_scores(make(), 2) == [0.5, 1.0]


MISFITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: 1.0, "returned a float; a list of 2 numbers is wanted"),
    (lambda: None, "returned a NoneType"),
    (lambda: "10", "returned a str"),
    (lambda: b"10", "returned a bytes"),
    (lambda: {"a": 1.0, "b": 0.0}, "returned a dict"),
    (lambda: {1.0, 0.0}, "returned a set"),
    (lambda: np.float64(1.0), "returned a float64"),
    (lambda: np.array(1.0), "returned a ndarray"),
    (lambda: torch.tensor(1.0), "returned a Tensor"),
    (lambda: torch.zeros(2, 2), r"returned a Tensor of shape \[2, 2\]; \[2\] is wanted"),
    (lambda: np.zeros((1, 2)), r"returned a ndarray of shape \[1, 2\]"),
    (lambda: [1.0], "returned 1 scores for 2 rows"),
    (lambda: [1.0] * 3, "returned 3 scores for 2 rows"),
    (lambda: [], "returned 0 scores for 2 rows"),
    (lambda: (1.0 for _ in iter(int, 1)), "returned more than 2 scores for 2 rows"),
    (lambda: (1 / x for x in (1, 0)), "cannot be read: ZeroDivisionError"),
    (lambda: Raising(), "cannot be read: ConnectionError"),
]


@pytest.mark.parametrize(("make", "message"), MISFITS)
def test_what_is_not_one_score_for_each_row_is_an_error_of_the_call(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(CallFailed, match=message) as caught:
        plain_scores(make(), 2)
    assert caught.value.misfit


@pytest.mark.parametrize(
    "bad",
    [
        "1.0",
        math.nan,
        math.inf,
        -math.inf,
        1e39,
        10**400,
        1j,
        [[0.5]],
        np.nan,
        torch.zeros(2, 2),
        Decimal("nan"),
    ],
)
def test_a_score_that_is_no_finite_number_is_an_error_of_its_row(bad: Any) -> None:
    first, second = plain_scores([0.5, bad], 2)
    assert first == 0.5
    assert isinstance(second, str)


def test_an_environments_reward_is_one_number() -> None:
    assert plain_number(True) == 1.0
    assert plain_number(None) is None
    assert (
        plain_number([0.5, 1.0]) == "returned [0.5, 1.0] as a score; a number, or None, is wanted"
    )


def huge(completions: list[str], **_: Any) -> list[float]:
    return [3e38 for _ in completions]


def tiny(completions: list[str], **_: Any) -> list[float]:
    return [(-0.0, -1e-60)[len(text) % 2] for text in completions]


def none_for_short(completions: list[str], **_: Any) -> list[float | None]:
    return [None if len(text) == 1 else float(len(text)) for text in completions]


def none_for_two(completions: list[str], **_: Any) -> list[float | None]:
    return [None if len(text) <= 2 else 10.0 for text in completions]


def score(*functions: tuple[Callable[..., Any], float], **policy: Any) -> RewardScores:
    names = [
        (f"{function.__module__}:{function.__name__}", weight) for function, weight in functions
    ]
    rewards = RewardSet(names, policy=ErrorPolicy(**policy), batched=[name for name, _ in names])
    return asyncio.run(rewards.score(["p"] * 4, TEXTS, [[1]] * 4, [{}] * 4))


@pytest.mark.parametrize("function", [ranks_too_few, ranks_too_few_async])
def test_a_wrong_number_of_scores_fails_all_rows_and_no_row_is_called_alone(
    function: Callable[..., Any],
) -> None:
    dropped = score((function, 1.0))
    assert dropped.failed.all()
    assert not dropped.counted.any()
    zero = score((function, 1.0), on_error="zero")
    assert zero.total.tolist() == [0.0] * 4
    assert not zero.counted.any()
    message = (
        r"returned 3 scores for 4 rows; .*for 2 of the last 2 samples.*max_error_share = "
        r"0\.06"
    )
    with pytest.raises(RewardError, match=message):
        score((function, 1.0), max_error_share=0.06)  # of 32: one may fail


def test_a_row_without_a_score_leaves_those_of_its_batch_as_they_were() -> None:
    """By hand: lengths 1, 3, 2, 4 of four; called alone each would get 1.0."""
    scores = score((ranks_with_a_nan, 1.0))
    assert scores.scores[:, 0].tolist() == [0.25, 0.75, math.inf, 1.0]
    assert scores.counted.tolist() == [True, True, False, True]


def test_scores_that_a_weight_makes_too_large_for_float32_fail() -> None:
    assert not score((huge, 2.0), on_error="zero").counted.any()
    assert score((huge, 1.0)).counted.all()


def test_no_score_of_a_function_is_taken_for_a_failure() -> None:
    scores = score((tiny, 1.0))
    assert scores.counted.all()
    assert not scores.scores.signbit().any()


def test_a_response_without_an_applicable_function_has_no_reward() -> None:
    """By hand: a has neither score, bbb 3 + 10 · 0.5, cc 2 alone, dddd 4 + 5."""
    scores = score((none_for_short, 1.0), (none_for_two, 0.5))
    assert scores.total.tolist() == [0.0, 8.0, 2.0, 9.0]
    assert scores.counted.tolist() == [False, True, True, True]
    assert scores.means(["short", "two"]) == {"short": 3.0, "two": 10.0}


def test_texts_keep_special_tokens_where_the_recipe_says_so_but_for_the_end() -> None:
    """By hand: <eos>, <unk> and <pad> are the tiny tokenizer's special tokens."""
    tokenizer = tiny_tokenizer()
    a, unknown, end = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "<unk>", "<eos>"))
    ids = [a, unknown, a, end]
    assert RewardSet([("spelling", 1.0)]).text(tokenizer, ids) == "aa"
    keeping = RewardSet([("spelling", 1.0)], end_tokens={end})
    assert keeping.text(tokenizer, ids) == "a<unk>a"
    assert keeping.text(tokenizer, [end, a]) == "<eos>a"
    assert keeping.text(tokenizer, [unknown]) == "<unk>"
    assert keeping.text(tokenizer, []) == ""
    recipe = parse_recipe(
        {**TINY, "reward": {"functions": [{"name": "spelling"}], "special_tokens": "keep"}}
    )
    assert reward_set(recipe, end_tokens=[end]).text(tokenizer, ids) == "a<unk>a"
