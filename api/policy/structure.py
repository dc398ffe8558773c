"""The structure that a request asks of its responses, and the tools that they call.

response_format, structured_outputs ──▶ Structure
tools, tool_choice = required, or a tool ──▶ Structure of {"name", "arguments"} ──▶ the response's text ──▶ tool_calls
tools ──▶ any text, with calls as the prompt shows them ──▶ content, tool_calls
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any

from api.policy.sampling import refused
from api.schemas.completions import (
    CalledFunction,
    ChatRequest,
    NamedTool,
    Request,
    StructuredOutputs,
    ToolCall,
)
from pipeline.compat.extras import ExtraMissing, install
from stages.engines.structure import Structure

SPACED = {"x-guidance": {"whitespace_pattern": " ?"}}  # calls are never cut off in white space


def calls_tool(request: Request) -> bool:
    """Return whether the response is to be a call of a tool."""
    return isinstance(request, ChatRequest) and request.tool_choice not in (None, "none", "auto")


async def structure_of(request: Request) -> tuple[str, Structure] | None:
    """Return the field of ``request`` that asks for a structure, and the structure; None: it may
    be any text. Raises HTTPProblem."""
    structures: dict[str, Structure] = {}
    if isinstance(request, ChatRequest) and calls_tool(request):
        _add_call(structures, request)
    form = request.response_format
    if form is not None and form.type != "text":
        schema = form.json_schema.schema_ if form.json_schema else {"type": "object"}
        structures["response_format"] = Structure("json_schema", json.dumps(schema))
    if request.structured_outputs is not None:
        structures["structured_outputs"] = _asked(request.structured_outputs)
    if not structures:
        return None
    (field, structure), *others = structures.items()
    if others:
        raise refused(f"{others[0][0]} comes with {field}.", others[0][0], "give one of them")
    try:
        await asyncio.to_thread(structure.compiled)
    except ExtraMissing:
        raise refused("llguidance is not installed.", field, install("structured")) from None
    except ValueError as error:
        raise refused(f"It cannot be followed: {error}", field, "correct it") from None
    return field, structure


def _asked(form: StructuredOutputs) -> Structure:
    if form.choice is not None:
        return Structure("choice", json.dumps(form.choice))
    if form.regex is not None:
        return Structure("regex", form.regex)
    if form.grammar is not None:
        return Structure("grammar", form.grammar)
    schema = {"type": "object"} if form.json_object else form.json_
    return Structure("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _add_call(structures: dict[str, Structure], request: ChatRequest) -> None:
    choice = request.tool_choice
    functions = [tool["function"] for tool in request.as_templates_read.tools]
    if isinstance(choice, NamedTool):
        functions = [each for each in functions if each["name"] == choice.function.name]
    if not functions:
        raise refused(
            "tool_choice demands a tool that is missing.", "tool_choice", "give it in tools"
        )
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, "arguments": each["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    structures["tool_choice"] = Structure("json_schema", json.dumps({"anyOf": calls, **SPACED}))


def tool_call(text: str, *, is_streamed: bool) -> ToolCall | None:
    """Return the call in the ``text`` of a response; None: it was cut off."""
    try:
        call: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return _call(call, 0 if is_streamed else None)


def _call(call: Mapping[str, Any], place: int | None) -> ToolCall:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    function = CalledFunction(name=call["name"], arguments=arguments)
    index = {} if place is None else {"index": place}
    return ToolCall(id=f"call_{secrets.token_hex(12)}", type="function", function=function, **index)


class CallingText:
    """The text of a response as it comes, without the calls that it ends with."""

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._sent = ""
        self._rest = ""  # that may be part of a call

    def add(self, text: str, *, ends: bool) -> tuple[str, list[ToolCall]]:
        """Add ``text``, the last one where the response ``ends``. Returns what the content goes on
        with, and at the end the calls; one that cannot be read is content."""
        from stages.environments.dialogue.turns import read_turn, settled

        self._rest += text
        if not ends:
            new = settled(self._rest)
            self._sent += new
            self._rest = self._rest[len(new) :]
            return new, []
        message = read_turn(self._sent + self._rest, truncated=False, number=0, calls=True).message
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [
            _call(function, place if self._is_streamed else None)
            for place, function in enumerate(functions)
        ]
        return message["content"][len(self._sent) :], calls


def calling_texts(request: Request, choices: int) -> list[CallingText]:
    """Return one for each of the ``choices`` where these are any text, with calls or without."""
    if not isinstance(request, ChatRequest):
        return []
    if not request.tools or request.tool_choice not in (None, "auto"):
        return []
    return [CallingText(is_streamed=bool(request.stream)) for _ in range(choices)]
