"""Answers that reasoning_gym would evaluate: none is, and right answers score as before."""

from __future__ import annotations

from typing import Any

import pytest

from stages.tasks.gym_answers import (
    NotPlain,
    integer,
    literal,
    plain_expression,
    reasoning_gym,
)

SLOW = {"knight_swap": 1, "futoshiki": 1, "arc_agi": 1}  # seconds for a row


@pytest.mark.timeout(600)
def test_answers_score_as_the_library_scores_them() -> None:
    """Of each task that the library has: right answers and wrong ones, also in other forms."""
    gym = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    rows: list[tuple[str, str, Any, float]] = []
    for task in sorted(DATASETS):
        if task == "composite":  # of other tasks, which its rows name
            continue
        data = gym.create_dataset(task, size=3, seed=5)
        score = gym.get_score_answer_fn(task)
        for number in range(SLOW.get(task, 3)):
            entry = data[number]
            right = str(entry["answer"])
            forms = [
                right,
                "wrong",
                "[1, 2]",
                repr(right.split()),
                repr([*right]),
                "x**2 + C",
                "24",
            ]
            for text in [*forms, repr([line.split() for line in right.split("\n")])]:
                try:
                    rows.append((task, text, entry, float(score(text.strip(), entry))))
                except Exception:
                    continue
    assert len({task for task, *_ in rows}) > 80
    different = [
        (task, text, wanted, found)
        for task, text, entry, wanted in rows
        for found in reasoning_gym(
            [text], [entry["question"]], [entry["answer"]], [entry["metadata"]]
        )
        if found != wanted
    ]
    assert different == []


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('id')",
        "().__class__",
        "x.real",
        "(1).real",
        "open(x)",
        "eval(x)",
        "exit()",
        "input()",
        "sympify(chr(95))",
        "lambdify(x, x)",
        "[x for x in y]",
        "lambda: 1",
        "x if y else z",
        "'text'",
        'f"{x}"',
        "x = 1",
        "x; y",
        "a_b",
        "__builtins__",
        "x" * 5000,
    ],
)
def test_no_more_than_an_expression_is_parsed(text: str) -> None:
    pytest.importorskip("sympy")
    with pytest.raises(NotPlain):
        plain_expression(text)


@pytest.mark.parametrize(
    "text", ["-3*x**3*sin(2*x) + C", "(1 + 2)*12 - 6/3", "7 * X^2", "4!", "exp(x)/E + sqrt(theta)"]
)
def test_expressions_are(text: str) -> None:
    pytest.importorskip("sympy")
    assert plain_expression(text) == text


def test_literals_and_integers() -> None:
    assert literal(" [['Q', '_'], ['_', 'Q']]") == [["Q", "_"], ["_", "Q"]]
    assert integer("((0x3a24 - 0x24b8) << 1)") == 2 * (0x3A24 - 0x24B8)
    for text in ("__import__('os')", "[].append(1)", "1 << (1 << 40)", "2 ** 9", "'a' * 9"):
        with pytest.raises(ValueError):
            integer(text) if "<<" in text or "**" in text or "*" in text else literal(text)
