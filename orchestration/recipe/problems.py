"""The error with all problems of a recipe, and what to write instead of a name that is not
known."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from pipeline.problems import Problem, ProblemError

T = TypeVar("T")

LONGEST_SUGGESTED = 64  # characters of a name that are compared with the allowed ones
MOST_NAMED = 60


class RecipeError(ProblemError, ValueError):
    """All that is wrong with a recipe, which ``where`` names."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where = where
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = (f"  {problem}" for problem in problems)
        super().__init__(*problems, message="\n".join([f"{where}: {count}", *lines]))


def suggest(given: str, allowed: Collection[str]) -> str:
    """Return what to write instead of ``given``: the most similar of ``allowed``, or all of them,
    of many the first :data:`MOST_NAMED`."""
    close = difflib.get_close_matches(given[:LONGEST_SUGGESTED], allowed, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    names = [*map(repr, sorted(allowed))]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"use one of: {', '.join(names[:MOST_NAMED])}{more}"


def value_or_none(read: Callable[[], T]) -> T | None:
    """Return what ``read`` returns, or None where it raises, as code and files that a recipe names
    may. Each of these has a check that reports what is wrong with it; the other checks leave it
    out."""
    try:
        return read()
    except Exception:
        return None
