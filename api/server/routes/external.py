"""The routes of external stages: AsyncFlow's service interface over HTTP (docs/external.md).

    POST prompts ──▶ gate ──▶ … ──▶ POST experience/get ──▶ (their engine) ──▶ POST experience ──▶ …
    GET weights?after=v (waits) ──▶ GET weights/v ──▶ (they load) ──▶ POST weights/notify

Requests and answers with columns are safetensors bodies (api/external/codec.py), all others JSON.
"""

from __future__ import annotations

import asyncio
import functools
import os

from aiohttp import web

from api.external.schemas import (
    FedView,
    GetExperience,
    LeasePath,
    LeaseQuery,
    LeaseView,
    Notify,
    PublishQuery,
    PutPrompts,
    PutView,
    WeightsPath,
    WeightsQuery,
    WeightsView,
)
from api.schemas.runs import RunPath
from api.server.http.bodies import BINARY, PIECE, read_body
from api.server.service.operations import operation
from api.server.service.service import PRINCIPAL, Service

MOST_BYTES = 128 * 2**20  # of one body of columns
PROMPTS_BYTES = 16 * 2**20
PROMPTS_VALUES = 500_000  # of one body of prompts
WAITING_SECONDS = 90.0  # for requests that may wait 60 seconds
WRITE_SECONDS = 30.0  # for which a reader of weights may stop
external_operation = functools.partial(
    operation, scope="run", owned=True, tag="external stages", errors=(404, 409)
)


@external_operation(
    "POST",
    "/v1/runs/{run}/prompts",
    summary="The prompts wait for the gate",
    seconds=WAITING_SECONDS,
    body_limit=PROMPTS_BYTES,
    body_values=PROMPTS_VALUES,
)
async def put_prompts(
    service: Service, request: web.Request, path: RunPath, body: PutPrompts
) -> FedView:
    """Put prompts into a run with `prompts.source = "external"`, in the order in which they will be
    asked. With `first`, the position of the first of them, a repeat changes nothing. Waits up to
    `wait` seconds while too many wait already."""
    async with service.external_sessions.run(path.run) as session:
        with service.held(request) as room:
            wait = body.wait if room else 0.0
            put = await session.external.put_prompts(
                body.prompts, first=body.first, last=body.last, timeout=wait
            )
        return FedView(next=put)


@external_operation(
    "POST",
    "/v1/runs/{run}/experience/get",
    summary="Rows under a lease, or none that came in time",
    produces=BINARY,
    seconds=WAITING_SECONDS,
)
async def get_experience(
    service: Service, request: web.Request, path: RunPath, body: GetExperience
) -> web.StreamResponse:
    """Lease rows that are ready for a stage, waiting up to `wait` seconds for some.

    A lease is held by renewing it; rows of an expired lease are delivered to another worker. The
    answer is a safetensors file: columns as tensors, and under `asyncdock` in its metadata JSON
    with `token` (null: no rows came), `rows`, `sampling`, `begun`, `state` and `over` (no rows will
    come any more).
    """
    owner = _owner(request)
    async with service.external_sessions.run(path.run) as session:
        with service.held(request) as room:
            if body.replay is None:
                experience = await session.external.get_experience(
                    body.stage,
                    body.worker,
                    body.count,
                    columns=body.columns,
                    version=body.version,
                    wait=body.wait if room else 0.0,
                    lease=body.lease,
                    tokenizer=body.tokenizer,
                    owner=owner,
                )
                has_left = request.transport is None or request.transport.is_closing()
                if experience.token is not None and has_left:  # the client does not know the lease
                    await session.external.release(experience.token, owner=owner)
            else:
                experience = await session.external.replay(body.replay)
            encoded = await session.encode(experience)
    return web.Response(body=encoded, content_type=BINARY)


@external_operation(
    "POST",
    "/v1/runs/{run}/experience",
    summary="The columns are committed, or parked",
    consumes=BINARY,
)
async def put_experience(service: Service, request: web.Request, path: RunPath) -> PutView:
    """Commit columns of rows under a lease, all in one step or none, or `park` responses to be
    continued by any worker. A trainer gives the `step` that it made of its batch, and its
    `metrics`. The body is a safetensors file: columns as tensors, and under `asyncdock` in its
    metadata JSON with `token`, `rows`, `park`, `step` and `metrics`."""
    owner = _owner(request)
    async with service.external_sessions.run(path.run) as session:
        raw = await read_body(request, MOST_BYTES, service.settings.body_seconds, media_type=BINARY)
        body, columns = await session.decode(raw)
        if body.step is not None:
            return PutView(
                left=0,
                version=await session.external.train(
                    body.token, body.step, body.metrics, owner=owner
                ),
            )
        remaining = await session.external.put_experience(
            body.token, body.rows, columns, park=body.park, owner=owner
        )
        return PutView(left=remaining, version=None)


@external_operation(
    "POST", "/v1/runs/{run}/leases/{token}/renew", summary="The lease has a new deadline"
)
async def renew_lease(
    service: Service, request: web.Request, path: LeasePath, query: LeaseQuery
) -> LeaseView:
    """Hold a lease for another `lease` seconds from now."""
    async with service.external_sessions.run(path.run) as session:
        lease_seconds = await session.external.renew(path.token, query.lease, owner=_owner(request))
        return LeaseView(token=path.token, lease=lease_seconds)


@external_operation(
    "POST", "/v1/runs/{run}/leases/{token}/release", summary="The rows are ready for others"
)
async def release_lease(service: Service, request: web.Request, path: LeasePath) -> None:
    """Give back the rows that a lease still holds. Does nothing to a lease that has ended."""
    async with service.external_sessions.run(path.run) as session:
        await session.external.release(path.token, owner=_owner(request))


@external_operation(
    "GET",
    "/v1/runs/{run}/weights",
    owned=False,
    summary="The published version, or none that is newer",
    seconds=WAITING_SECONDS,
)
async def get_published(
    service: Service, request: web.Request, path: RunPath, query: WeightsQuery
) -> WeightsView:
    """The published version and its tensors, when it is newer than `after`; waits up to `wait`
    seconds for it."""
    async with service.external_sessions.run(path.run) as session:
        with service.held(request) as room:
            published = await session.external.weights(query.after, query.wait if room else 0.0)
        return await session.view(published)


@external_operation(
    "GET",
    "/v1/runs/{run}/weights/{version:[0-9]+}",
    owned=False,
    summary="One version's weights, as a safetensors file",
    produces=BINARY,
    sends={"ETag": "The sha256 of the file."},
    seconds=0,
)
async def get_weights(
    service: Service, request: web.Request, path: WeightsPath
) -> web.StreamResponse:
    """All tensors of one of the two newest published versions, verified against the trainer's
    checksums. Later versions do not change them while they are sent. The ETag is the file's sha256.
    """
    async with service.external_sessions.run(path.run) as session:
        weights = await session.weights(path.version)
        response = web.StreamResponse(headers={"ETag": f'"{weights.digest}"'})
        response.content_type = BINARY
        response.content_length = weights.nbytes
        await response.prepare(request)
        for at in range(0, weights.nbytes, PIECE):
            # a reader that stops reading does not keep the file open
            async with asyncio.timeout(WRITE_SECONDS):
                await response.write(
                    await asyncio.to_thread(os.pread, weights.file.fileno(), PIECE, at)
                )
        await response.write_eof()
    return response


@external_operation(
    "PUT",
    "/v1/runs/{run}/weights/{version:[0-9]+}",
    summary="The version is published",
    consumes=BINARY,
    seconds=0,
)
async def publish_weights(
    service: Service, request: web.Request, path: WeightsPath, query: PublishQuery
) -> WeightsView:
    """Publish the version that an external trainer's last step made, or the one that the run begins
    with (0), as a safetensors file. `covered`: steps that the trainer's own checkpoint has;
    the run need not keep their rows."""
    async with service.external_sessions.run(path.run) as session:
        return await session.view(await session.publish(request, path.version, query.covered))


@external_operation(
    "POST",
    "/v1/runs/{run}/weights/notify",
    summary="The worker claims with this version from now on",
)
async def weight_sync_notify(
    service: Service, request: web.Request, path: RunPath, body: Notify
) -> None:
    """Record the version that a rollout has loaded, and the seconds that this took: `exposed`
    without generation, `hidden` beside it."""
    async with service.external_sessions.run(path.run) as session:
        await session.external.notify(
            body.worker,
            body.version,
            exposed=body.exposed,
            hidden=body.hidden,
            owner=_owner(request),
        )


def _owner(request: web.Request) -> str:
    """Return the owner of the leases of this request: its bearer token, which each later call for
    them must present."""
    return f"bearer:{request[PRINCIPAL].id}"
