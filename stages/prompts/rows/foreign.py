"""Values of other types than JSON's as plain ones: of Python's other types, numpy, torch, pandas and
pyarrow, none of which is imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

from stages.prompts.rows.plain import NotPlain, integer, kind_of, text

ISO = "an ISO 8601 text"
TEXT = "a text"
SORTED = "a sorted list"
VALUE = "its value"

Plain = Callable[[Any, dict[str, str]], Any]


def foreign_value(value: Any, changes: dict[str, str], plain: Plain, mapping: Plain) -> Any:
    """Return ``value`` as None, bool, int, float, str, or a list or dict of these.

    ``changes`` gets the types of values that become another kind of value, with what they become.
    ``plain`` and ``mapping`` do so with parts of the value. Raises NotPlain.
    """
    kind = type(value)
    if isinstance(value, Enum):
        changes[kind.__name__] = VALUE
        return plain(value.value, changes)
    if isinstance(value, Mapping):
        return mapping(value, changes)
    if isinstance(value, str):
        return text(str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        raise NotPlain(f"{len(value)} bytes ({kind.__name__})")
    if isinstance(value, Sequence):
        return [plain(item, changes) for item in value]
    if isinstance(value, Set):
        changes[kind.__name__] = SORTED
        return _sorted([plain(item, changes) for item in value])
    if isinstance(value, int):
        return integer(int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Decimal | Fraction):
        return _exact(value)
    if isinstance(value, date | time | timedelta):  # a datetime is a date
        return _moment(value, changes)
    if isinstance(value, UUID | PurePath):
        changes[kind.__name__] = TEXT
        return text(str(value))
    return _of_library(value, changes, plain)


def _sorted(items: list[Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:  # of several types
        return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


def _exact(value: Decimal | Fraction) -> int | float:
    """Return the integer or the float that is the same number. Raises NotPlain where there is
    none."""
    if isinstance(value, Decimal):
        if value.is_snan():
            raise NotPlain("a signalling NaN (Decimal)")
        if not value.is_finite():
            return float(value)
        if abs(value.adjusted()) > 4000:
            raise NotPlain("a Decimal of more than 4,000 digits")
        number = float(value)
        # A float stands for the shortest decimal that reads as it: 0.1 is Decimal("0.1").
        if value.as_tuple().exponent < 0 and Decimal(repr(number)) == value:  # type: ignore[operator]
            return number
    elif (number := _as_float(value)) == value and value.denominator != 1:
        return number
    if value == int(value):
        return integer(int(value))
    raise NotPlain(f"{value!r:.100}, which no float is")


def _as_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _moment(value: Any, changes: dict[str, str]) -> str | None:
    """Return a date, a time or a duration as an ISO 8601 text; None for pandas' NaT."""
    if value != value:
        return None
    changes[type(value).__name__] = ISO
    if not isinstance(value, timedelta):
        return str(value.isoformat())
    nanoseconds = getattr(value, "nanoseconds", 0)  # of pandas
    whole = (value.days * 86_400 + value.seconds) * 10**6 + value.microseconds
    return _duration(whole * 1000 + nanoseconds)


def _duration(nanoseconds: int) -> str:
    """Return an ISO 8601 duration.

    >>> _duration(93_784_500_000_000), _duration(-60 * 10**9), _duration(0)
    ('P1DT2H3M4.5S', '-PT1M', 'PT0S')
    """
    seconds, fraction = divmod(abs(nanoseconds), 10**9)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    second = f"{seconds}.{fraction:09d}".rstrip("0").rstrip(".") if fraction else f"{seconds}"
    parts = [
        f"{hours}H" if hours else "",
        f"{minutes}M" if minutes else "",
        f"{second}S" if second != "0" else "",
    ]
    clock = "".join(parts)
    text = (f"{days}D" if days else "") + (f"T{clock}" if clock else "")
    return ("-" if nanoseconds < 0 else "") + "P" + (text or "T0S")


def _of_library(value: Any, changes: dict[str, str], plain: Plain) -> Any:
    """Return a value of numpy, torch, pandas or pyarrow as plain values.

    Raises NotPlain for any other.
    """
    library = type(value).__module__.partition(".")[0]
    numpy = sys.modules.get("numpy")
    torch = sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _of_numpy(numpy, value, changes, plain)
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(torch, value)
    if library == "pyarrow" and hasattr(value, "as_py"):
        return plain(value.as_py(), changes)
    if library == "pyarrow" and hasattr(value, "to_pylist"):
        return plain(value.to_pylist(), changes)
    if library == "pandas":
        if type(value).__name__ == "NAType":
            return None
        if getattr(value, "ndim", 0) == 1:  # a series, an index, an array of its own
            return [plain(item, changes) for item in value]
    raise NotPlain(kind_of(value))


def _of_numpy(numpy: Any, value: Any, changes: dict[str, str], plain: Plain) -> Any:
    if value.ndim:
        if isinstance(value, numpy.ma.MaskedArray):
            return plain(value.tolist(), changes)
        is_plain = value.dtype.kind in "biu" or (
            value.dtype.kind == "f" and value.dtype.itemsize <= 8
        )
        return value.tolist() if is_plain else [plain(item, changes) for item in value]
    kind = value.dtype.kind
    if kind in "biu":
        return value.item()
    if kind == "f":
        number = float(value)
        if number == value or number != number:
            return number
        raise NotPlain(f"{value!r:.100}, which no float is")
    if kind in "Mm":
        if numpy.isnat(value):
            return None
        changes[value.dtype.name] = ISO
        return _numpy_date(value) if kind == "M" else _numpy_duration(numpy, value)
    if kind == "O" and (item := value.item()) is not value:
        return plain(item, changes)
    if kind == "U":
        return text(str(value))
    raise NotPlain(f"{kind_of(value)} of type {value.dtype}")


def _numpy_date(value: Any) -> str:
    """Return a datetime64 as Python and pandas write the same moment: with seconds, and as many
    digits as it needs."""
    unit = value.dtype.str.partition("[")[2].rstrip("]").lstrip("0123456789")
    text = str(value.astype("datetime64[s]") if unit in ("h", "m") else value)
    whole, point, fraction = text.partition(".")
    digits = next((size for size in (0, 6, 9) if not fraction[size:].strip("0")), len(fraction))
    return whole + (point + fraction.ljust(digits, "0")[:digits] if digits else "")


def _numpy_duration(numpy: Any, value: Any) -> str:
    unit, count = numpy.datetime_data(value.dtype)
    months = {"Y": 12, "M": 1}.get(unit)
    number = int(value.astype("int64")) * count
    if months is not None:
        return ("-" if number < 0 else "") + f"P{abs(number) * months}M"
    nanoseconds = {"W": 604_800, "D": 86_400, "h": 3600, "m": 60, "s": 1}
    scale = (
        nanoseconds[unit] * 10**9
        if unit in nanoseconds
        else {"ms": 10**6, "us": 1000, "ns": 1}.get(unit)
    )
    if scale is None:
        raise NotPlain(f"a duration of type {value.dtype}")
    return _duration(number * scale)


def _of_tensor(torch: Any, value: Any) -> Any:
    if value.is_complex():
        raise NotPlain(f"a tensor of type {value.dtype}")
    try:
        return value.detach().cpu().tolist()
    except Exception as error:  # a sparse, a nested, a quantised one, or one without values
        raise NotPlain("a tensor that has no list of values", str(error)) from None
