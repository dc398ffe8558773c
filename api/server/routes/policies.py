"""Routes of served policies, as OpenAI's API has them: models, completions, chat completions.

request ──▶ token, validation ──▶ which policy? ──▶ its process (api.policy) ──▶ the answer, passed on as it comes
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import Field

from api.schemas.completions import ChatRequest, ChatView, CompletionRequest, CompletionView, ModelsView, ModelView
from api.schemas.runs import Strict
from api.server.operations import operation, while_wanted
from api.server.problems import HTTPProblem
from api.server.service import Service
from orchestration.policy.source import PolicySource, PolicyUnknown, parse_model
from orchestration.run.checkpoint import open_checkpoint, whole
from orchestration.service.registry import RunRecord, UnknownRun

MOST_RUNS = 100  # that are listed, the newest
_asking: dict[str, Any] = {"scope": "run", "tag": "policies", "errors": (404,), "seconds": 0, "streams": True}


class ModelPath(Strict):
    model: str = Field(max_length=200)


@operation("GET", "/v1/models", scope="read", summary="Policies that are served", tag="policies")
async def list_models(service: Service) -> ModelsView:
    """The checkpoints that the server was given, and the newest runs: each as `RUN`, its newest policy, and as
    `RUN@VERSION` for each checkpoint."""
    found = [_model(name, 0, "checkpoint") for name in service.settings.checkpoints]
    records, _ = await service.registry.list(limit=MOST_RUNS)
    for record in records:
        if record.started is not None:
            found.append(_model(record.id, record.created, record.owner))
            versions = await asyncio.to_thread(_versions, service.folder(record))
            found += [_model(f"{record.id}@{version}", record.created, record.owner) for version in versions]
    return ModelsView(data=found)


@operation("GET", "/v1/models/{model}", scope="read", summary="A policy", tag="policies", errors=(404,))
async def get_model(service: Service, path: ModelPath) -> ModelView:
    _, record = await _source(service, path.model)
    return _model(path.model, record.created, record.owner) if record else _model(path.model, 0, "checkpoint")


@operation("POST", "/v1/completions", summary="A policy's responses to prompts", **_asking)
async def create_completion(
    service: Service, request: web.Request, body: CompletionRequest, raw: bytes
) -> CompletionView:
    """OpenAI's completions. Each choice has the policy versions of its tokens, and one alone unless `mix_versions`."""
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


@operation("POST", "/v1/chat/completions", summary="A policy's responses to a conversation", **_asking)
async def create_chat_completion(service: Service, request: web.Request, body: ChatRequest, raw: bytes) -> ChatView:
    """OpenAI's chat completions. Each choice has the policy versions of its tokens, and one alone unless
    `mix_versions`."""
    return await _forward(service, request, body, raw)  # type: ignore[return-value]


async def _forward(
    service: Service, request: web.Request, body: CompletionRequest | ChatRequest, raw: bytes
) -> web.StreamResponse:
    source, _ = await _source(service, body.model)
    with service.held() as room:
        if not room:
            raise HTTPProblem(503, "Too many requests wait.", kind="readers", headers={"Retry-After": "10"})
        return await while_wanted(request, _ask(service, source, request, raw))


async def _ask(service: Service, source: PolicySource, request: web.Request, raw: bytes) -> web.StreamResponse:
    async with (
        service.policies.session(source) as session,
        session.post(request.path, data=raw) as answer,
    ):
        if answer.content_type != "text/event-stream":
            body, kept = await answer.read(), {"Retry-After"} & answer.headers.keys()
            headers = {"Content-Type": answer.headers["Content-Type"], **{name: answer.headers[name] for name in kept}}
            return web.Response(status=answer.status, body=body, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response


async def _source(service: Service, model: str) -> tuple[PolicySource, RunRecord | None]:
    """Returns what is served as ``model``, and its run. Raises PolicyUnknown."""
    name, _ = parse_model(model)
    if folder := service.settings.checkpoints.get(name):
        return PolicySource(name, folder=str(folder)), None
    try:
        return PolicySource(name, service.registry.link.url, name), await service.registry.get(name)
    except UnknownRun:
        raise PolicyUnknown(f"there is no model {name!r}") from None


def _versions(folder: Path) -> list[int]:
    return [open_checkpoint(path).version for path in whole(folder / "checkpoints")]


def _model(name: str, created: float, owner: str) -> ModelView:
    return ModelView(id=name, created=int(created), owned_by=owner or "asyncdock")
