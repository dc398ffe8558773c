"""Reward functions by their names. How they are called is :mod:`stages.reward`'s; a recipe is checked without torch."""

from __future__ import annotations

import functools
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
        try:
            module, _, attribute = name.partition(":")
            if attribute:
                found = getattr(importlib.import_module(module), attribute)
            else:
                found = REWARDS.get(name) or self._installed[name].load()
        except (Exception, SystemExit) as error:  # whatever a module does that is imported
            raise RewardError(f"reward {name!r} cannot be imported: {said_of(error)}") from error
        if not callable(found):
            raise RewardError(f"reward {name!r} is a {type(found).__name__}, not a function")
        return found  # type: ignore[no-any-return]
