"""The settings of a sweep, from what ``--over`` says of each key.

train.learning_rate=1e-6,3e-6   values, as TOML has them
seed=0..4                       whole numbers, both ends included
train.learning_rate=1e-7..1e-5  a range to search in; with :log, evenly by its logarithm
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestration.bounds import NotToml, read_toml
from orchestration.recipe.loading.load import toml_value
from orchestration.recipe.problems import RecipeError
from pipeline.problems import Problem

MOST_RUNS = 1000
LONGEST_NUMBER = 8  # characters
NUMBER = r"([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
RANGE = re.compile(rf"{NUMBER}\.\.{NUMBER}(:log)?")
STRUCTURED = set("[]{}\"'")  # a text with one of these is TOML, or wrong
EXAMPLE = "write for example --over train.learning_rate=1e-6,3e-6"

Settings = dict[str, Any]
"""Values by dotted key of a recipe."""


@dataclass(frozen=True)
class Values:
    """The values that a key takes."""

    key: str
    values: Sequence[Any]


@dataclass(frozen=True)
class Range:
    """The numbers of ``low`` to ``high``; whole ones where both ends are."""

    key: str
    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


def parse_over(texts: Sequence[str], *, search: bool) -> list[Values | Range]:
    """Return what each of ``texts``, ``KEY=VALUES``, says. Without ``search`` all are values.

    Raises RecipeError with all that is wrong.
    """
    parsed: list[Values | Range] = []
    problems: list[Problem] = []
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not key:
            problems.append(Problem("--over", text, "is not KEY=VALUES", EXAMPLE))
            continue
        if key in [one.key for one in parsed]:
            problems.append(Problem("--over", text, f"is the second one of {key}", "give one"))
            continue
        try:
            parsed.append(_parse_values(key, values, search))
        except ValueError as error:
            wrong, fix = error.args
            problems.append(Problem("--over", text, wrong, fix))
    if problems:
        raise RecipeError("sweep", problems)
    return parsed


def _parse_values(key: str, text: str, search: bool) -> Values | Range:
    """Raises ValueError of what is wrong and what to do."""
    match = RANGE.fullmatch(text)
    if match is None:
        values = _values(text)
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"has {value_text(twice[0])} twice", "give each value once")
        return Values(key, values)
    low, high = (toml_value(end) for end in match.group(1, 2))
    parsed = Range(key, low, high, bool(match[3]))
    if low > high:
        raise ValueError("is an empty range", "write the lower end first")
    if parsed.log and low <= 0:
        raise ValueError("has no logarithm at its lower end", "begin above 0, or leave :log out")
    if search:
        return parsed
    if not parsed.is_whole or parsed.log:
        raise ValueError("is a range to search in", "list values, or add --search random or tpe")
    if high - low >= MOST_RUNS:
        raise ValueError(f"has {high - low + 1:,} values", f"use at most {MOST_RUNS:,}")
    return Values(key, range(low, high + 1))


def _values(text: str) -> Sequence[Any]:
    try:
        tables = read_toml(f"values = [{text}\n]")
    except NotToml as error:
        if STRUCTURED & set(text):
            raise ValueError(f"has values that are no TOML ({error})", EXAMPLE) from None
        words = text.split(",")  # texts need no quotes, as with --set
        if not all(word.strip() for word in words):
            raise ValueError(
                "has an empty value", "leave it out; an empty text is \"''\""
            ) from None
        return [toml_value(word) for word in words]
    if not tables.get("values") or len(tables) > 1:
        raise ValueError("has no values", EXAMPLE)
    return list(tables["values"])


def grid(over: Sequence[Values | Range]) -> list[Settings]:
    """Return every combination of the values of ``over``, which has no ranges.

    Raises RecipeError where these are too many.
    """
    values = [one for one in over if isinstance(one, Values)]
    count = math.prod(len(one.values) for one in values)
    if count > MOST_RUNS:
        wrong = f"makes {count:,} runs, and a sweep has at most {MOST_RUNS:,}"
        keys = " × ".join(f"{one.key} ({len(one.values)})" for one in values)
        raise RecipeError(
            "sweep", [Problem("--over", keys, wrong, "use fewer values, or --search")]
        )
    names = [one.key for one in values]
    return [
        dict(zip(names, combination, strict=True))
        for combination in itertools.product(*(one.values for one in values))
    ]


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return the settings in words.

    >>> settings_text({"train.learning_rate": 1e-06, "seed": 0})
    'train.learning_rate=1e-06 seed=0'
    """
    return " ".join(f"{key}={value_text(value)}" for key, value in settings.items())


def value_text(value: Any) -> str:
    """Return ``value`` for people: a long number with four digits."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{value:.4g}" if isinstance(value, float) and len(text) > LONGEST_NUMBER else text
