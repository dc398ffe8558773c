"""A turn's text as an assistant's message: thinking, content, tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from stages.environments.interface import Message, Turn

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
BEGIN = "<tool_call>"
FORM = 'Write {"name": ..., "arguments": {...}}.'


class CallUnreadable(ValueError):
    """A tool call cannot be read. The message is a sentence for the model."""


def read_turn(text: str, truncated: bool, number: int, *, calls: bool) -> Turn:
    """Return the turn with this ``text``. ``calls``: it may have tool calls, each a JSON object
    between ``<tool_call>`` and ``</tool_call>``, or the turn's end."""
    message: Message = {"role": "assistant", "content": text}
    if not calls:
        return Turn(message, truncated=truncated)
    content, *pieces = CALL.split(text)
    if pieces:
        message["content"] = "".join([content, *pieces[1::2]]).rstrip()
    turn = with_calls(message, pieces[::2], truncated, number)
    if turn.fault:
        turn.message["content"] = text
    return turn


def settled(text: str) -> str:
    """Return the beginning of a turn's ``text`` that its content begins with, whatever follows."""
    content = text.partition(BEGIN)[0]
    for length in range(len(BEGIN) - 1, 0, -1):
        if content.endswith(BEGIN[:length]):
            content = content[:-length]
            break
    return content.rstrip()


def with_calls(message: Message, calls: list[Any], truncated: bool, number: int) -> Turn:
    """Return a turn with ``calls``, each as JSON, as an object, or as why it cannot be read; its
    message has those that can be. The fault is that of the first one that cannot be."""
    tool_calls = list[Message]()
    faults = list[str]()
    for place, call in enumerate(calls):
        try:
            tool_calls.append(_call(call, f"call{number:03}{place:02}"))
        except CallUnreadable as error:
            faults.append(str(error))
    if tool_calls:
        message = {**message, "tool_calls": tool_calls}
    return Turn(message, faults[0] if faults else "", truncated)


def _call(call: Any, identity: str) -> Message:
    """Return a tool call as messages have it. Raises CallUnreadable."""
    if isinstance(call, CallUnreadable):
        raise call
    shown = f"{call if isinstance(call, str) else json.dumps(call, default=str)}".strip()[:200]
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError) as error:
            raise CallUnreadable(
                f"The tool call {shown} is not JSON ({str(error)[:200]}). {FORM}"
            ) from None
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise CallUnreadable(f"The tool call {shown} has no name. {FORM}")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, Mapping):
        raise CallUnreadable(f"The arguments of the tool call {shown} are no object. {FORM}")
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }


def split_thinking(text: str, *, opened: bool) -> tuple[str, str]:
    """Return the thinking of a turn, and what follows it. ``opened``: the turn begins inside."""
    body = text.lstrip()
    if not opened and not body.startswith("<think>"):
        return "", text
    thinking, _, answer = body.removeprefix("<think>").partition("</think>")
    return thinking.strip(), answer.lstrip("\n")
