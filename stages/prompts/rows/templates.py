"""The prompt in a row, the template that string prompts are put into, and the file of a chat
template. No tokenizer is needed."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.prompts.rows.files import PromptError, Row, kind_of

Message = dict[str, str]
# Literal text; name, format and conversion of the column after it.
Piece = tuple[str, str | None, str | None, str | None]

WIDEST = 1000  # characters to which a template may pad a column
LARGEST_CHAT_TEMPLATE = 2**20  # bytes
# variables of a chat template that each prompt sets
ALWAYS_SET = ("messages", "add_generation_prompt")


def parse_template(template: str) -> list[Piece]:
    """Return the pieces of a :meth:`str.format` template. Raises ValueError."""
    pieces = list(string.Formatter().parse(template))
    for _, name, spec, conversion in pieces:
        if conversion not in (None, "s", "r", "a"):
            raise ValueError(f"{{{name}!{conversion}}} is not a known conversion")
        if name is not None and (name == "" or name[0].isdigit()):
            raise ValueError(f"{{{name}}} names no column")
        if spec and (
            "{" in spec or any(int(number) > WIDEST for number in re.findall(r"\d+", spec))
        ):
            raise ValueError(f"{{{name}:{spec}}} pads to more than {WIDEST} characters")
    return pieces


def fill_template(
    pieces: Sequence[Piece],
    fields: Row,
    most: int,
    where: str,
    *,
    key: str = "prompts.template",
) -> str:
    """Return the last ``most`` characters of what ``str.format`` makes of a template; a longer text
    is not built. Raises PromptError, which names the row by ``where`` and the template by its
    ``key`` in the recipe."""
    formatter = string.Formatter()
    parts = list[str]()
    room = most
    try:
        for literal, name, spec, conversion in reversed(pieces):
            if name is not None:
                value = formatter.convert_field(
                    formatter.get_field(name, (), fields)[0], conversion
                )
                parts.append(formatter.format_field(value, spec or ""))
                room -= len(parts[-1])
            parts.append(literal)
            room -= len(literal)
            if room <= 0:
                break
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PromptError(
            f"does not fit {where}: {error!r}",
            f"it may name 'prompt' and {sorted(map(str, fields))}, and a brace of its own is "
            f"written twice",
            key,
        ) from error
    return "".join(reversed(parts))[-most:]


def read_chat_template(path: str) -> str:
    """Return the text of the Jinja file ``path``. Raises PromptError."""
    key = "prompts.chat_template"
    fix = "give a Jinja file"
    try:
        file = Path(path).expanduser()
        if (kind := kind_of(file)) != "a file":
            raise PromptError(f"is {kind}", fix, key, path)
        if file.stat().st_size > LARGEST_CHAT_TEMPLATE:
            raise PromptError(f"is larger than {LARGEST_CHAT_TEMPLATE >> 20} MiB", fix, key, path)
        return file.read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        fix = "give the path of a Jinja file"
        raise PromptError(f"cannot be read ({error})", fix, key, path) from None


def check_chat_options(template: str, options: Mapping[str, Any]) -> None:
    """Raise PromptError for options of a chat template that it does not read, and for those that
    each prompt sets."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        tokens = Environment().lex(template)  # noqa: S701  (nothing is rendered)
        names = {text for _, kind, text in tokens if kind == "name"}
    except TemplateSyntaxError as error:
        raise PromptError(
            f"the chat template is not Jinja ({error}, line {error.lineno})", "correct it"
        ) from None
    for name in options:
        key = f"prompts.chat_template_options.{name}"
        value = options[name]
        if name in ALWAYS_SET:
            raise PromptError("is set for each prompt", "take it out", key, value)
        if name not in names:
            fix = "correct the name, or take it out"
            raise PromptError("is not read by the chat template", fix, key, value)


def prompt_in(row: Mapping[str, Any], column: str, where: str) -> str | list[Message]:
    """Return the prompt in a row's ``column``: a string, or messages.

    Raises PromptError for anything else.
    """
    if column not in row:
        has = f"it has {sorted(map(str, row))}"
        whole = [name for name, value in row.items() if _is_conversation(value)]
        fix = "set prompts.column"
        if whole:
            fix += (
                f", or train whole conversations with algorithm.name = 'sft' and "
                f"prompts.responses = {whole[:1]}"
            )
        raise PromptError(f"{where} has no column {column!r} ({has:.200})", fix)
    prompt = row[column]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, Sequence) and prompt and all(_is_message(message) for message in prompt):
        return [dict(message) for message in prompt]
    raise PromptError(
        f"{where} has {prompt!r:.200} in column {column!r}",
        "a prompt is a string that is not empty, or a list of messages {'role': ..., 'content': "
        "...}",
    )


def with_prompt(
    row: Mapping[str, Any], column: str, responses: Sequence[str], where: str
) -> dict[str, Any]:
    """Return ``row``; where it has no prompt and its only response is a whole conversation, as in
    TRL's language modeling data, with the messages before the assistant's first as the prompt.
    Raises PromptError where there are none."""
    if column in row or len(responses) != 1 or not _is_conversation(row.get(responses[0])):
        return dict(row)
    messages = row[responses[0]]
    first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if not first:
        raise PromptError(
            f"{where} has a conversation in column {responses[0]!r} without a message before the "
            f"first one of the assistant: {messages!r:.200}",
            "begin it with one of the user or the system",
        )
    return {**row, column: messages[:first]}


def responses_in(
    row: Mapping[str, Any], columns: Sequence[str], where: str
) -> list[str | list[Message]]:
    """Return the responses in a row's ``columns``: each a string, or messages that end with one of
    the assistant. Raises PromptError for anything else."""
    responses: list[str | list[Message]] = []
    for column in columns:
        response = row.get(column)
        if isinstance(response, str):
            responses.append(response)
        elif (
            isinstance(response, list)
            and response
            and all(map(_is_message, response))
            and response[-1]["role"] == "assistant"
        ):
            responses.append([dict(message) for message in response])
        else:
            raise PromptError(
                f"{where} has {response!r:.200} in column {column!r}",
                "a response is a string, or a list of messages that ends with one of the "
                "assistant; correct the row, or prompts.responses",
            )
    return responses


def turns_of(
    response: str | list[Message], prompts: Sequence[Sequence[Message]], where: str
) -> list[Message]:
    """Return a response as messages, the first and the last of the assistant.

    Messages that repeat one of ``prompts``, forms of the prompt, at the beginning are left out:
    data sets of pairs have whole conversations. Raises PromptError.
    """
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    for prompt in prompts:
        if list(prompt) == response[: len(prompt)] and len(response) > len(prompt):
            response = response[len(prompt) :]
            break
    if response[0]["role"] != "assistant":
        raise PromptError(
            f"{where} has a response that begins with a message of {response[0]['role']!r}: "
            f"{response[0]['content']!r:.100}",
            "it must begin with one of the assistant, or with the prompt's own messages",
        )
    return response


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
