"""The answer to any request to a policy; what a form needs is imported with its first request."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from api.policy.handler import respond
from api.policy.latency import Latencies
from api.schemas.completions import REQUESTS, ChatRequest, CompletionRequest, Request
from api.schemas.forms import FORMS, FormRequest, MessagesRequest, ResponsesRequest, TokensRequest
from orchestration.policy.served import Policies

AnyRequest = Request | FormRequest | TokensRequest
ALL: dict[str, type[AnyRequest]] = {**REQUESTS, **FORMS}  # by path


def answer(
    policies: Policies, request: AnyRequest, owner: str = "", latencies: Latencies | None = None
) -> AsyncGenerator[bytes, None]:
    """Return the body of the answer to ``request``, part by part, for the token with the id
    ``owner``. ``latencies``: where its times are counted. Raises HTTPProblem."""
    if isinstance(request, CompletionRequest | ChatRequest):
        return respond(policies, request, owner, latencies)
    if isinstance(request, ResponsesRequest | MessagesRequest):
        from api.policy import forms

        return forms.respond(policies, request, owner, latencies)
    from api.policy.encodings import encode

    return encode(policies, request, owner)
