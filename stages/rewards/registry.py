"""Reward functions by their names. How they are called: :mod:`stages.rewards.stage`. Importing this needs no torch."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

from stages.prompts.tasks import REWARDS
from stages.user_code import imported

ENTRY_POINTS = "asyncdock.rewards"
RESERVED = ("prompts", "completions", "completion_ids")  # arguments that reward functions get from the run


class RewardError(RuntimeError):
    """A reward function cannot be found, or broke its contract: the message names it and, where there is one, the
    row."""


class RewardFunctions:
    """Reward functions by their names. What is installed is looked up once, when the first name asks for it."""

    @functools.cached_property
    def _installed(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=ENTRY_POINTS)

    def find(self, name: str) -> Callable[..., Any]:
        """The reward function called ``name``. Raises :class:`RewardError` with the names there are."""
        if ":" not in name and name not in REWARDS and name not in self._installed.names:
            known = sorted({*REWARDS, *self._installed.names})
            raise RewardError(f"reward {name!r} is not known; use 'module:function' or one of {known}")
        if name in REWARDS:
            return REWARDS[name]
        place = name if ":" in name else f"{self._installed[name].module}:{self._installed[name].attr}"
        try:
            found = imported(place)
        except ImportError as error:
            raise RewardError(f"reward {name!r} {error}") from error
        if not callable(found):
            raise RewardError(f"reward {name!r} is a {type(found).__name__}, not a function")
        return found  # type: ignore[no-any-return]
