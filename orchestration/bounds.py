"""Bounds that every recipe keeps: depth, number and size of its values.

Checked first, so that no other check takes long.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.problems import Problem

DEEPEST = 32  # tables and lists inside each other, and parts of a key
LARGEST = 2**53  # of whole numbers; beyond it JSON parsers disagree on the value
MOST_VALUES = 10_000
MOST_CHARACTERS = 64 * 1024  # of all texts and keys
LONGEST_KEY = 200
LONGEST_LIST = 1000


class NotToml(ValueError):
    """A text that is no TOML, or that the parser cannot read; the message says why."""


def read_toml(text: str) -> dict[str, Any]:
    """Return the tables of ``text``. Raises NotToml."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise NotToml(
            f"its lists or tables lie too deep inside each other; keep to {DEEPEST} levels"
        ) from None
    except ValueError as error:  # also of a number with thousands of digits
        raise NotToml(str(error)) from None


def out_of_bounds(
    data: Mapping[str, Any], key: str = "", *, finite: bool = False
) -> Iterator[Problem]:
    """Yield a problem for each value in ``data``, the table at ``key``, that exceeds a bound; with
    ``finite`` also for numbers that are infinite or NaN. Ends at the first value that makes the
    whole too large."""
    try:
        yield from _Bounds(finite).problems(data, key, 0)
    except _TooLarge as error:
        yield Problem(key or "recipe", None, str(error), "take out what it does not need")


class _TooLarge(Exception):
    """The recipe as a whole is too large."""


class _Bounds:
    """Counts the values and characters of a recipe."""

    def __init__(self, finite: bool) -> None:
        self.finite = finite
        self.values = 0
        self.characters = 0

    def count(self, text: str = "") -> None:
        """Count one value, or key, with its characters. Raises _TooLarge."""
        self.values += 1
        self.characters += len(text)
        if self.values > MOST_VALUES:
            raise _TooLarge(f"holds more than {MOST_VALUES} values")
        if self.characters > MOST_CHARACTERS:
            raise _TooLarge(f"holds more than {MOST_CHARACTERS} characters")

    def problems(self, value: Any, key: str, depth: int) -> Iterator[Problem]:
        if depth > DEEPEST:
            yield Problem(key, None, f"lies more than {DEEPEST} deep", "make it flatter")
            return
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            fix = f"use at most {MOST_CHARACTERS} in the whole recipe"
            yield Problem(key, None, f"has {len(value)} characters", fix)
            return
        self.count(value if isinstance(value, str) else "")
        if isinstance(value, str) and (reason := _not_allowed(value)):
            yield Problem(key, None, f"has {reason}", "take it out")
        elif isinstance(value, Mapping):
            for name, item in value.items():
                if len(name) > LONGEST_KEY:
                    yield Problem(
                        key,
                        None,
                        f"has a key of {len(name)} characters",
                        f"use at most {LONGEST_KEY}",
                    )
                    continue
                self.count(name)
                if reason := _not_allowed(name):
                    yield Problem(key, None, f"has a key with {reason}", "take it out")
                else:
                    yield from self.problems(item, f"{key}.{name}" if key else name, depth + 1)
        elif isinstance(value, list) and len(value) > LONGEST_LIST:
            yield Problem(key, None, f"has {len(value)} entries", f"use at most {LONGEST_LIST}")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from self.problems(item, f"{key}.{index}", depth + 1)
        elif isinstance(value, int) and abs(value) > LARGEST:
            yield Problem(key, None, f"is beyond {LARGEST}", "use a smaller number")
        elif self.finite and isinstance(value, float) and not math.isfinite(value):
            yield Problem(key, None, "is not a finite number", "use a finite one")


def _not_allowed(text: str) -> str:
    """What ``text`` contains that no text of a recipe may; "" for nothing."""
    if "\0" in text:
        return "a zero character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "bytes that are not UTF-8"  # a surrogate, as arguments of a command hold them
    return ""
