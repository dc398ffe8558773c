"""The prompts and the reward of benchmarks/waste.py, apart from it: processes that call the reward
import this alone."""

from __future__ import annotations

from typing import Any

from stages.tasks import tasks

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
