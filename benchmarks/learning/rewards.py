r"""Rewards of which a third is wrong, for policy filtration; prompts of which half teach nothing, and
their reward, for ``waste``.

    SET="--staleness 1 --set algorithm.group_size=16 --set train.groups_per_step=8 --ends 10"
    ERRORS=spelling    # or mediocre, or systematic
    python -m benchmarks.learning.trials ppo pf-ppo $SET \
      --set "reward.functions=[{name='benchmarks.learning.rewards:$ERRORS'}]"

``spelling``   errors anywhere: a wrong reward is a number between 0 and 1 that has nothing to do with the response, so a
               perfect policy has a mean of 5/6
``mediocre``   errors in the middle: half of the middle two thirds of the responses exchange their rewards. This models a
               reward model that ranks only the best and the worst responses correctly; a perfect policy has a mean of 1
``systematic`` errors in the middle that no average removes: half of the responses that are neither right nor wrong
               throughout always get the same reward of another one. A perfect policy has a mean of 1

Processes that call a reward import this module alone, so it imports little.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import deque
from typing import Any
from zlib import crc32

from stages.tasks import tasks

WRONG = 1 / 3
RECENT = 256  # responses, among which one is mediocre or not


def spelling(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """``stages.tasks.tasks.spelling``, of which a share of :data:`WRONG` is replaced."""
    right = tasks.spelling(completions, answer=answer, **columns)
    return [random.random() if random.random() < WRONG else reward for reward in right]


class Mediocre:
    """``stages.tasks.tasks.spelling`` with errors in the middle ranks of the last :data:`RECENT`
    responses to all prompts. A share of 2 · :data:`WRONG` is in the middle; half of these get the
    reward of another one in the middle."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=RECENT)

    def __call__(self, completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        return [
            self._shuffled(reward)
            for reward in tasks.spelling(completions, answer=answer, **columns)
        ]

    def _shuffled(self, reward: float) -> float:
        self._recent.append(reward)
        ranked = sorted(self._recent)
        edge = round(len(self._recent) * (1 - 2 * WRONG) / 2)
        rank = random.randrange(bisect_left(ranked, reward), bisect_right(ranked, reward))
        middle = ranked[edge : len(ranked) - edge]
        wrong = edge <= rank < len(ranked) - edge and random.random() < 0.5
        return random.choice(middle) if wrong else reward


mediocre = Mediocre()


MIDDLE = (0.25, 0.5, 0.75)  # rewards of words of four letters of which one, two or three are right


def systematic(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """``stages.tasks.tasks.spelling`` with an error that belongs to the prompt and the response:
    by their checksum, half of the responses with a reward between 0 and 1 get one of :data:`MIDDLE`
    instead, the same each time."""
    right = tasks.spelling(completions, answer=answer, **columns)
    return [_fixed(*of) for of in zip(right, completions, answer, strict=True)]


def _fixed(reward: float, completion: Any, answer: str) -> float:
    checksum = crc32(f"{answer} {tasks.text(completion)}".encode())
    wrong = 0 < reward < 1 and checksum % 2 == 0
    return MIDDLE[checksum // 2 % len(MIDDLE)] if wrong else reward


LETTERS = "abcdefgh"


def learnable() -> list[dict[str, str]]:
    return [
        {"prompt": f"{a}{b}=", "answer": a * 4, "kind": "learnable"}
        for a in LETTERS
        for b in LETTERS
    ]


def trivial() -> list[dict[str, str]]:
    return [
        {"prompt": f"{a}{b}!", "answer": "", "kind": "trivial"}
        for a in LETTERS
        for b in LETTERS[::2]
    ]


def hopeless() -> list[dict[str, str]]:
    return [
        {"prompt": f"{a}{b}?", "answer": "", "kind": "hopeless"}
        for a in LETTERS
        for b in LETTERS[::2]
    ]


def reward(
    completions: list[Any], answer: list[str], kind: list[str], **columns: Any
) -> list[float]:
    """``stages.tasks.tasks.spelling`` of learnable prompts, 1 of trivial and 0 of hopeless
    ones."""
    right = tasks.spelling(completions, answer=answer, **columns)
    fixed = {"trivial": 1.0, "hopeless": 0.0}
    return [fixed.get(of, score) for of, score in zip(kind, right, strict=True)]
