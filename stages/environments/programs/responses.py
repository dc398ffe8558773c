"""OpenAI's responses: a body as a request, and a turn as its answer."""

from __future__ import annotations

import itertools
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
    tokens = turn.tokens
    prompt, generated = (tokens.prompt, tokens.generated) if tokens else (0, 0)
    cached = tokens.cached if tokens else 0
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
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
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
        items.append({"type": "message", "role": "assistant", "content": [_part(text)]})
    for call in calls:
        name = call["function"]["name"]
        arguments = written_arguments(call)
        function = {"call_id": call["id"], "name": name, "arguments": arguments}
        items.append({"type": "function_call", **function})
    status = "incomplete" if turn.truncated else "completed"
    return [{"id": f"item_{secrets.token_hex(8)}", "status": status, **item} for item in items]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def events(body: Mapping[str, Any], turn: Turn) -> Iterator[str]:
    """Yield the server-sent events of the answer."""
    stream = Events(body)
    yield from stream.begin(turn)
    yield from stream.end(turn)


class Events:
    """The server-sent events of the answer to ``body``: its text as it comes, then the rest."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._numbers = itertools.count()
        self._identity: dict[str, Any] = {}  # of the answer
        self._message = f"item_{secrets.token_hex(8)}"
        self._sent: str | None = None  # of the text; None: its item has not begun

    def begin(self, turn: Turn) -> Iterator[str]:
        """Yield the events before the first text. ``turn``: with the tokens of the prompt."""
        whole = answer(self._body, turn)
        self._identity = {name: whole[name] for name in ("id", "created_at")}
        whole |= {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield self._event("created", response=whole)
        yield self._event("in_progress", response=whole)

    def text(self, text: str) -> Iterator[str]:
        """Yield the events of further text."""
        if self._sent is None:
            message = {"type": "message", "role": "assistant", "content": []}
            yield self._added(0, {"id": self._message, **message})
            yield self._event("content_part.added", **self._place, part=_part(""))
        self._sent = (self._sent or "") + text
        yield self._event("output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, turn: Turn) -> Iterator[str]:
        """Yield the events of what is in ``turn`` beside the text that came before."""
        whole = answer(self._body, turn) | self._identity
        for number, item in enumerate(whole["output"]):
            if item["type"] == "message":
                item["id"] = self._message
                yield from self._text_end(item["content"][0])
            else:
                at = {"output_index": number, "item_id": item["id"]}
                yield self._added(number, {**item, "arguments": ""})
                arguments = item["arguments"]
                yield self._event("function_call_arguments.delta", **at, delta=arguments)
                done = {"arguments": arguments, "name": item["name"]}
                yield self._event("function_call_arguments.done", **at, **done)
            yield self._event("output_item.done", output_index=number, item=item)
        yield self._event(whole["status"], response=whole)

    def error(self, body: Mapping[str, Any]) -> str:
        """Return the event of an error with OpenAI's ``body``."""
        error = body["error"]
        fields = {"message": error["message"], "param": error["param"], "code": str(error["code"])}
        return self._write("error", fields)

    def _text_end(self, part: Mapping[str, Any]) -> Iterator[str]:
        text = part["text"]
        if self._sent != text:
            yield from self.text(text.removeprefix(self._sent or ""))
        yield self._event("output_text.done", **self._place, text=text, logprobs=[])
        yield self._event("content_part.done", **self._place, part=part)

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": 0, "item_id": self._message, "content_index": 0}

    def _added(self, number: int, item: Mapping[str, Any]) -> str:
        added = {**item, "status": "in_progress"}
        return self._event("output_item.added", output_index=number, item=added)

    def _event(self, kind: str, **fields: Any) -> str:
        return self._write(f"response.{kind}", fields)

    def _write(self, kind: str, fields: Mapping[str, Any]) -> str:
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
