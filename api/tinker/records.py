"""Operations on what there is: training runs, checkpoints, sessions, and the ledger of a model."""

from __future__ import annotations

import email.utils
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from api.server.http.problems import HTTPProblem
from api.server.service.service import PRINCIPAL, Service
from api.tinker.calls import SHARED, caller, tinker_operation
from api.tinker.schemas import (
    Answer,
    ArchivePath,
    CheckpointPath,
    CopyBody,
    CopyHeaders,
    ExternalPath,
    LifeBody,
    ModelPath,
    PageQuery,
    SessionPath,
)
from orchestration.calls.interface import CheckpointInfo, ModelInfo

RUN = "/api/v1/training_runs/{model}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
ARCHIVE_SECONDS = 900.0  # for which the address of an archive is valid
MOST_ARCHIVES = 1000


@tinker_operation("GET", "/api/v1/training_runs", summary="Models of this token")
async def list_runs(service: Service, request: web.Request, query: PageQuery) -> Answer:
    """The one that was asked last is the first."""
    calls, owner = caller(request)
    models = sorted(await calls.models(owner), key=lambda each: each.last_request, reverse=True)
    checkpoints = await calls.checkpoints(owner)
    chosen, cursor = _page(models, query)
    name = request[PRINCIPAL].name
    return Answer(training_runs=[_run(model, checkpoints, name) for model in chosen], cursor=cursor)


@tinker_operation("GET", RUN, summary="A model")
async def get_run(service: Service, request: web.Request, path: ModelPath) -> Answer:
    calls, owner = caller(request)
    model = await calls.model(owner, path.model)
    checkpoints = await calls.checkpoints(owner, path.model)
    return Answer(**_run(model, checkpoints, request[PRINCIPAL].name))


@tinker_operation("GET", RUN + "/checkpoints", summary="Checkpoints of a model")
async def list_run_checkpoints(service: Service, request: web.Request, path: ModelPath) -> Answer:
    calls, owner = caller(request)
    checkpoints = await calls.checkpoints(owner, path.model)
    return Answer(checkpoints=[_checkpoint(each) for each in checkpoints])


@tinker_operation("GET", "/api/v1/checkpoints", summary="Checkpoints of this token")
async def list_checkpoints(service: Service, request: web.Request, query: PageQuery) -> Answer:
    """The newest is the first."""
    calls, owner = caller(request)
    newest_first = sorted(await calls.checkpoints(owner), key=lambda each: each.time, reverse=True)
    chosen, cursor = _page(newest_first, query)
    return Answer(checkpoints=[_checkpoint(each) for each in chosen], cursor=cursor)


@tinker_operation("DELETE", CHECKPOINT, summary="Delete a checkpoint")
async def delete_checkpoint(service: Service, request: web.Request, path: CheckpointPath) -> None:
    calls, owner = caller(request)
    await calls.delete_checkpoint(owner, path.path)


@tinker_operation("PUT", CHECKPOINT + "/ttl", summary="How long a checkpoint is kept")
async def expire_checkpoint(
    service: Service, request: web.Request, path: CheckpointPath, body: LifeBody
) -> None:
    calls, owner = caller(request)
    await calls.expire_checkpoint(owner, path.path, body.ttl_seconds)


@tinker_operation("POST", CHECKPOINT + "/publish", summary="Let all tokens read a checkpoint")
async def publish_checkpoint(service: Service, request: web.Request, path: CheckpointPath) -> None:
    calls, owner = caller(request)
    await calls.publish_checkpoint(owner, path.path, public=True)


@tinker_operation("DELETE", CHECKPOINT + "/publish", summary="Let this token alone read it")
async def unpublish_checkpoint(
    service: Service, request: web.Request, path: CheckpointPath
) -> None:
    calls, owner = caller(request)
    await calls.publish_checkpoint(owner, path.path, public=False)


@tinker_operation("POST", "/api/v1/copy_weights", summary="A copy of a checkpoint")
async def copy_weights(
    service: Service, request: web.Request, headers: CopyHeaders, body: CopyBody
) -> Answer:
    """It shares its files with the source, and stays when that is deleted."""
    calls, owner = caller(request)
    copied = await calls.copy_checkpoint(
        owner,
        body.source_path,
        session_id=body.session_id,
        number=body.model_seq_id,
        ttl=body.ttl_seconds,
        key=headers.key,
    )
    return Answer(tinker_path=copied.path)


@tinker_operation("GET", CHECKPOINT + "/archive", summary="An address for its .tar file")
async def archive_checkpoint(
    service: Service, request: web.Request, path: CheckpointPath
) -> web.Response:
    """The address needs no token: clients send none with it."""
    calls, owner = caller(request)
    file = await calls.archive(owner, path.path)
    expires = time.time() + ARCHIVE_SECONDS
    headers = {
        "Location": _address(request, file, expires),
        "Expires": email.utils.formatdate(expires, usegmt=True),
    }
    return web.Response(status=302, headers=headers)


@tinker_operation(
    "GET",
    RUN + "/checkpoints/external_weights/{name}/external_weights_urls",
    summary="Addresses of the files of a checkpoint that others read",
)
async def list_external(service: Service, request: web.Request, path: ExternalPath) -> Answer:
    calls, owner = caller(request)
    files = await calls.exported(owner, path.path)
    expires = time.time() + ARCHIVE_SECONDS
    urls = {name: _address(request, file, expires) for name, file in files.items()}
    return Answer(urls=urls, expires=_date(expires))


def _address(request: web.Request, file: str, expires: float) -> str:
    """Return an address of ``file`` that is valid until ``expires``, without a token."""
    ticket = secrets.token_urlsafe(32)
    archives = request.app[SHARED].archives
    archives[ticket] = file, expires
    while len(archives) > MOST_ARCHIVES:
        archives.popitem(last=False)
    return f"{request.scheme}://{request.host}/tinker/archives/{ticket}"


@tinker_operation(
    "GET", "/tinker/archives/{ticket}", scope=None, summary="The .tar file", seconds=0
)
async def get_archive(
    service: Service, request: web.Request, path: ArchivePath
) -> web.StreamResponse:
    file, expires = request.app[SHARED].archives.get(path.ticket, ("", 0.0))
    if time.time() >= expires:
        fix = "ask for the archive's address again"
        raise HTTPProblem(404, "There is no such archive.", kind="archive", fix=fix)
    return web.FileResponse(file)


@tinker_operation("GET", "/api/v1/sessions", summary="Sessions of this token")
async def list_sessions(service: Service, request: web.Request, query: PageQuery) -> Answer:
    calls, owner = caller(request)
    chosen, _ = _page(await calls.sessions(owner), query)
    return Answer(sessions=list(chosen))


@tinker_operation("GET", "/api/v1/sessions/{session}", summary="A session")
async def get_session(service: Service, request: web.Request, path: SessionPath) -> Answer:
    calls, owner = caller(request)
    session = await calls.session(owner, path.session)
    return Answer(
        training_run_ids=list(session.models),
        sampler_ids=list(session.samplers),
        user_metadata=_texts(session.metadata),
        display_name=session.display_name or None,
    )


@tinker_operation("GET", "/tinker/models/{model}/ledger", summary="What a model has had")
async def get_ledger(service: Service, request: web.Request, path: ModelPath) -> Answer:
    """Calls by kind and state, data, tokens, steps, staleness, and the versions of the sequences
    that were sampled with its weights."""
    calls, owner = caller(request)
    return Answer(**await calls.ledger(owner, path.model))


def _page(things: Sequence[Any], query: PageQuery) -> tuple[Sequence[Any], dict[str, int]]:
    cursor = {"offset": query.offset, "limit": query.limit, "total_count": len(things)}
    return things[query.offset : query.offset + query.limit], cursor


def _run(model: ModelInfo, checkpoints: Sequence[CheckpointInfo], owner: str) -> dict[str, Any]:
    newest = {
        checkpoint.kind: _checkpoint(checkpoint)
        for checkpoint in sorted(checkpoints, key=lambda each: each.time)
        if checkpoint.model_id == model.model_id
    }
    return {
        "training_run_id": model.model_id,
        "base_model": model.base,
        "model_owner": owner,
        "is_lora": model.options.rank > 0,
        "lora_rank": model.options.rank or None,
        "corrupted": model.failed,
        "last_request_time": _date(model.last_request),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": _texts(model.metadata),
    }


def _checkpoint(checkpoint: CheckpointInfo) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": TYPES[checkpoint.kind],
        "time": _date(checkpoint.time),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "public": checkpoint.public,
        "user_metadata": dict(checkpoint.metadata),
        "expires_at": None if checkpoint.expires is None else _date(checkpoint.expires),
    }


def _texts(metadata: Any) -> dict[str, str]:
    """Return metadata as clients read it: texts alone."""
    return {
        key: value if isinstance(value, str) else repr(value) for key, value in metadata.items()
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
