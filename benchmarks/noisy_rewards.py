"""A reward that is wrong for a third of the responses, at random: what policy filtration is for.

    python benchmarks/learning.py ppo pf-ppo --staleness 1 --set algorithm.group_size=16 --set train.groups_per_step=8
        --set 'reward.functions=[{name="benchmarks.noisy_rewards:spelling"}]'

A wrong reward is a number between 0 and 1 that has nothing to do with the response: a perfect policy has a mean of 5/6.
"""

from __future__ import annotations

import random
from typing import Any

from stages.prompts import tasks

WRONG = 1 / 3


def spelling(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """``stages.prompts.tasks.spelling``, of which a share of :data:`WRONG` is replaced."""
    right = tasks.spelling(completions, answer=answer, **columns)
    return [random.random() if random.random() < WRONG else reward for reward in right]
