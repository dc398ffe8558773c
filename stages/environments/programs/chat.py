"""OpenAI's chat completions: a body as a request, and a turn as its answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from stages.environments.interface import Request, Turn
from stages.environments.programs.messages import (
    RequestRefused,
    dropped_tools,
    read_messages,
    read_tools,
    written_arguments,
)


def read(body: Mapping[str, Any]) -> Request:
    """Return the request. Raises RequestRefused."""
    if body.get("n") not in (None, 1):
        raise RequestRefused("n", "a session has one answer to each request; give 1")
    return Request(
        read_messages(body.get("messages")),
        dropped_tools(body.get("tool_choice"), read_tools(body.get("tools"), inside="function")),
        wants_tokens=bool(body.get("return_token_ids") or body.get("logprobs")),
    )


def answer(body: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Return the answer to the request ``body``."""
    choice = {"index": 0, "message": _message(turn), "finish_reason": _reason(turn)}
    choice["logprobs"] = logprobs(turn) if body.get("logprobs") else None
    whole = {**_head(body, "chat.completion"), "choices": [choice], "usage": _usage(turn)}
    if body.get("return_token_ids") and turn.tokens is not None:
        choice["token_ids"] = list(turn.tokens.token_ids)
        whole["prompt_token_ids"] = list(turn.tokens.prompt_ids)
    return whole


def events(body: Mapping[str, Any], turn: Turn) -> Iterator[str]:
    """Yield the server-sent events of the answer, each with all that there is of its kind."""
    head = _head(body, "chat.completion.chunk")
    message = _message(turn)
    calls = message.pop("tool_calls", None)
    deltas = [message]
    if calls:
        deltas.append({"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]})
    for delta in deltas:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    end = {"index": 0, "delta": {}, "finish_reason": _reason(turn)}
    if body.get("logprobs"):
        end["logprobs"] = logprobs(turn)
    yield _event({**head, "choices": [end]})
    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield _event({**head, "choices": [], "usage": _usage(turn)})
    yield "data: [DONE]\n\n"


def _head(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    identity = f"chatcmpl-{secrets.token_hex(12)}"
    return {
        "id": identity,
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "policy",
    }


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.message.get("content") or None}
    if thinking := turn.message.get("reasoning_content"):
        message["reasoning_content"] = thinking
    if calls := turn.message.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": written_arguments(call),
                },
            }
            for call in calls
        ]
    else:
        message["content"] = message["content"] or ""
    return message


def _reason(turn: Turn) -> str:
    if turn.truncated:
        return "length"
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def _usage(turn: Turn) -> dict[str, int]:
    prompt, generated = (turn.tokens.prompt, turn.tokens.generated) if turn.tokens else (0, 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def logprobs(turn: Turn) -> dict[str, Any] | None:
    """Return the logprobs of the turn's tokens, which are named by their numbers, as vLLM does with
    ``return_tokens_as_token_ids``."""
    if turn.tokens is None:
        return None
    pairs = zip(turn.tokens.token_ids, turn.tokens.logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
