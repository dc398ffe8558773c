"""vLLM's generate: token ids in, token ids out, for programs that write conversations themselves."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from stages.environments.interface import Request, Turn
from stages.environments.programs.chat import logprobs
from stages.environments.programs.messages import RequestRefused


def read(body: Mapping[str, Any]) -> Request:
    """Return the request. Raises RequestRefused."""
    token_ids = body.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids:
        raise RequestRefused("token_ids", "give a list of token ids")
    if not all(type(token) is int and token >= 0 for token in token_ids):
        raise RequestRefused("token_ids", "give whole numbers of 0 and more")
    for name in ("stream", "features", "content_parts"):
        if body.get(name):
            raise RequestRefused(name, "is not served; leave it out")
    return Request((), wants_tokens=True, prompt_ids=token_ids)


def answer(body: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Return the answer to the request ``body``. ``weight_versions``: of each token, the policy
    version that made it."""
    choice = {
        "index": 0,
        "token_ids": list(turn.tokens.token_ids) if turn.tokens else [],
        "logprobs": logprobs(turn),
        "weight_versions": list(turn.tokens.versions) if turn.tokens else [],
        "finish_reason": "length" if turn.truncated else "stop",
    }
    identity = str(body.get("request_id") or f"generate-{secrets.token_hex(12)}")
    return {"request_id": identity, "choices": [choice], "prompt_logprobs": None}


def events(body: Mapping[str, Any], turn: Turn) -> Iterator[str]:
    """Yield nothing: no answer is streamed."""
    yield from ()
