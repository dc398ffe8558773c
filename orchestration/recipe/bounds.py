"""Bounds of every recipe, checked first, so that no further check fails or takes long.

text ──▶ read_toml ──▶ tables ──▶ out_of_bounds: depth, number and size of values ──▶ (nothing) ──▶ orchestration.recipe
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

DEEPEST = 32  # tables and lists inside each other, and parts of a key
LARGEST = 2**53  # of whole numbers; beyond it JSON parsers disagree on the value
MOST_VALUES = 10_000
MOST_CHARACTERS = 64 * 1024  # of all texts and keys
LONGEST_KEY = 200
LONGEST_LIST = 1000

Bound = tuple[str, str, str]  # the dotted key, what is wrong with it, and what to do


class NotToml(ValueError):
    """A text that is no TOML, or that the parser cannot take; the message says why."""


def read_toml(text: str) -> dict[str, Any]:
    """The tables of ``text``. Raises NotToml."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise NotToml(f"its lists or tables lie too deep inside each other; keep to {DEEPEST} levels") from None
    except ValueError as error:  # a number of thousands of digits is one too
        raise NotToml(str(error)) from None


def out_of_bounds(data: Mapping[str, Any], key: str = "", *, finite: bool = False) -> Iterator[Bound]:
    """What in ``data``, the table at ``key``, no recipe holds; with ``finite`` also every number that is not. Ends at the
    first thing that makes the whole too large."""
    room = _Room(finite)
    try:
        yield from _beyond(data, key, 0, room)
    except _TooMuch as much:
        yield key or "recipe", str(much), "take out what it does not need"


class _TooMuch(Exception):
    """The whole is too large."""


class _Room:
    """What is left of the whole."""

    def __init__(self, finite: bool) -> None:
        self.finite = finite
        self._values, self._characters = MOST_VALUES, MOST_CHARACTERS

    def take(self, *, characters: int = 0) -> None:
        """One value more, and its characters."""
        self._values -= 1
        self._characters -= characters
        if self._values < 0:
            raise _TooMuch(f"holds more than {MOST_VALUES} values")
        if self._characters < 0:
            raise _TooMuch(f"holds more than {MOST_CHARACTERS} characters")


def _beyond(value: Any, key: str, depth: int, room: _Room) -> Iterator[Bound]:
    if depth > DEEPEST:
        yield key, f"lies more than {DEEPEST} deep", "make it flatter"
        return
    if isinstance(value, str):
        yield from _beyond_text(value, key, room)
        return
    room.take()
    if isinstance(value, Mapping):
        for name, item in value.items():
            if len(name) > LONGEST_KEY:
                yield key, f"has a key of {len(name)} characters", f"use at most {LONGEST_KEY}"
                continue
            room.take(characters=len(name))
            if wrong := _unfit(name):
                yield key, f"has a key with {wrong}", "take it out"
                continue
            yield from _beyond(item, f"{key}.{name}" if key else name, depth + 1, room)
    elif isinstance(value, list):
        if len(value) > LONGEST_LIST:
            yield key, f"has {len(value)} entries", f"use at most {LONGEST_LIST}"
            return
        for at, item in enumerate(value):
            yield from _beyond(item, f"{key}.{at}", depth + 1, room)
    elif isinstance(value, int) and abs(value) > LARGEST:
        yield key, f"is beyond {LARGEST}", "use a smaller number"
    elif room.finite and isinstance(value, float) and not math.isfinite(value):
        yield key, "is not a finite number", "use a finite one"


def _beyond_text(text: str, key: str, room: _Room) -> Iterator[Bound]:
    if len(text) > MOST_CHARACTERS:
        yield key, f"has {len(text)} characters", f"use at most {MOST_CHARACTERS} in the whole recipe"
        return
    room.take(characters=len(text))
    if wrong := _unfit(text):
        yield key, f"has {wrong}", "take it out"


def _unfit(text: str) -> str:
    """What ``text`` has that no text of a recipe may; "" for nothing."""
    if "\0" in text:
        return "a zero character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "bytes that are not UTF-8"  # a surrogate, as arguments of a command hold them
    return ""
