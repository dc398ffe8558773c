"""OpenAI's responses: a body as a request, and a turn as its answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from stages.environments.interface import Message, Request, Turn
from stages.environments.programs.messages import (
    RequestRefused,
    dropped_tools,
    read_messages,
    read_tools,
    written_arguments,
)


def read(body: Mapping[str, Any]) -> Request:
    """Return the request. Raises RequestRefused."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise RequestRefused("previous_response_id", "nothing is stored; send the whole input")
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise RequestRefused("input", "give a text or a list of items")
    messages = list[Message]()
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for place, item in enumerate(items):
        _append(messages, item, f"input[{place}]")
    tools = read_tools(body.get("tools"))
    return Request(read_messages(messages, "input"), dropped_tools(body.get("tool_choice"), tools))


def _append(messages: list[Message], item: Any, where: str) -> None:
    """Append an item of the input. Calls of tools belong to the assistant's message before them."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    match kind:
        case "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "function": function})
        case "function_call_output":
            output = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({"role": "tool", **output})
        case "reasoning":
            pass
        case _:
            raise RequestRefused(where, f"an item of type {kind!r} is not known here")


def answer(body: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Return the answer to the request ``body``."""
    prompt, generated = (turn.tokens.prompt, turn.tokens.generated) if turn.tokens else (0, 0)
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if turn.truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if turn.truncated else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": body.get("model") or "policy",
        "output": _output(turn),
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        },
    }


def _output(turn: Turn) -> list[dict[str, Any]]:
    items = list[dict[str, Any]]()
    text = turn.message.get("content") or ""
    calls = turn.message.get("tool_calls") or ()
    if text or not calls:
        content: dict[str, Any] = {"type": "output_text", "text": text}
        content |= {"annotations": [], "logprobs": []}
        items.append({"type": "message", "role": "assistant", "content": [content]})
    for call in calls:
        name = call["function"]["name"]
        arguments = written_arguments(call)
        function = {"call_id": call["id"], "name": name, "arguments": arguments}
        items.append({"type": "function_call", **function})
    status = "incomplete" if turn.truncated else "completed"
    return [{"id": f"item_{secrets.token_hex(8)}", "status": status, **item} for item in items]


def events(body: Mapping[str, Any], turn: Turn) -> Iterator[str]:
    """Yield the server-sent events of the answer."""
    for number, (kind, fields) in enumerate(_events(answer(body, turn))):
        data = {"type": kind, "sequence_number": number, **fields}
        yield f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def _events(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for number, item in enumerate(whole["output"]):
        at = {"output_index": number, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = {**item, **empty, "status": "in_progress"}
        yield "response.output_item.added", {"output_index": number, "item": added}
        if item["type"] == "message":
            at["content_index"] = 0
            part = item["content"][0]
            text = part["text"]
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": text, "logprobs": []}
            yield "response.output_text.done", {**at, "text": text, "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        else:
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", {**at, "delta": arguments}
            done = {"arguments": arguments, "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **done}
        yield "response.output_item.done", {"output_index": number, "item": item}
    yield f"response.{whole['status']}", {"response": whole}
