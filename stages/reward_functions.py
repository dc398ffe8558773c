"""Reward functions by their names. How they are called is :mod:`stages.reward`'s; a recipe is checked without torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import traceback
from collections.abc import Callable
from typing import Any

from stages.tasks import REWARDS

ENTRY_POINTS = "asyncdock.rewards"
RESERVED = ("prompts", "completions", "completion_ids")  # arguments that reward functions get from the run


class RewardError(RuntimeError):
    """A reward function cannot be found, or broke its contract: the message names it and, where there is one, the
    row."""


def said_of(error: BaseException) -> str:
    """What an import has failed with: the message, and of what is no ImportError the type and the line too."""
    if isinstance(error, ImportError | AttributeError) or error.__traceback__ is None:
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = (
        f"{error.filename}, line {error.lineno}"
        if isinstance(error, SyntaxError)
        else f"{last.filename}, line {last.lineno}"
    )
    return f"{type(error).__name__}: {error} ({place})"


def find_reward(name: str) -> Callable[..., Any]:
    """The reward function called ``name``. Raises :class:`RewardError` with the names there are."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (Exception, SystemExit) as error:  # whatever a module does that is imported
            raise RewardError(f"reward {name!r} cannot be imported: {said_of(error)}") from error
    elif name in REWARDS:
        found = REWARDS[name]
    else:
        entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
        if name not in entries.names:
            known = sorted({*REWARDS, *entries.names})
            raise RewardError(f"reward {name!r} is not known; use 'module:function' or one of {known}")
        try:
            found = entries[name].load()
        except (Exception, SystemExit) as error:
            raise RewardError(f"reward {name!r} cannot be loaded: {said_of(error)}") from error
    if not callable(found):
        raise RewardError(f"reward {name!r} is a {type(found).__name__}, not a function")
    return found
