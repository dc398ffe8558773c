"""Calls of reward functions: how one is called, what it must return, and which code calls it. Importing this needs no torch.

RewardSet ── call(name, arguments) ──▶ LocalCaller: in this process       (functions of the package, which are harmless)
                                  └──▶ a pool of processes                (all other functions; orchestration.processes)
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stages.rewards.registry import RewardFunctions
from stages.user_code import call, place_of

Scores = list[float | None]  # one for each row; None: the function does not apply
LARGEST = 3.4e38  # float32 holds it
Arguments = Mapping[str, list[Any]]  # one value for each row, of each name; "completions" is always there


class CallFailed(RuntimeError):
    """A call of a reward function gave no scores. The message says why, as what follows the function's name; ``place`` is
    the file and line, where known. ``shared``: the process ended while other calls ran in it too, which may be the cause."""

    def __init__(self, message: str, place: str = "", *, shared: bool = False) -> None:
        super().__init__(message)
        self.place, self.shared = place, shared


class Caller(Protocol):
    """Calls reward functions by name. ``parallel``: how many calls of plain functions run at the same time."""

    parallel: int

    async def open(self) -> None:
        """Find the functions. Raises RewardError for one that cannot be called at all. Does nothing when repeated."""

    async def call(self, name: str, arguments: Arguments, timeout: float, *, alone: bool = False) -> Scores:
        """The scores of the rows, within ``timeout`` seconds. ``alone``: no other call runs in its process meanwhile.
        Raises CallFailed."""

    async def close(self) -> None:
        """End what runs."""


class LocalCaller(Caller):
    """Calls functions in this process, plain ones in a thread. One that hangs keeps its thread. Raises RewardError for a
    name that is not found."""

    parallel = 1

    def __init__(self, names: Sequence[str]) -> None:
        known = RewardFunctions()
        self._functions = {name: known.find(name) for name in names}

    async def open(self) -> None:
        pass

    async def call(self, name: str, arguments: Arguments, timeout: float, *, alone: bool = False) -> Scores:
        function, rows, deadline = self._functions[name], len(arguments["completions"]), asyncio.timeout(timeout)
        try:
            async with deadline:
                result = await call(function, **selected(arguments, named_by(function)))
        except (Exception, SystemExit) as error:
            raise too_slow(timeout, rows) if deadline.expired() else raised(error, function) from error
        return plain_scores(result, rows)

    async def close(self) -> None:
        pass


def named_by(function: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments that ``function`` takes; None: all."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return list(parameters)


def selected(arguments: Arguments, names: Sequence[str] | None) -> dict[str, list[Any]]:
    return {name: values for name, values in arguments.items() if names is None or name in names}


def plain_scores(result: Any, rows: int) -> Scores:
    """What a function returned, as plain numbers. Raises CallFailed unless it is a finite number, or None, for each row."""
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        raise CallFailed(f"returned a {type(result).__name__}; a list of {rows} numbers is wanted")
    if len(result) != rows:
        raise CallFailed(f"returned {len(result)} scores for {rows} rows; one for each is wanted")
    scores: Scores = []
    for score in result:
        if getattr(score, "ndim", None) == 0:  # of a tensor, or of a numpy array
            score = score.item()
        if score is not None and not isinstance(score, numbers.Real):
            raise CallFailed(f"returned {score!r:.100} as a score; a number, or None, is wanted")
        if score is not None and not abs(float(score)) <= LARGEST:
            raise CallFailed(f"returned {score} as a score; a finite number, or None, is wanted")
        scores.append(None if score is None else float(score))
    return scores


def raised(error: BaseException, function: Callable[..., Any]) -> CallFailed:
    try:
        shown = f"{error!r:.500}"
    except Exception:
        shown = f"an {type(error).__name__} that cannot be shown"
    return CallFailed(f"raised {shown}", place_of(error, function))


def too_slow(timeout: float, rows: int) -> CallFailed:
    return CallFailed(f"took more than {timeout:g} s for {rows} rows")
