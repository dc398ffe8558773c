"""Operations of a client's session: what it may do here, its heartbeat, its end."""

from __future__ import annotations

from aiohttp import web

from api.server.http.problems import HTTPProblem
from api.server.service.service import Service
from api.tinker.calls import caller, tinker_operation
from api.tinker.schemas import Answer, FinishBody, OfSession, SessionBody, SessionPath, Tolerant
from orchestration.calls.interface import NotThere

# Answers of clients that are in flight each have a connection.
MOST_SAMPLING = 256
CHUNK_DATA = 1024
CHUNK_BYTES = 16 * 2**20
# Calls come one by one, in the order of their numbers.
CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": CHUNK_DATA,
    "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
    "sample_max_concurrent_requests": MOST_SAMPLING,
    "create_model_via_load_weights": True,
    "sample_use_retrieve_futures": True,
    "custom_loss_server_side": True,
    "sample_join_sampling_session": True,
}
REFRESH_SECONDS = 3600


@tinker_operation("GET", "/api/v1/healthz", scope=None, summary="Whether it answers")
async def health(service: Service) -> Answer:
    return Answer(status="ok")


@tinker_operation("POST", "/api/v1/client/config", summary="What clients adapt to")
async def client_config(service: Service) -> Answer:
    return Answer(**CONFIG)


@tinker_operation("POST", "/api/v1/client/dynamic_config", summary="What clients adapt to later")
async def dynamic_config(service: Service) -> Answer:
    return Answer(refresh_interval_sec=REFRESH_SECONDS, sample_cancel_enabled=False)


@tinker_operation("GET", "/api/v1/get_server_capabilities", summary="Base models")
async def capabilities(service: Service, request: web.Request) -> Answer:
    models = [
        {
            "model_name": base.name,
            "max_context_length": base.context,
            "trainable": True,
            "sampleable": True,
        }
        for base in caller(request)[0].bases
    ]
    return Answer(supported_models=models)


@tinker_operation("POST", "/api/v1/create_session", summary="Begin a session")
async def create_session(service: Service, request: web.Request, body: SessionBody) -> Answer:
    calls, owner = caller(request)
    session = await calls.open_session(
        owner,
        tags=body.tags,
        metadata=body.user_metadata or {},
        display_name=body.display_name or "",
    )
    return Answer(session_id=session, type="create_session")


@tinker_operation("POST", "/api/v1/session_heartbeat", summary="Keep a session")
async def heartbeat(service: Service, request: web.Request, body: OfSession) -> Answer:
    calls, owner = caller(request)
    try:
        await calls.heartbeat(owner, body.session_id)
    except NotThere as error:  # its client stops
        raise HTTPProblem(410, str(error), kind="session", field="session_id") from None
    return Answer(type="session_heartbeat")


@tinker_operation(
    "POST", "/api/v1/sessions/{session}/finish", summary="End a session", body_optional=True
)
async def finish(
    service: Service, request: web.Request, path: SessionPath, body: FinishBody
) -> Answer:
    calls, owner = caller(request)
    await calls.finish_session(owner, path.session, body.reason.type)
    return Answer()


@tinker_operation("POST", "/api/v1/telemetry", summary="Read and dropped", body_values=1_000_000)
async def telemetry(service: Service, body: Tolerant) -> Answer:
    return Answer(status="accepted")
