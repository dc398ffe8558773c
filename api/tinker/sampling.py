"""Operations of samplers, and the futures of all calls.

retrieve_future ──▶ wait for the answer ──▶ a pass, a sample: protobuf; else JSON; failed: {"error", "category"}
                        ├ none within WAIT_SECONDS: 408, and the client asks again at once
                        └ it is there no more, or its engine has ended: 410, and a client samples again
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

from api.server.http.problems import HTTPProblem
from api.server.service.service import Service
from api.tinker.calls import acknowledged, caller, tinker_operation
from api.tinker.models import PROTOBUF
from api.tinker.passes import write_pass
from api.tinker.samples import SampleBody, write_sample
from api.tinker.schemas import (
    Answer,
    CompletionsBody,
    OfRequest,
    OfSampler,
    SamplerBody,
    SamplerPath,
    SequencePath,
)
from orchestration.calls.interface import Completion, Done, Failed, NotThere, SamplerInfo
from pipeline.first_of import first_of
from stages.calls.interface import PassOutput, SampleOutput

T = TypeVar("T")
PROMPT_BYTES = 8 * 2**20
PROMPT_VALUES = 300_000
WAIT_SECONDS = 30.0  # clients give up after 45
DEADLINE_SECONDS = 60.0
# of the JSON answer to each kind of call
TYPES = {"save_sampler": "save_weights_for_sampler", "save_external": "save_weights_external"}


@tinker_operation("POST", "/api/v1/create_sampling_session", summary="A sampler")
async def create_sampler(service: Service, request: web.Request, body: SamplerBody) -> Answer:
    calls, owner = caller(request)
    sampler = await calls.open_sampler(
        owner,
        body.session_id,
        body.sampling_session_seq_id,
        base=body.base_model,
        path=body.model_path,
    )
    return Answer(sampling_session_id=sampler.sampler_id, type="create_sampling_session")


@tinker_operation("POST", "/api/v1/join_sampling_session", summary="A number for a copy of it")
async def join_sampler(service: Service, request: web.Request, body: OfSampler) -> Answer:
    calls, owner = caller(request)
    counter = await calls.join_sampler(owner, body.sampling_session_id)
    return Answer(client_counter=counter, type="join_sampling_session")


@tinker_operation("GET", "/api/v1/samplers/{sampler}", summary="What a sampler samples with")
async def get_sampler(service: Service, request: web.Request, path: SamplerPath) -> Answer:
    calls, owner = caller(request)
    sampler: SamplerInfo = await calls.sampler(owner, path.sampler)
    return Answer(sampler_id=sampler.sampler_id, base_model=sampler.base, model_path=sampler.path)


@tinker_operation(
    "POST",
    "/api/v1/asample",
    summary="Sample",
    body_limit=PROMPT_BYTES,
    body_values=PROMPT_VALUES,
)
async def asample(service: Service, request: web.Request, body: SampleBody) -> Answer:
    calls, owner = caller(request)
    return acknowledged(
        await calls.sample(owner, body.sampling_session_id, body.seq_id, body.request())
    )


@tinker_operation(
    "POST",
    "/api/v1/retrieve_future",
    summary="The answer to a call",
    seconds=DEADLINE_SECONDS,
    produces=PROTOBUF,
)
async def retrieve_future(
    service: Service, request: web.Request, body: OfRequest
) -> web.StreamResponse:
    calls, owner = caller(request)
    try:
        waiting = calls.result(owner, body.request_id, WAIT_SECONDS)
        result = await _held(service, request, waiting)
    except NotThere as error:
        raise HTTPProblem(410, str(error), kind="request", field="request_id") from None
    match result:
        case Done():
            return await _answer(result)
        case Failed(again=True):
            raise HTTPProblem(410, result.message, kind="again", fix="call again")
        case Failed():
            category = "user" if result.by_client else "server"
            return web.json_response({"error": result.message, "category": category})
    return web.json_response({"queue_state": "active"}, status=408)


@tinker_operation(
    "POST",
    "/api/v1/retrieve_futures",
    summary="Which samples have an answer",
    seconds=DEADLINE_SECONDS,
)
async def retrieve_futures(service: Service, request: web.Request, body: CompletionsBody) -> Answer:
    """One request for all samples of a sampler, where each would wait in a connection of its own."""
    calls, owner = caller(request)
    target = body.target
    seconds = WAIT_SECONDS if body.timeout is None else min(body.timeout, WAIT_SECONDS)
    waiting = calls.completions(
        owner,
        target.sampling_session_id,
        target.cloned_sampler_id,
        body.prev_cursor,
        seconds,
    )
    completions, cursor = await _held(service, request, waiting) or ((), body.prev_cursor)
    return Answer(completions=[_completion(each) for each in completions], cursor=cursor)


def _completion(completion: Completion) -> dict[str, Any]:
    if not completion.succeeded:
        return {"state": "failed", "request_id": completion.request_id}
    return {
        "state": "finished",
        "request_id": completion.request_id,
        "response_payload_uncompressed_size": completion.bytes,
    }


async def _held(
    service: Service, request: web.Request, waiting: Coroutine[Any, Any, T]
) -> T | None:
    """Return what ``waiting`` does, None when the server closes before. Raises HTTPProblem where
    too many requests wait already."""
    with service.held(request) as room:
        if not room:
            waiting.close()
            detail = "Too many requests wait here."
            raise HTTPProblem(429, detail, kind="held", fix="ask for fewer answers at once")
        result, _ = await first_of(waiting, service.closing.wait())
    return result


async def _answer(done: Done) -> web.Response:
    match done.value:
        case PassOutput() as output:
            data = await asyncio.to_thread(write_pass, output)
        case SampleOutput() as output:
            data = await asyncio.to_thread(write_sample, output)
        case fields:
            return web.json_response({"type": TYPES.get(done.kind, done.kind), **fields})
    return web.Response(body=data, content_type=PROTOBUF)


@tinker_operation("GET", "/tinker/sequences/{sequence}", summary="Which weights made its tokens")
async def get_sequence(service: Service, request: web.Request, path: SequencePath) -> Answer:
    """The versions are pairs of optimizer steps and tokens. It is there as long as the answer to
    its request is."""
    calls, owner = caller(request)
    request_id, _, place = path.sequence.rpartition(":")
    match await calls.result(owner, request_id, 0):
        case Done(value=SampleOutput(sequences=sequences)) if place in map(
            str, range(len(sequences))
        ):
            return Answer(sequence_id=path.sequence, versions=sequences[int(place)].versions)
    detail = "There is no such sequence, or it is not sampled yet."
    raise HTTPProblem(404, detail, kind="sequence", field="path.sequence", value=path.sequence)


@tinker_operation("POST", "/api/v1/cancel_future", summary="Taken; the call goes on")
async def cancel_future(service: Service, body: OfRequest) -> None:
    return None
