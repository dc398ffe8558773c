"""Integers and texts that JSON can hold, and the error of a value that it cannot."""

from __future__ import annotations

from typing import Any

LARGEST_INT = 2**14_000  # Python writes integers of up to 4,300 digits, 2^14281


class NotPlain(ValueError):
    """A value that no JSON value stands for: ``what`` it is, and ``why`` not."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why and f" ({why})"


def integer(value: int) -> int:
    if abs(value) >= LARGEST_INT:
        raise NotPlain("an integer of more than 4,000 digits")
    return value


def text(value: str) -> str:
    """Return ``value``.

    Raises NotPlain for a text that UTF-8 cannot write: JSON can hold half of a surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        character = f"\\u{ord(value[error.start]):04x} at character {error.start + 1}"
        raise NotPlain("half of a surrogate pair", character) from None
    return value


def kind_of(value: Any) -> str:
    """Return a value's type with its article."""
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
