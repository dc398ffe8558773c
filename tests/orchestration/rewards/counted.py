"""Reward functions that write each of their calls down, so that tests can count them again."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

FILE = "COUNTED_CALLS"  # the variable that names the file: a line of name, result, seconds for each call
SCORE = 0.25  # of all responses
SECONDS = 0.03
_asked: set[str] = set()


def constant(completions: list[str], **_: Any) -> list[float]:
    """Takes its time, and scores all responses alike."""
    began = time.monotonic()
    time.sleep(SECONDS)
    _write("constant", "scored", began)
    return [SCORE for _ in completions]


async def judge(completions: list[str], **_: Any) -> list[float]:
    """Scores by the number of different characters. Never scores a response that begins with e to h,
    and one that begins with a to d at the second call only."""
    began = time.monotonic()
    (text,) = completions
    await asyncio.sleep(0.001)
    if "e" <= text[:1] <= "h" or ("a" <= text[:1] <= "d" and text not in _asked):
        _asked.add(text)
        _write("judge", "failed", began)
        raise ConnectionError("the judge is busy")
    _write("judge", "scored", began)
    return [len(set(text)) / 4]


def _write(name: str, result: str, began: float) -> None:
    with open(os.environ[FILE], "a") as file:
        file.write(f"{name} {result} {time.monotonic() - began}\n")
