"""Lines of a run's files of events: one JSON object each, of finite numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pipeline.data.events import Event

ID_OF_LINE = re.compile(rb'\{"id": ?"(\d+-\d+)"')
DIGITS = 7  # of a number, in the files: more than a measurement has
# a number from here on has three decimals: seconds since a worker began keep their milliseconds
WHOLE = 1e4
# fields with the numbers of each reward function: of steps, and of evaluations
BY_FUNCTION = ("rewards", "functions")
_NUMBERS = (int, float)


def event_json(event: Event) -> str:
    """Return one line of JSON, always of finite numbers, as precise as they are."""
    line = {"id": event.id, "time": event.time, "kind": event.kind, "data": finite(event.data)}
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def line_of(event: Event) -> bytes:
    """Return the line of ``event`` in a run's file: short, its numbers rounded by :func:`rounded`,
    its time to milliseconds."""
    line = {
        "id": event.id,
        "time": round(event.time, 3),
        "kind": event.kind,
        "data": _short(finite(event.data)),
    }
    return (
        json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        + b"\n"
    )


def rounded(value: float) -> float:
    """Return ``value`` to :data:`DIGITS` digits; from :data:`WHOLE` on, to three decimals.

    >>> rounded(64.86700448983578), rounded(2419200.12345), rounded(1.0000000000000001e-07)
    (64.867, 2419200.123, 1e-07)
    """
    return round(value, 3) if abs(value) >= WHOLE else float(f"{value:.{DIGITS}g}")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value


def finite(value: Any) -> Any:
    """Return ``value`` with None in place of numbers that are not finite, which JSON does not
    have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def event_of(line: bytes) -> Event | None:
    """Return the event of ``line``; None where it is torn: a full disk, or a kill, has cut it
    short."""
    try:
        event = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(event, dict) or event.keys() != {"id", "time", "kind", "data"}:
        return None
    if not isinstance(event["data"], dict):
        return None
    return Event(**event)


def id_of(line: bytes) -> str:
    """Return the id of the event of ``line``; "" where the line does not begin with one."""
    id_match = ID_OF_LINE.match(line)
    return id_match[1].decode() if id_match else ""


def finite_numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values of ``data`` that a float holds, with those of reward
    functions.

    >>> finite_numbers({"step": 1, "rewards": {"spelling": {"mean": 0.5, "std": None}}, "groups": [3]})
    {'step': 1.0, 'rewards/spelling/mean': 0.5}
    """
    numbers: dict[str, float] = {}
    for name, value in data.items():
        if name.partition("/")[0] in BY_FUNCTION and isinstance(value, Mapping):
            numbers |= finite_numbers({f"{name}/{key}": item for key, item in value.items()})
        if not isinstance(value, _NUMBERS) or isinstance(value, bool):
            continue
        try:
            number = float(value)
        except OverflowError:  # an int that is too large
            continue
        if math.isfinite(number):
            numbers[name] = number
    return numbers
