"""Reward functions of the tests' runs.

Importing this imports nothing else: each process of rewards does it anew.
"""

from __future__ import annotations

import time
from typing import Any

HERE = __name__
BAD = "hb="  # the prompt whose reward is too large for a gradient


def early_letters(completions: list[str], **_: Any) -> list[float]:
    """The share of characters from the first half of the alphabet: a model that knows nothing has
    something to learn from in every group."""
    return [sum(character < "n" for character in text) / max(1, len(text)) for text in completions]


def letter_by_letter(
    completions: list[str], completion_ids: list[list[int]], **_: Any
) -> list[list[float | None]]:
    """The same of each letter, at its token; none where a token is no letter of its own."""
    return [
        [float(letter < "n") for letter in text]
        if len(text) == len(ids)
        else [None] * (len(ids) - 1) + [0.5]
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


def unhurried(completions: list[str], **columns: Any) -> list[float]:
    """:func:`early_letters` after a while, in which training comes back."""
    time.sleep(0.15)
    return early_letters(completions, **columns)


def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Equal in about half of the groups of two."""
    return [float(len(ids) % 2) for ids in completion_ids]


def judged(
    completion_ids: list[list[int]], length: list[float], twice: list[list[int]]
) -> list[float]:
    assert [2 * len(ids) for ids in completion_ids] == [len(row) for row in twice]
    assert length == [3.0 * len(ids) for ids in completion_ids]
    return [value % 2 for value in length]


def short(length: list[float]) -> list[float]:
    return length


def overflowing(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Rewards of 2e37 for one prompt: every number is finite until the gradient's norm overflows
    float32."""
    scores = early_letters(completions)
    return [
        score * (2e37 if prompt == BAD else 1)
        for prompt, score in zip(prompts, scores, strict=True)
    ]


def poisoned(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [1e37 * (place % 4) for place in range(len(completions))]


def boom(completions: list[Any], **_: Any) -> list[float]:
    raise ZeroDivisionError("the reward's own mistake")
