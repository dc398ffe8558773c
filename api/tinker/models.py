"""Operations of models in training: each is recorded, acknowledged, and answered by a future.

POST ──▶ number, content ──▶ calls ──▶ {"request_id"} ──▶ api/tinker/sampling.py
            └ a content that is refused is a call that fails in its place
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from api.server.http.bodies import read_body
from api.server.http.problems import HTTPProblem, errors_of, invalid_request
from api.server.service.service import Service
from api.tinker.calls import SHARED, acknowledged, caller, in_order, tinker_operation
from api.tinker.messages import MessageDamaged
from api.tinker.passes import loss_options, read_data, read_head
from api.tinker.schemas import (
    Answer,
    LoadBody,
    LossBody,
    ModelBody,
    OfModel,
    OfPath,
    Ordered,
    SaveBody,
    SaveExternalBody,
    SaveSamplerBody,
    StepBody,
)
from orchestration.calls.interface import Acknowledged, Kind
from stages.calls.interface import ModelOptions

BODY_BYTES = 64 * 2**20  # of data
PROTOBUF = "application/x-protobuf"
ADAMW = {"type": "adamw"}


@tinker_operation("POST", "/api/v1/create_model", summary="A model to train")
async def create_model(service: Service, request: web.Request, body: ModelBody) -> Answer:
    calls, owner = caller(request)
    call = await calls.create_model(
        owner,
        body.session_id,
        body.model_seq_id,
        body.base_model,
        body.lora_config.options(),
        body.user_metadata or {},
    )
    return acknowledged(call)


@tinker_operation("POST", "/api/v1/get_info", summary="What a model is")
async def get_info(service: Service, request: web.Request, body: OfModel) -> Answer:
    calls, owner = caller(request)
    model = await calls.model(owner, body.model_id)
    return Answer(
        type="get_info",
        model_id=model.model_id,
        model_name=model.base,
        model_data={
            "arch": model.architecture,
            "model_name": model.base,
            "tokenizer_id": model.tokenizer or None,
        },
        is_lora=model.options.rank > 0,
        lora_rank=model.options.rank or None,
        optimizer_config=ADAMW,
    )


@tinker_operation("POST", "/api/v1/unload_model", summary="End a model")
async def unload_model(service: Service, request: web.Request, body: OfModel) -> Answer:
    calls, owner = caller(request)
    return acknowledged(await calls.unload_model(owner, body.model_id))


@tinker_operation("POST", "/api/v1/forward_backward", summary="A pass", consumes=PROTOBUF)
async def forward_backward(service: Service, request: web.Request) -> Answer:
    settings = service.settings
    body = await read_body(
        request, BODY_BYTES, settings.body_seconds, media_type=PROTOBUF, encodings=("zstd",)
    )
    decoding = request.app[SHARED].decoding
    try:
        async with decoding:
            message = await asyncio.to_thread(read_head, body)
    except MessageDamaged as error:
        fix = "send what the SDK sends"
        raise HTTPProblem(400, f"The body {error}.", field="body", fix=fix) from None
    try:
        head = Ordered(model_id=message.model_id, seq_id=message.seq_id)
    except ValidationError as error:
        raise invalid_request(422, errors_of(error)) from None

    async def send() -> Acknowledged:
        calls, owner = caller(request)
        options, names = calls.with_loss(owner, loss_options(message))
        async with decoding:
            data = await asyncio.to_thread(read_data, message, names)
        return await calls.train(
            owner,
            head.model_id,
            head.seq_id,
            data,
            message.loss_fn,
            options,
            backward=not message.forward_only,
        )

    kind: Kind = "forward" if message.forward_only else "forward_backward"
    return await in_order(request, head.model_id, head.seq_id, kind, send)


@tinker_operation("POST", "/api/v1/create_custom_loss", summary="A loss of a client's own")
async def create_loss(service: Service, request: web.Request, body: LossBody) -> Answer:
    calls, owner = caller(request)
    inputs = [each.model_dump() for each in body.inputs]
    graph = {"inputs": inputs, "nodes": [each.model_dump() for each in body.graph.nodes]}
    number = body.custom_loss_seq_id
    return acknowledged(await calls.create_loss(owner, body.session_id, number, graph))


@tinker_operation("POST", "/api/v1/optim_step", summary="An optimizer step")
async def optim_step(service: Service, request: web.Request, body: Ordered, raw: bytes) -> Answer:
    async def send() -> Acknowledged:
        step = StepBody.model_validate_json(raw, strict=True)
        calls, owner = caller(request)
        return await calls.optim_step(owner, body.model_id, body.seq_id, step.options())

    return await in_order(request, body.model_id, body.seq_id, "optim_step", send)


def _saving(
    name: str, kind: Kind, body_type: type[SaveBody | SaveExternalBody], summary: str
) -> Callable[..., Awaitable[Answer]]:
    """Return the operation ``name``, a call of ``kind``."""

    @tinker_operation("POST", f"/api/v1/{name}", summary=summary)
    async def save(service: Service, request: web.Request, body: Ordered, raw: bytes) -> Answer:
        async def send() -> Acknowledged:
            saved = body_type.model_validate_json(raw, strict=True)
            calls, owner = caller(request)
            options = saved.options(body.seq_id)
            return await calls.save(owner, body.model_id, body.seq_id, kind, options)

        return await in_order(request, body.model_id, body.seq_id, kind, send)

    return save


save_weights = _saving("save_weights", "save_weights", SaveBody, "Keep a model's state")
save_sampler = _saving(
    "save_weights_for_sampler", "save_sampler", SaveSamplerBody, "Weights to sample with"
)
save_external = _saving(
    "save_weights_external", "save_external", SaveExternalBody, "Weights for other programs"
)


@tinker_operation("POST", "/api/v1/load_weights", summary="A model from a state")
async def load_weights(service: Service, request: web.Request, body: LoadBody) -> Answer:
    calls, owner = caller(request)
    if body.model_id is not None:
        model_id = body.model_id

        async def send() -> Acknowledged:
            return await calls.load_weights(
                owner, model_id, body.seq_id, body.path, optimizer=body.optimizer
            )

        return await in_order(request, model_id, body.seq_id, "load_weights", send)
    if body.session_id is None:
        fix = "give model_id with seq_id, or session_id with model_seq_id"
        raise HTTPProblem(422, "It is for no model.", field="model_id", fix=fix)
    call = await calls.create_model_from(
        owner,
        body.session_id,
        body.model_seq_id,
        body.path,
        base=body.base_model,
        optimizer=body.optimizer,
        metadata=body.user_metadata or {},
    )
    return acknowledged(call)


@tinker_operation("POST", "/api/v1/weights_info", summary="What a checkpoint is of")
async def weights_info(service: Service, request: web.Request, body: OfPath) -> Answer:
    calls, owner = caller(request)
    checkpoint = await calls.checkpoint(owner, body.tinker_path)
    return Answer(base_model=checkpoint.base, **_lora_fields(checkpoint.options))


def _lora_fields(options: ModelOptions) -> dict[str, Any]:
    """Return what a client reads of a checkpoint's adapter."""
    return {
        "is_lora": options.rank > 0,
        "lora_rank": options.rank or None,
        "train_unembed": options.head,
        "train_mlp": options.mlp,
        "train_attn": options.attention,
        "optimizer_config": ADAMW,
    }
