"""Sums of large numbers, and a calculator for them: a task that a small language model cannot do
alone, and learns to do with a tool.

    prompt   what is 352 + 761?  its call, as an example  what is 4711 + 1234?
    turn 1   add(4711, 1234)                              a tool call, as the dialogue writes it
    result   5945
    turn 2   5945
"""

from __future__ import annotations

import json
import random
from typing import Annotated, Any

from pydantic import Field

EXAMPLE = (352, 761)


def calculator(
    number: int,
    seed: int,
    *,
    digits: Annotated[
        int, Field(ge=1, le=18, description="`calculator`: digits of the larger numbers.")
    ] = 4,
) -> dict[str, Any]:
    """Make a row with a sum of two numbers; its conversation begins with the call for another
    sum."""
    draw = random.Random(f"calculator:{seed}:{number}")
    first, second = (draw.randrange(10 ** draw.randint(min(3, digits), digits)) for _ in range(2))
    call = {"name": "add", "arguments": dict(zip("ab", EXAMPLE, strict=True))}
    messages = [
        question(*EXAMPLE),
        {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
        question(first, second),
    ]
    return {"prompt": messages, "answer": first + second}


def question(first: int, second: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {first} + {second}?"}


class Calculator:
    """The environment: adds. Its reward is 1 when the sum was called for."""

    replayable = True

    def reset(self, answer: int) -> None:
        self._answer = answer
        self._results: list[int] = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self._results.append(a + b)
        return a + b

    def get_reward(self) -> float:
        return float(self._answer in self._results)
