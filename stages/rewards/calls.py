"""Calls of reward functions: how one is called, what it must return, and which code calls it.

Importing this needs no torch.

RewardSet ── call(name, arguments) ──▶ LocalCaller: in this process       (functions of the package, which are harmless)
                                  │                └ rows with an expression ─▶ a pool, in a sandbox (stages.rewards.divided)
                                  └──▶ a pool of processes                (all other functions; orchestration.rewards)
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import numbers
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from stages.rewards.registry import RewardFunctions
from stages.user_code import place_of

# of a row. None: the function does not apply; a text: why the row has no score; a list: its rewards
# by turn or by token (stages.rewards.by_token)
Score = float | None | str | list[float | None]
Scores = list[Score]  # one for each row
LARGEST = 3.4e38  # float32 holds it
# one value for each row, of each name; "completions" is always there
Arguments = Mapping[str, list[Any]]


class CallFailed(RuntimeError):
    """A call of a reward function gave no scores. The message says why, as what follows the
    function's name; ``place`` is the file and line, where known. ``shared``: the process ended
    while other calls ran in it too, which may be the cause. ``misfit``: the function returned, and
    not one score for each row. Calls of single rows would hide that."""

    def __init__(
        self, message: str, place: str = "", *, shared: bool = False, misfit: bool = False
    ) -> None:
        super().__init__(message)
        self.place = place
        self.shared = shared
        self.misfit = misfit


@dataclass
class CallCounts:
    """What one process has had one function score: ``responses``, and how many of them were
    ``lost``, as each call with them failed. Calls: how many there were, how many of them failed,
    how many were made ``again`` after a failure. Of all of them together the ``seconds`` inside the
    function, and those that they ``waited``: for a process, or for the calls before them."""

    responses: int = 0
    lost: int = 0
    calls: int = 0
    failed: int = 0
    again: int = 0
    seconds: float = 0.0
    waited: float = 0.0


class Stopwatch:
    """Adds up the ``seconds`` inside a function: while it is entered, in any thread."""

    def __init__(self) -> None:
        self._before = 0.0
        self._entered: float | None = None

    def __enter__(self) -> None:
        self._entered = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._before = self.seconds
        self._entered = None

    @property
    def seconds(self) -> float:
        """Also while it is entered: a function that takes too long may not return."""
        entered = self._entered
        return self._before + (0.0 if entered is None else time.monotonic() - entered)

    def add(self, seconds: float) -> None:
        """Add seconds that were measured in another process."""
        self._before += seconds


class Caller(Protocol):
    """Calls reward functions by name.

    ``parallel``: how many calls of plain functions run at the same time.
    """

    parallel: int

    async def open(self) -> None:
        """Find the functions.

        Raises RewardError for one that cannot be called at all. Does nothing when repeated.
        """

    async def is_async(self, name: str) -> bool:
        """Return whether the function is a coroutine function, whose calls run at the same time."""

    async def call(
        self,
        name: str,
        arguments: Arguments,
        timeout: float,
        *,
        alone: bool = False,
        watch: Stopwatch | None = None,
    ) -> Scores:
        """Return the scores of the rows, within ``timeout`` seconds.

        ``alone``: no other call runs in its process meanwhile. ``watch``: gets the seconds inside
        the function, until its scores are read; also of a call that fails. Raises CallFailed.
        """

    async def close(self) -> None:
        """End what runs."""


class LocalCaller(Caller):
    """Calls functions in this process, plain ones in a thread.

    One that hangs keeps its thread. Raises RewardError for a name that is not found.
    """

    parallel = 1

    def __init__(self, names: Sequence[str]) -> None:
        known = RewardFunctions()
        self._functions = {name: known.find(name) for name in names}

    async def open(self) -> None:
        pass

    async def is_async(self, name: str) -> bool:
        return inspect.iscoroutinefunction(self._functions[name])

    async def call(
        self,
        name: str,
        arguments: Arguments,
        timeout: float,
        *,
        alone: bool = False,
        watch: Stopwatch | None = None,
    ) -> Scores:
        function = self._functions[name]
        rows = len(arguments["completions"])
        deadline = asyncio.timeout(timeout)
        watch = watch or Stopwatch()
        try:
            async with deadline:
                result = await _timed(function, selected(arguments, named_by(function)), watch)
        except (Exception, SystemExit) as error:
            raise (
                too_slow(timeout, rows) if deadline.expired() else raised(error, function)
            ) from error
        with watch:
            return plain_scores(result, rows)

    async def close(self) -> None:
        pass


async def _timed(function: Callable[..., Any], named: dict[str, Any], watch: Stopwatch) -> Any:
    """Call ``function``, plain or async; a plain one in a thread, as it may be slow. The time until
    a thread is free is not on the ``watch``."""

    def in_thread() -> Any:
        with watch:
            return function(**named)

    if inspect.iscoroutinefunction(function):
        with watch:
            return await function(**named)
    result = await asyncio.to_thread(in_thread)
    if not isinstance(result, Awaitable):
        return result
    with watch:
        return await result


def named_by(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of the arguments that ``function`` takes; None: all."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return list(parameters)


def selected(arguments: Arguments, names: Sequence[str] | None) -> dict[str, list[Any]]:
    return {name: values for name, values in arguments.items() if names is None or name in names}


def plain_scores(result: Any, rows: int) -> Scores:
    """Return a function's result for ``rows`` rows as plain values.

    A list, a tuple, an iterator, a tensor or an array [N] or [N, 1] of numbers will do. Raises
    CallFailed, a misfit, unless there is one value for each row.
    """
    try:
        values = _values(result, rows)
    except CallFailed:
        raise
    except (Exception, SystemExit) as error:
        # code of the user: an iterator, or a class with a length
        raise CallFailed(f"returned what cannot be read: {_shown(error)}", misfit=True) from error
    if len(values) != rows:
        count = (
            (f"more than {rows}")
            if isinstance(result, Iterator) and len(values) > rows
            else len(values)
        )
        raise CallFailed(
            f"returned {count} scores for {rows} rows; one for each is wanted", misfit=True
        )
    return [_plain_score(value) for value in values]


def plain_number(value: Any) -> float | str | None:
    """Return a reward as a number, or None; a text says why it is neither."""
    (score,) = plain_scores([value], 1)
    if isinstance(score, list):
        return f"returned {value!r:.100} as a score; a number, or None, is wanted"
    return score


def _values(result: Any, rows: int) -> list[Any]:
    """Return the values of ``result``; of an iterator, which may have no end, one more than wanted
    at most."""
    shape = tuple(getattr(result, "shape", ()))
    has_order = isinstance(result, Iterable) and not isinstance(
        result, str | bytes | bytearray | Mapping | Set
    )
    if not has_order or getattr(result, "ndim", 1) == 0:
        wanted = f"a list of {rows} numbers is wanted"
        raise CallFailed(f"returned a {type(result).__name__}; {wanted}", misfit=True)
    if len(shape) > 1 and shape != (rows, 1):
        wanted = f"[{rows}] is wanted"
        raise CallFailed(
            f"returned a {type(result).__name__} of shape {[*shape]}; {wanted}", misfit=True
        )
    if isinstance(result, Iterator):
        return list(itertools.islice(result, rows + 1))
    return list(result)


def _plain_score(score: Any) -> Score:
    """Return the score of one row, as a number, a list of numbers, or None; a text says why it is
    none of these."""
    try:
        # of a tensor, or of an array
        if 0 <= getattr(score, "ndim", -1) <= 1:
            score = score.item() if score.shape in ((), (1,)) else score.tolist()
        if isinstance(score, list | tuple):
            return _plain_list(score)
        if score is None:
            return None
        if not isinstance(score, numbers.Real | Decimal):
            return f"returned {score!r:.100} as a score; a number, or None, is wanted"
        if not abs(float(score)) <= LARGEST:
            return f"returned {score!s:.100} as a score; a finite number, or None, is wanted"
        return float(score)
    except (Exception, SystemExit) as error:  # such as an int that no float can hold
        return f"returned a {type(score).__name__} that cannot be read as a score: {_shown(error)}"


def _plain_list(scores: Sequence[Any]) -> Score:
    numbers: list[float | None] = []
    for score in scores:
        number = _plain_score(score)
        if isinstance(number, list):
            return f"returned {score!r:.100} within a list; a number, or None, is wanted"
        if isinstance(number, str):
            return number
        numbers.append(number)
    return numbers


def raised(error: BaseException, function: Callable[..., Any]) -> CallFailed:
    return CallFailed(f"raised {_shown(error)}", place_of(error, function))


def _shown(error: BaseException) -> str:
    try:
        return f"{error!r:.500}"
    except Exception:
        return f"an {type(error).__name__} that cannot be shown"


def too_slow(timeout: float, rows: int) -> CallFailed:
    return CallFailed(f"took more than {timeout:g} s for {rows} rows")
