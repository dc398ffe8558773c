"""Plain values of a row's columns: what templates and reward functions get, whatever library made
the row.

numpy, torch, pandas, pyarrow, Decimal, dates … ──▶ plain_row ──▶ None, bool, int, float, str, list, dict
                                                     └ PromptError: bytes, images, complex numbers, keys that are no texts …

A number stays the same number, or is refused: nothing is rounded. Neither numpy, torch, pandas nor
pyarrow is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.prompts.rows.files import PromptError, Row
from stages.prompts.rows.plain import NotPlain, integer, kind_of, text

Changes = dict[str, dict[str, str]]  # by column: what its values become, by their types

FIX = "write it as a text, a number or a list, or leave the column out with prompts.leave_out"


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
                f"{where} has a column {name!r:.100}, {kind_of(name)}", "name columns by texts"
            )
        if name in leave_out:
            continue
        column_changes: dict[str, str] = {}
        try:
            plain[text(name)] = plain_value(value, column_changes)
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
        return integer(value)
    if kind is str:
        return text(value)
    if kind is dict:
        return plain_mapping(value, changes)
    if kind is list:
        return [plain_value(item, changes) for item in value]
    from stages.prompts.rows.foreign import foreign_value

    return foreign_value(value, changes, plain_value, plain_mapping)


def plain_mapping(value: Mapping[Any, Any], changes: dict[str, str]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise NotPlain(
                f"a mapping with the key {key!r:.100}, {kind_of(key)},", "JSON has texts as keys"
            )
    return {text(str(key)): plain_value(item, changes) for key, item in value.items()}
