"""Routes of served policies, as OpenAI's, vLLM's and Anthropic's APIs have them.

request ──▶ token, validation ──▶ is there such a model? ──▶ the policies' process (api.policy) ──▶ its answer, as it comes
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from pydantic import Field

from api.schemas.completions import (
    AnswerView,
    ChatRequest,
    CompletionRequest,
    ModelsView,
    ModelView,
    Request,
)
from api.schemas.forms import (
    CountRequest,
    CountView,
    DetokenizedView,
    DetokenizeRequest,
    FormRequest,
    MessagesRequest,
    MessageView,
    ResponsesRequest,
    ResponseView,
    TokenizeRequest,
    TokensRequest,
    TokensView,
)
from api.schemas.runs import Strict
from api.server.http.problems import HTTPProblem
from api.server.service.operations import operation, while_wanted
from api.server.service.service import PRINCIPAL, Service
from orchestration.checkpoints.checkpoint import usable
from orchestration.policy.source import PoliciesBusy, PolicyUnknown, parse_model
from orchestration.state.registry import UnknownRun

MOST_RUNS = 100  # that are listed, the newest
_asking: dict[str, Any] = {
    "scope": "run",
    "tag": "policies",
    "errors": (404,),
    "seconds": 0,
    "streams": True,
}
_encoding = {**_asking, "streams": False}


class ModelPath(Strict):
    model: str = Field(max_length=200)


@operation("GET", "/v1/models", scope="read", summary="Policies that are served", tag="policies")
async def list_models(service: Service) -> ModelsView:
    """The checkpoints that the server was given, and the newest runs: each as `RUN`, its newest
    policy, and as `RUN@VERSION` for each checkpoint."""
    models = [_model(name) for name in service.settings.checkpoints]
    records, _ = await service.registry.list(limit=MOST_RUNS)
    for record in records:
        if record.started is not None:
            checkpoints = await asyncio.to_thread(usable, service.folder(record) / "checkpoints")
            names = [
                record.id,
                *(f"{record.id}@{checkpoint.version}" for checkpoint in checkpoints),
            ]
            models += [_model(name, record.created, record.owner) for name in names]
    return ModelsView(data=models)


@operation(
    "GET", "/v1/models/{model}", scope="read", summary="A policy", tag="policies", errors=(404,)
)
async def get_model(service: Service, path: ModelPath) -> ModelView:
    name, _ = parse_model(path.model)
    if name in service.settings.checkpoints:
        return _model(path.model)
    try:
        record = await service.registry.get(name)
    except UnknownRun:
        raise PolicyUnknown(f"there is no model {name!r}") from None
    return _model(path.model, record.created, record.owner)


@operation("POST", "/v1/completions", summary="A policy's responses to prompts", **_asking)
async def create_completion(
    service: Service, request: web.Request, body: CompletionRequest, raw: bytes
) -> AnswerView:
    """OpenAI's completions.

    Each choice has the policy versions of its tokens, and one alone unless `mix_versions`.
    """
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


@operation(
    "POST", "/v1/chat/completions", summary="A policy's responses to a conversation", **_asking
)
async def create_chat_completion(
    service: Service, request: web.Request, body: ChatRequest, raw: bytes
) -> AnswerView:
    """OpenAI's chat completions. Versions are as of completions."""
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


@operation("POST", "/v1/responses", summary="A policy's response, as OpenAI has it", **_asking)
async def create_response(
    service: Service, request: web.Request, body: ResponsesRequest, raw: bytes
) -> ResponseView:
    """OpenAI's responses. Nothing is stored."""
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


@operation("POST", "/v1/messages", summary="A policy's message, as Anthropic has it", **_asking)
async def create_message(
    service: Service, request: web.Request, body: MessagesRequest, raw: bytes
) -> MessageView:
    """Anthropic's messages. The token may come as `x-api-key`."""
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


@operation("POST", "/v1/messages/count_tokens", summary="Tokens of a conversation", **_encoding)
async def count_tokens(
    service: Service, request: web.Request, body: CountRequest, raw: bytes
) -> CountView:
    """Anthropic's count of tokens."""
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


@operation("POST", "/tokenize", summary="The tokens of a text or a conversation", **_encoding)
async def tokenize(
    service: Service, request: web.Request, body: TokenizeRequest, raw: bytes
) -> TokensView:
    """As vLLM has it."""
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


@operation("POST", "/detokenize", summary="The text of tokens", **_encoding)
async def detokenize(
    service: Service, request: web.Request, body: DetokenizeRequest, raw: bytes
) -> DetokenizedView:
    """As vLLM has it."""
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


async def _forward(
    service: Service,
    request: web.Request,
    body: Request | FormRequest | TokensRequest,
    raw: bytes,
) -> web.StreamResponse:
    await get_model(service, ModelPath(model=body.model))
    if not service.settings.policies:
        raise PoliciesBusy("this server serves none (--policies 0)")
    with service.held(request) as room:
        if not room:
            raise HTTPProblem(
                429, "Too many requests wait.", kind="readers", headers={"Retry-After": "10"}
            )
        return await while_wanted(request, _pass_on(service, request, raw))


async def _pass_on(service: Service, request: web.Request, raw: bytes) -> web.StreamResponse:
    async with service.policies.post(request.path, raw, request[PRINCIPAL].id) as answer:
        headers = {
            name: answer.headers[name]
            for name in ("Content-Type", "Retry-After")
            if name in answer.headers
        }
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response


def _model(name: str, created: float = 0, owner: str = "checkpoint") -> ModelView:
    return ModelView(id=name, created=int(created), owned_by=owner or "asyncdock")
