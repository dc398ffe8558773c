"""Reward functions by their names. How they are called is :mod:`stages.reward`'s; a recipe is checked without torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from stages.tasks import REWARDS
from stages.user_code import imported

ENTRY_POINTS = "asyncdock.rewards"
RESERVED = ("prompts", "completions", "completion_ids")  # arguments that reward functions get from the run


class RewardError(RuntimeError):
    """A reward function cannot be found, or broke its contract: the message names it and, where there is one, the
    row."""


def find_reward(name: str) -> Callable[..., Any]:
    """The reward function called ``name``. Raises :class:`RewardError` with the names there are."""
    if name in REWARDS:
        return REWARDS[name]
    place = name
    if ":" not in name:
        entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
        if name not in entries.names:
            known = sorted({*REWARDS, *entries.names})
            raise RewardError(f"reward {name!r} is not known; use 'module:function' or one of {known}")
        place = f"{entries[name].module}:{entries[name].attr}"
    try:
        found = imported(place)
    except ImportError as error:
        raise RewardError(f"reward {name!r} {error}") from error
    if not callable(found):
        raise RewardError(f"reward {name!r} is a {type(found).__name__}, not a function")
    return found
