"""A request's sampling, as engines take it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from api.schemas.completions import ChatRequest, Request
from api.server.http.problems import HTTPProblem
from stages.engines.protocols import SamplingParams

DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
# of a request, as SamplingParams has them
SAME = (
    *("temperature", "top_p", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def refused(detail: str, field_name: str, fix: str, value: object = None) -> HTTPProblem:
    return HTTPProblem(400, detail, kind="generation", field=field_name, value=value, fix=fix)


def asked_tokens(request: Request) -> int | None:
    """Return the ``max_tokens`` of ``request``."""
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens or request.max_tokens
    return request.max_tokens


def asked_alternatives(request: Request) -> int | None:
    """Return how many of the likeliest tokens come beside each; None: there are no logprobs.
    Raises HTTPProblem."""
    if not isinstance(request, ChatRequest):
        count = request.logprobs
    else:
        count = (request.top_logprobs or 0) if request.logprobs else None
    named = request.logprob_token_ids
    top = isinstance(request, ChatRequest) and request.top_logprobs
    if count is None and (named or top):
        field = "logprob_token_ids" if named else "top_logprobs"
        raise refused(f"{field} comes with logprobs alone.", field, "set logprobs")
    return len(set(named)) if named else count


def sampling_of(
    request: Request, default: SamplingParams, max_tokens: int, words: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    """Return how the tokens of ``request`` are sampled; what it does not say is as in ``default``.

    ``max_tokens``: of a chat that does not say. ``words``: tokens of its ``bad_words``.
    """
    same_named: dict[str, Any] = {
        name: value for name in SAME if (value := getattr(request, name)) is not None
    }
    biases = {int(token): bias for token, bias in (request.logit_bias or {}).items()}
    ends = () if request.ignore_eos else default.stop_token_ids
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    chat = isinstance(request, ChatRequest)
    params = SamplingParams(
        asked_tokens(request) or (max_tokens if chat else DEFAULT_TOKENS),
        top_k=max(0, request.top_k or 0),
        stop=stops,
        stop_token_ids=tuple(sorted({*ends, *(request.stop_token_ids or ())})),
        logit_bias=tuple(biases.items()),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        bad_words=words,
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
    )
    return replace(params, **same_named)
