"""A game of several turns, which a model with random weights learns: guess a digit from its
environment's hints.

    prompt  turn 1  hint  turn 2  hint  turn 3
    1-7?    4       +     6       -     5        found: reward 1

Three turns suffice for one of seven digits: each guess halves what is left.
"""

from __future__ import annotations

import random

LARGEST = 7
HIGHER, LOWER, UNREADABLE = "+", "-", "*"


def guess(number: int, seed: int) -> dict[str, str | int]:
    """Make a row with a digit to be guessed."""
    answer = random.Random(f"guess:{seed}:{number}").randint(1, LARGEST)
    return {"prompt": f"1-{LARGEST}?", "answer": answer}


class Guess:
    """The environment: says whether the digit is higher or lower."""

    replayable = True
    gives_reward = True

    def reset(self, answer: int) -> None:
        self._answer = answer

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return the hint, the reward, and whether the digit was found."""
        digits = [character for character in text if character.isdigit()]
        if not digits:
            return UNREADABLE, 0.0, False
        guessed = int(digits[-1])
        if guessed == self._answer:
            return None, 1.0, True
        return HIGHER if guessed < self._answer else LOWER, 0.0, False
