"""A conversation as OpenAI's chat completions have it, checked, and as chat templates read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stages.environments.interface import Message, Tool

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")


class RequestRefused(ValueError):
    """A request cannot be served. ``field``: of which field."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


def openai_error(
    kind: str, message: str, param: str | None = None, code: int | None = None
) -> dict[str, Any]:
    """Return the body of an error as OpenAI's clients read it. ``param``: the field."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(kind: str, message: str) -> dict[str, Any]:
    """Return the body of an error as Anthropic's clients read it."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def read_messages(value: Any, field: str = "messages") -> list[Message]:
    """Return the messages of a request. Raises RequestRefused."""
    if not isinstance(value, list) or not value:
        raise RequestRefused(field, "give a list of messages")
    names: dict[str, str] = {}  # of tools that were called, by the id of the call
    messages = []
    for place, item in enumerate(value):
        where = f"{field}[{place}]"
        role = ROLES.get(str(item.get("role"))) if isinstance(item, Mapping) else None
        if role is None:
            raise RequestRefused(f"{where}.role", f"give one of {sorted(ROLES)}")
        message: Message = {"role": role, "content": text_of(item.get("content"), where)}
        if role == "assistant" and item.get("tool_calls"):
            message["tool_calls"] = _calls(item["tool_calls"], f"{where}.tool_calls")
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if role == "tool":
            identity = str(item.get("tool_call_id") or "")
            message |= {"tool_call_id": identity, "name": names.get(identity, "")}
        messages.append(message)
    if messages[-1]["role"] == "assistant":
        raise RequestRefused(field, "the last one is the assistant's; end with another one")
    return messages


def text_of(content: Any, where: str) -> str:
    """Return a content, a text, None or parts of text, as text. Raises RequestRefused."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise RequestRefused(f"{where}.content", f"a part of type {kind!r} is no text")
        texts.append(text)
    return "".join(texts)


def read_tools(value: Any, parameters: str = "parameters", inside: str = "") -> list[Tool]:
    """Return the tools of a request as chat templates read them. ``parameters``: the name of the
    field with their schema; ``inside``: the field that has name, description and schema, if one
    has. Raises RequestRefused."""
    if not isinstance(value, list | None):
        raise RequestRefused("tools", "give a list")
    tools = list[Tool]()
    for place, item in enumerate(value or ()):
        function = item.get(inside) if inside and isinstance(item, Mapping) else item
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"tools[{place}]", "give a function with a name")
        schema = function.get(parameters) or {"type": "object", "properties": {}}
        description = function.get("description") or ""
        if not isinstance(schema, Mapping) or not isinstance(description, str):
            raise RequestRefused(f"tools[{place}]", f"give a text, and a schema as {parameters}")
        named = {"name": function["name"], "description": description, "parameters": schema}
        tools.append({"type": "function", "function": named})
    return tools


def _calls(value: Any, where: str) -> list[Message]:
    calls = []
    for place, item in enumerate(value if isinstance(value, list) else [value]):
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"{where}[{place}]", "give a function with a name")
        calls.append(call_of(item.get("id"), function["name"], function.get("arguments")))
    return calls


def call_of(identity: Any, name: str, arguments: Any) -> Message:
    """Return a tool call as chat templates read it: its arguments as an object where they are."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {"arguments": arguments}
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": str(identity or ""), "type": "function", "function": function}


def written_arguments(call: Message) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def dropped_tools(choice: Any, tools: Sequence[Tool]) -> Sequence[Tool]:
    """Return ``tools``, or none where ``tool_choice`` forbids them."""
    return () if _kind(choice) == "none" else tools


def demands_call(choice: Any) -> bool:
    """Return whether a ``tool_choice`` demands a call, which is not enforced in a session."""
    return _kind(choice) not in (None, "auto", "none")


def _kind(choice: Any) -> Any:
    return choice.get("type") if isinstance(choice, Mapping) else choice
