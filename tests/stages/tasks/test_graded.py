"""The graded tasks: what their rows ask, what their rewards pay, and the best that any policy gets."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stages.tasks import graded
from stages.tasks.graded import bandit, payout
from stages.tasks.tasks import REWARDS, TASKS, spelling, task_config, task_function

ROWS = 400


def solve_copy(prompt: str) -> str:
    return prompt.removesuffix("=")


def solve_sort(prompt: str) -> str:
    """Sort by counting, not by a library."""
    return "".join(letter * prompt.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz")


def solve_sum(prompt: str) -> str:
    """Count on around a circle of five."""
    at = 0
    for digit in prompt.removesuffix("=").split("+"):
        for _ in range(int(digit)):
            at = 0 if at == 4 else at + 1
    return str(at)


@pytest.mark.parametrize(
    ("task", "difficulties", "solve"),
    [
        ("copy", (1, 3, 26), solve_copy),
        ("sort", (1, 3, 26), solve_sort),
        ("modular_sum", (1, 2, 8), solve_sum),
    ],
)
def test_the_optimum_is_reached_by_a_solution_alone(
    task: str, difficulties: Sequence[int], solve: Callable[[str], str]
) -> None:
    make = task_function(task)
    for difficulty in difficulties:
        rows = [make(number, 3, difficulty=difficulty) for number in range(50)]
        answers = [solve(row["prompt"]) for row in rows]
        wanted = [row["answer"] for row in rows]
        assert spelling(answers, answer=wanted) == [1.0] * len(rows)
        other = ["z" * len(answer) for answer in answers]
        assert spelling(other, answer=wanted) == [0.0] * len(rows)
        assert len({row["prompt"] for row in rows}) > 1
    assert make(5, seed=3) == make(5, seed=3)
    assert [make(n, seed=3) for n in range(20)] != [make(n, seed=4) for n in range(20)]


def test_of_all_responses_to_a_row_the_answer_alone_has_the_optimum() -> None:
    for number in range(20):
        row = task_function("sort")(number, 0, difficulty=2)
        responses = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=2)]
        scores = spelling(responses, answer=[row["answer"]] * len(responses))
        assert [text for text, score in zip(responses, scores, strict=True) if score == 1] == [
            row["answer"]
        ]


def test_no_policy_of_the_bandit_is_better_than_its_optimum() -> None:
    """Of all 6**4 ways to choose an arm for each context, the best one pays 0.9 of the rounds."""
    paid = defaultdict[tuple[str, str], list[float]](list)
    for number in range(ROWS * 10):
        row = bandit(number, 7)
        for arm in "012345":
            paid[row["prompt"], arm] += payout([f"{arm}zz"], payouts=[row["payouts"]])
    contexts = sorted({prompt for prompt, _ in paid})
    share = {key: sum(values) / len(values) for key, values in paid.items()}
    values = [
        sum(share[context, arm] for context, arm in zip(contexts, policy, strict=True)) / 4
        for policy in itertools.product("012345", repeat=4)
    ]
    assert max(values) == pytest.approx(graded.BEST, abs=0.02)
    assert sum(value > 0.8 for value in values) < len(values) / 100, "few policies are near it"
    for context in contexts:
        exact = graded.shares(7, context.removesuffix("="))
        measured = [share[context, arm] for arm in "012345"]
        assert measured == pytest.approx(exact, abs=0.05)


@pytest.mark.parametrize("completion", ["", "x1", "9", " 1"])
def test_what_chooses_no_arm_pays_nothing(completion: str) -> None:
    assert payout([completion, "1abc"], payouts=["111111", "010000"]) == [0.0, 1.0]


@pytest.mark.parametrize("task", [name for name in TASKS if name not in ("repeat", "guess")])
def test_a_difficulty_that_is_none_is_refused(task: str) -> None:
    config = task_config(task)
    (option,) = config.model_fields
    for value in (-1, 10**9, "2", 1.5):
        with pytest.raises(ValueError, match=option):
            config(**{option: value})


def test_each_reward_and_task_has_a_function() -> None:
    import pkgutil

    functions: list[Any] = [pkgutil.resolve_name(name) for name in REWARDS.values()]
    assert all(map(callable, [*functions, *map(task_function, TASKS)]))
