"""The calculator: what its rows ask, and what its environment rewards."""

from __future__ import annotations

import json
import re

import pytest

from stages.tasks.calculator import EXAMPLE, Calculator, calculator


@pytest.mark.parametrize("digits", [1, 4, 18])
def test_a_row_asks_for_the_sum_that_it_answers(digits: int) -> None:
    for number in range(50):
        row = calculator(number, seed=3, digits=digits)
        *example, question = row["prompt"]
        a, b = map(int, re.findall(r"\d+", question["content"]))
        assert a + b == row["answer"]
        assert max(a, b) < 10**digits
        call = json.loads(example[1]["content"].removeprefix("<tool_call>").split("</")[0])
        assert tuple(call["arguments"].values()) == EXAMPLE
    assert calculator(5, seed=3) == calculator(5, seed=3) != calculator(6, seed=3)


def test_the_reward_is_for_the_sum_that_was_asked_for() -> None:
    environment = Calculator()
    environment.reset(answer=7)
    assert environment.get_reward() == 0
    assert environment.add(1, 2) == 3
    assert environment.get_reward() == 0
    assert environment.add(3, 4) == 7
    assert environment.get_reward() == 1
    environment.reset(answer=7)
    assert environment.get_reward() == 0
