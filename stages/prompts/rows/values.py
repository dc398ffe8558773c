"""Plain values of a row's columns: what templates and reward functions get, whatever library made
the row.

numpy, torch, pandas, pyarrow, Decimal, dates … ──▶ plain_row ──▶ None, bool, int, float, str, list, dict
                                                     └ PromptError: bytes, images, complex numbers, keys that are no texts …

A number stays the same number, or is refused: nothing is rounded. Neither numpy, torch, pandas nor
pyarrow is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

from stages.prompts.rows.files import PromptError, Row

Changes = dict[str, dict[str, str]]  # by column: what its values become, by their types

ISO = "an ISO 8601 text"
TEXT = "a text"
SORTED = "a sorted list"
VALUE = "its value"
LARGEST_INT = 2**14_000  # Python writes integers of up to 4,300 digits, 2^14281
FIX = "write it as a text, a number or a list, or leave the column out with prompts.leave_out"


class NotPlain(ValueError):
    """A value that no JSON value stands for: ``what`` it is, and ``why`` not."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why and f" ({why})"


def plain_row(
    row: Any, where: str, leave_out: Sequence[str] = (), changes: Changes | None = None
) -> Row:
    """Return the columns of ``row`` that are not in ``leave_out``, as plain values.

    ``changes`` gets the columns with values that become another kind of value, such as dates.
    Raises PromptError, which names ``where``, column and type.

    >>> from decimal import Decimal
    >>> plain_row({"prompt": "2+2=", "answer": Decimal("4.5"), "levels": (1, True)}, "row 1")
    {'prompt': '2+2=', 'answer': 4.5, 'levels': [1, True]}
    """
    if not isinstance(row, Mapping):
        raise PromptError(f"{where} is a {type(row).__name__}", "a row is a mapping of columns")
    plain: Row = {}
    for name, value in row.items():
        if not isinstance(name, str):
            raise PromptError(
                f"{where} has a column {name!r:.100}, {_kind(name)}", "name columns by texts"
            )
        if name in leave_out:
            continue
        column_changes: dict[str, str] = {}
        try:
            plain[_text(name)] = plain_value(value, column_changes)
        except NotPlain as error:
            raise PromptError(
                f"{where} has {error.what} in column {name!r}{error.why}", FIX
            ) from None
        except RecursionError:
            raise PromptError(
                f"{where} is nested too deeply in column {name!r}", "make it flatter"
            ) from None
        if changes is not None and column_changes:
            changes.setdefault(name, {}).update(column_changes)
    return plain


def describe(changes: Changes) -> list[str]:
    """Return a sentence for each change of a column's values.

    >>> describe({"when": {"datetime": "an ISO 8601 text"}})
    ["column 'when': a value of type datetime becomes an ISO 8601 text"]
    """
    return [
        f"column {column!r}: a value of type {kind} becomes {becomes}"
        for column, kinds in changes.items()
        for kind, becomes in kinds.items()
    ]


def plain_value(value: Any, changes: dict[str, str]) -> Any:
    """Return ``value`` as None, bool, int, float, str, or a list or dict of these.

    ``changes`` gets the types of values that become another kind of value, with what they become.
    Raises NotPlain.
    """
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is int:
        return _integer(value)
    if kind is str:
        return _text(value)
    if isinstance(value, Enum):
        changes[kind.__name__] = VALUE
        return plain_value(value.value, changes)
    if isinstance(value, Mapping):
        return _plain_mapping(value, changes)
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        raise NotPlain(f"{len(value)} bytes ({kind.__name__})")
    if isinstance(value, Sequence):
        return [plain_value(item, changes) for item in value]
    if isinstance(value, Set):
        changes[kind.__name__] = SORTED
        return _sorted([plain_value(item, changes) for item in value])
    if isinstance(value, int):
        return _integer(int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Decimal | Fraction):
        return _exact(value)
    if isinstance(value, date | time | timedelta):  # a datetime is a date
        return _moment(value, changes)
    if isinstance(value, UUID | PurePath):
        changes[kind.__name__] = TEXT
        return _text(str(value))
    return _of_library(value, changes)


def _plain_mapping(value: Mapping[Any, Any], changes: dict[str, str]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise NotPlain(
                f"a mapping with the key {key!r:.100}, {_kind(key)},", "JSON has texts as keys"
            )
    return {_text(str(key)): plain_value(item, changes) for key, item in value.items()}


def _integer(value: int) -> int:
    if abs(value) >= LARGEST_INT:
        raise NotPlain("an integer of more than 4,000 digits")
    return value


def _text(value: str) -> str:
    """Return ``value``.

    Raises NotPlain for a text that UTF-8 cannot write: JSON can hold half of a surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        character = f"\\u{ord(value[error.start]):04x} at character {error.start + 1}"
        raise NotPlain("half of a surrogate pair", character) from None
    return value


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
        return _integer(int(value))
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


def _of_library(value: Any, changes: dict[str, str]) -> Any:
    """Return a value of numpy, torch, pandas or pyarrow as plain values.

    Raises NotPlain for any other.
    """
    library = type(value).__module__.partition(".")[0]
    numpy = sys.modules.get("numpy")
    torch = sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _of_numpy(numpy, value, changes)
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(torch, value)
    if library == "pyarrow" and hasattr(value, "as_py"):
        return plain_value(value.as_py(), changes)
    if library == "pyarrow" and hasattr(value, "to_pylist"):
        return plain_value(value.to_pylist(), changes)
    if library == "pandas":
        if type(value).__name__ == "NAType":
            return None
        if getattr(value, "ndim", 0) == 1:  # a series, an index, an array of its own
            return [plain_value(item, changes) for item in value]
    raise NotPlain(_kind(value))


def _of_numpy(numpy: Any, value: Any, changes: dict[str, str]) -> Any:
    if value.ndim:
        if isinstance(value, numpy.ma.MaskedArray):
            return plain_value(value.tolist(), changes)
        is_plain = value.dtype.kind in "biu" or (
            value.dtype.kind == "f" and value.dtype.itemsize <= 8
        )
        return value.tolist() if is_plain else [plain_value(item, changes) for item in value]
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
        return plain_value(item, changes)
    if kind == "U":
        return _text(str(value))
    raise NotPlain(f"{_kind(value)} of type {value.dtype}")


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


def _kind(value: Any) -> str:
    """Return a value's type with its article."""
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
