"""Reward functions by their names. How they are called is :mod:`stages.reward`'s; a recipe is checked without torch."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from stages.tasks import REWARDS

ENTRY_POINTS = "asyncdock.rewards"
RESERVED = ("prompts", "completions", "completion_ids")  # arguments that reward functions get from the run


class RewardError(RuntimeError):
    """A reward function cannot be found, or broke its contract: the message names it and, where there is one, the
    row."""


def find_reward(name: str) -> Callable[..., Any]:
    """The reward function called ``name``. Raises :class:`RewardError` with the names there are."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise RewardError(f"reward {name!r} cannot be imported: {error}") from error
    elif name in REWARDS:
        found = REWARDS[name]
    else:
        entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
        if name not in entries.names:
            known = sorted({*REWARDS, *entries.names})
            raise RewardError(f"reward {name!r} is not known; use 'module:function' or one of {known}")
        found = entries[name].load()
    if not callable(found):
        raise RewardError(f"reward {name!r} is a {type(found).__name__}, not a function")
    return found
