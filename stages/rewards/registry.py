"""Reward functions by their names. :mod:`stages.rewards.stage` calls them.

Importing this needs no torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

from pipeline.problems import Fatal, Problem, ProblemError
from stages.tasks.tasks import REWARDS
from stages.user_code import CodeUnusable, find

ENTRY_POINTS = "asyncdock.rewards"
# arguments that the run gives to reward functions
RESERVED = ("prompts", "completions", "completion_ids")


class RewardError(Fatal, RuntimeError):
    """A reward function cannot be found, or returned something else than scores.

    The message names it, and the row.
    """


class RewardUnknown(ProblemError, RewardError):
    """There is no reward function of this name, or it cannot be imported."""


class RewardFunctions:
    """Looks reward functions up by name.

    Entry points are read once, on the first name that needs them.
    """

    @functools.cached_property
    def _installed(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=ENTRY_POINTS)

    def find(self, name: str) -> Callable[..., Any]:
        """Return the reward function called ``name``. Raises RewardUnknown."""
        key = "reward.functions.name"
        try:
            function = find(key, name, REWARDS, lambda: self._installed, "module:function")
        except CodeUnusable as error:
            raise RewardUnknown(*error.problems) from error
        if not callable(function):
            reason = f"is a {type(function).__name__}, not a function"
            raise RewardUnknown(Problem(key, name, reason, "correct the name"))
        return function  # type: ignore[no-any-return]


def call_problem(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Return the reason why ``function`` cannot be called as a reward function, whatever it
    computes, and what to do; None: it can."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        return (
            f"cannot be called by names: its parameters are not known ({error})"
        ), "wrap it in a function of your own"
    if by_place := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        return (
            f"takes {by_place[0]!r} by its place only, and is called by names"
        ), "remove the / from its parameters"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "yields its scores", "return them as a list"
    return None


def parameters_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the named parameters of a reward function, each with whether it needs a value."""
    named = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind in named}
