"""Anthropic's messages: a body as a request, and a turn as its answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from stages.environments.interface import Message, Request, Turn
from stages.environments.programs.messages import (
    RequestRefused,
    dropped_tools,
    read_messages,
    read_tools,
    text_of,
)


def read(body: Mapping[str, Any]) -> Request:
    """Return the request. Raises RequestRefused."""
    messages = list[Message]()
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], "system")})
    items = body.get("messages")
    if not isinstance(items, list):
        raise RequestRefused("messages", "give a list of messages")
    for place, item in enumerate(items):
        where = f"messages[{place}]"
        if not isinstance(item, Mapping):
            raise RequestRefused(where, "give an object")
        messages += _read(item, where)
    tools = read_tools(body.get("tools"), "input_schema")
    return Request(read_messages(messages), dropped_tools(body.get("tool_choice"), tools))


def _read(item: Mapping[str, Any], where: str) -> list[Message]:
    """Return a message of blocks as those that it is: results of tools are messages of their own."""
    content = item.get("content")
    if not isinstance(content, list):
        return [{"role": item.get("role"), "content": content}]
    texts, calls, results = [], list[Message](), list[Message]()
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        match kind:
            case "text":
                texts.append(block)
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "function": function})
            case "tool_result":
                text = text_of(block.get("content"), where)
                result = {"tool_call_id": block.get("tool_use_id"), "content": text}
                results.append({"role": "tool", **result})
            case "thinking" | "redacted_thinking":
                pass
            case _:
                raise RequestRefused(where, f"a block of type {kind!r} is not known here")
    messages = results
    if texts or calls or not results:
        message: Message = {"role": item.get("role"), "content": text_of(texts, where)}
        messages.append({**message, "tool_calls": calls} if calls else message)
    return messages


def answer(body: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Return the answer to the request ``body``."""
    prompt, generated = (turn.tokens.prompt, turn.tokens.generated) if turn.tokens else (0, 0)
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": _blocks(turn),
        "stop_reason": _reason(turn),
        "stop_sequence": turn.stop or None,
        "usage": {"input_tokens": prompt, "output_tokens": generated},
    }


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    text = turn.message.get("content") or ""
    calls = turn.message.get("tool_calls") or ()
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        function = call["function"]
        called = {"id": call["id"], "name": function["name"], "input": function["arguments"]}
        blocks.append({"type": "tool_use", **called})
    return blocks


def _reason(turn: Turn) -> str:
    if turn.truncated:
        return "max_tokens"
    if turn.stop:
        return "stop_sequence"
    return "tool_use" if turn.message.get("tool_calls") else "end_turn"


def events(body: Mapping[str, Any], turn: Turn) -> Iterator[str]:
    """Yield the server-sent events of the answer."""
    stream = Events(body)
    yield from stream.begin(turn)
    yield from stream.end(turn)


class Events:
    """The server-sent events of the answer to ``body``: its text as it comes, then the rest."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._sent: str | None = None  # of the text; None: its block has not begun

    def begin(self, turn: Turn) -> Iterator[str]:
        """Yield the events before the first text. ``turn``: with the tokens of the prompt."""
        whole = answer(self._body, turn)
        whole |= {"content": [], "stop_reason": None, "stop_sequence": None}
        whole["usage"]["output_tokens"] = 0
        yield _event("message_start", message=whole)

    def text(self, text: str) -> Iterator[str]:
        """Yield the events of further text."""
        if self._sent is None:
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self._sent = (self._sent or "") + text
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self, turn: Turn) -> Iterator[str]:
        """Yield the events of what is in ``turn`` beside the text that came before."""
        whole = answer(self._body, turn)
        for number, block in enumerate(whole["content"]):
            if block["type"] == "text":
                if self._sent != block["text"]:
                    yield from self.text(block["text"].removeprefix(self._sent or ""))
            else:
                empty = {**block, "input": {}}
                written = json.dumps(block["input"], ensure_ascii=False)
                delta = {"type": "input_json_delta", "partial_json": written}
                yield _event("content_block_start", index=number, content_block=empty)
                yield _event("content_block_delta", index=number, delta=delta)
            yield _event("content_block_stop", index=number)
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        usage = {"output_tokens": whole["usage"]["output_tokens"]}
        yield _event("message_delta", delta=end, usage=usage)
        yield _event("message_stop")

    def error(self, body: Mapping[str, Any]) -> str:
        """Return the event of an error with Anthropic's ``body``."""
        return _event("error", error=body["error"])


def _event(kind: str, **fields: Any) -> str:
    data = {"type": kind, **fields}
    return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
