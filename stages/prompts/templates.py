"""The prompt in a row, and the template that string prompts are put into. No tokenizer is needed."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from stages.prompts.files import PromptError, Row

Message = dict[str, str]
# Literal text; name, format and conversion of the column after it.
Piece = tuple[str, str | None, str | None, str | None]

WIDEST = 1000  # characters to which a template may pad a column


def parse_template(template: str) -> list[Piece]:
    """Return the pieces of a :meth:`str.format` template. Raises ValueError."""
    pieces = list(string.Formatter().parse(template))
    for _, name, spec, conversion in pieces:
        if conversion not in (None, "s", "r", "a"):
            raise ValueError(f"{{{name}!{conversion}}} is not a known conversion")
        if name is not None and (name == "" or name[0].isdigit()):
            raise ValueError(f"{{{name}}} names no column")
        if spec and ("{" in spec or any(int(number) > WIDEST for number in re.findall(r"\d+", spec))):
            raise ValueError(f"{{{name}:{spec}}} pads to more than {WIDEST} characters")
    return pieces


def fill_template(pieces: Sequence[Piece], fields: Row, most: int, where: str) -> str:
    """Return the last ``most`` characters of what ``str.format`` makes of a template; a longer text is not built. Raises
    PromptError, which names the row by ``where``."""
    formatter, parts, room = string.Formatter(), list[str](), most
    try:
        for literal, name, spec, conversion in reversed(pieces):
            if name is not None:
                value = formatter.convert_field(formatter.get_field(name, (), fields)[0], conversion)
                parts.append(formatter.format_field(value, spec or ""))
                room -= len(parts[-1])
            parts.append(literal)
            room -= len(literal)
            if room <= 0:
                break
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PromptError(
            f"prompts: prompts.template does not fit {where}: {error!r}; it may name 'prompt' and "
            f"{sorted(map(str, fields))}, and a brace of its own is written twice"
        ) from error
    text = "".join(reversed(parts))[-most:]
    _check_encodable(text, where, "a column that prompts.template names")
    return text


def prompt_in(row: Mapping[str, Any], column: str, where: str) -> str | list[Message]:
    """Return the prompt in a row's ``column``: a string, or messages. Raises PromptError for anything else."""
    if not isinstance(row, Mapping):
        raise PromptError(f"prompts: {where} is a {type(row).__name__}; a row is a mapping of columns")
    if column not in row:
        has = f"it has {sorted(map(str, row))}"
        raise PromptError(f"prompts: {where} has no column {column!r} ({has:.200}); set prompts.column")
    given = row[column]
    if isinstance(given, str) and given:
        _check_encodable(given, where, f"column {column!r}")
        return given
    if isinstance(given, Sequence) and given and all(_is_message(message) for message in given):
        for message in given:
            _check_encodable(message["role"] + message["content"], where, f"a message of column {column!r}")
        return [dict(message) for message in given]
    raise PromptError(
        f"prompts: {where} has {given!r:.200} in column {column!r}; a prompt is a string that is not empty, or a list of "
        "messages {'role': ..., 'content': ...}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _check_encodable(text: str, where: str, part: str) -> None:
    """Raises PromptError for a text that cannot be written as UTF-8: JSON can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x} at character {error.start + 1}"
        raise PromptError(
            f"prompts: {where} has half of a surrogate pair in {part} ({found}), which is no text; take it out"
        ) from None
