"""Reward functions whose times are known, as each sleeps as long as the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

SECONDS = 0.25


def slow(completions: list[str], **_: object) -> list[float]:
    time.sleep(SECONDS)
    return [1.0 for _ in completions]


def quick(completions: list[str], **_: object) -> list[float]:
    return [1.0 for _ in completions]


def lazy(completions: list[str], **_: object) -> Iterator[float]:
    """Computes its scores while they are read."""
    for _ in completions:
        time.sleep(SECONDS)
        yield 1.0


def raising(completions: list[str], **_: object) -> list[float]:
    time.sleep(SECONDS)
    raise ConnectionError("busy")


def hanging(completions: list[str], **_: object) -> list[float]:
    time.sleep(60)
    return [1.0 for _ in completions]


async def asking(completions: list[str], **_: object) -> list[float]:
    await asyncio.sleep(SECONDS)
    return [1.0 for _ in completions]


async def never(completions: list[str], **_: object) -> list[float]:
    await asyncio.sleep(60)
    return [1.0 for _ in completions]


def deferring(completions: list[str], **_: object) -> object:
    """A plain function that returns a coroutine."""
    return asking(completions)
