"""Sums that a small language model cannot do alone, and the tool that does them.

user        What is 316 + 458?
assistant   <tool_call>{"name": "add", "arguments": {"a": 316, "b": 458}}</tool_call>
tool        774
assistant   774                                                              reward: the right number
"""

from __future__ import annotations

import random
from typing import Annotated, Any

from pydantic import Field

SYSTEM = "Do not add numbers yourself: call the tool, then answer with the number that it returns."


def sums(
    number: int,
    seed: int,
    *,
    digits: Annotated[int, Field(ge=1, le=9, description="`sums`: of each number.")] = 3,
    examples: Annotated[
        int,
        Field(ge=0, le=8, description="`sums`: solved sums in the prompt, in the text protocol."),
    ] = 1,
) -> dict[str, Any]:
    """Make a row with a sum of two numbers: a conversation with solved ``examples``."""
    draw = random.Random(f"sums:{seed}:{number}")
    least, most = 10 ** (digits - 1), 10**digits - 1
    messages = [{"role": "system", "content": SYSTEM}]
    for at in range(examples):
        a, b = (random.Random(f"example:{at}:{operand}").randint(least, most) for operand in "ab")
        messages += [_question(a, b), *_solution(a, b)]
    a, b = draw.randint(least, most), draw.randint(least, most)
    return {"prompt": [*messages, _question(a, b)], "answer": a + b}


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}?"}


def _solution(a: int, b: int) -> list[dict[str, str]]:
    call = f'{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}'
    return [
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "user", "content": f"<tool_response>\n{a + b}\n</tool_response>"},
        {"role": "assistant", "content": str(a + b)},
    ]


class Calculator:
    """The environment: one tool, and no reward of its own."""

    replayable = True

    def reset(self) -> None:
        pass

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a + b
