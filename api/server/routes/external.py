"""The routes of external stages: AsyncFlow's service interface over HTTP (docs/external.md).

    POST prompts ──▶ gate ──▶ … ──▶ POST experience/get ──▶ (their engine) ──▶ POST experience ──▶ …
    GET weights?after=v (waits) ──▶ GET weights/v ──▶ (they load) ──▶ POST weights/notify

Requests and answers with columns are safetensors bodies (api/external/codec.py), all others JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import platform
import re
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import ValidationError

from api.external.schemas import (
    FedView,
    GetExperience,
    LeasePath,
    LeaseQuery,
    LeaseView,
    LocalWeights,
    Notify,
    PublishQuery,
    PutExperience,
    PutPrompts,
    PutView,
    TensorView,
    WeightsPath,
    WeightsQuery,
    WeightsView,
)
from api.external.upload import PIECE, WeightHeader, check_disk, longest_header, receive_weights
from api.schemas.runs import RunPath
from api.server.operations import BINARY, operation, read_body
from api.server.problems import HTTPProblem, of_validation
from api.server.service import Service
from pipeline.index.client import BoundBroken, IndexRefused, LeaseLost
from pipeline.warehouse.arena import StaleHandle
from stages.prompts.external import ExternalPromptsFull
from stages.prompts.files import PromptError

# Code that handles tensors is imported where it is used: a server without external stages does not load torch, which takes
# seconds.
if TYPE_CHECKING:
    from orchestration.external.session import External
    from stages.weights.store import Published

MOST_BYTES = 128 * 2**20  # of one body of columns
PROMPTS_BYTES = 16 * 2**20
PROMPTS_VALUES = 500_000  # of one body of prompts
WAITING_SECONDS = 90.0  # for requests that may wait 60 seconds
WRITE_SECONDS = 30.0  # for which a reader of weights may stop
external_operation = functools.partial(operation, scope="run", tag="external stages", errors=(404, 409))


@external_operation(
    "POST",
    "/v1/runs/{run}/prompts",
    summary="The prompts wait for the gate",
    seconds=WAITING_SECONDS,
    body_limit=PROMPTS_BYTES,
    body_values=PROMPTS_VALUES,
)
async def put_prompts(service: Service, path: RunPath, body: PutPrompts) -> FedView:
    """Put prompts into a run with `prompts.source = "external"`, in the order in which they will be asked. With `first`, the
    position of the first of them, a repeat changes nothing. Waits up to `wait` seconds while too many wait already."""
    async with joined(service, path.run) as external:
        with service.held() as room:
            wait = body.wait if room else 0.0
            put = await external.put_prompts(body.prompts, first=body.first, last=body.last, timeout=wait)
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
    """Lease rows that are ready for a stage, waiting up to `wait` seconds for some. A lease is held by renewing it; rows
    of an expired lease are delivered to another worker. The answer is a safetensors file: columns as tensors, and under
    `asyncdock` in its metadata JSON with `token` (null: no rows came), `rows`, `sampling`, `begun`, `state` and `over` (no
    rows will come any more)."""
    owner = _owner(service, request)
    async with joined(service, path.run) as external:
        from api.external.codec import encode_experience  # its imports are loaded: see `joined`

        with service.held() as room:
            if body.replay is None:
                experience = await external.get_experience(
                    body.stage,
                    body.worker,
                    body.count,
                    columns=body.columns,
                    version=body.version,
                    wait=body.wait if room else 0.0,
                    lease=body.lease,
                    owner=owner,
                )
                has_left = request.transport is None or request.transport.is_closing()
                if experience.token is not None and has_left:  # the client does not know the lease
                    await external.release(experience.token, owner=owner)
            else:
                experience = await external.replay(body.replay)
            encoded = await asyncio.to_thread(encode_experience, external.schema, experience)
    return web.Response(body=encoded, content_type=BINARY)


@external_operation(
    "POST", "/v1/runs/{run}/experience", summary="The columns are committed, or parked", consumes=BINARY
)
async def put_experience(service: Service, request: web.Request, path: RunPath) -> PutView:
    """Commit columns of rows under a lease, all in one step or none, or `park` responses to be continued by any worker. A
    trainer gives the `step` that it made of its batch, and its `metrics`. The body is a safetensors file: columns as
    tensors, and under `asyncdock` in its metadata JSON with `token`, `rows`, `park`, `step` and `metrics`."""
    owner = _owner(service, request)
    async with joined(service, path.run) as external:
        from api.external.codec import Unreadable, from_body

        raw = await read_body(request, limit=MOST_BYTES, media_type=BINARY)
        try:
            control, columns = await asyncio.to_thread(from_body, raw)
            body = PutExperience.model_validate_json(control, strict=True)
        except Unreadable as error:
            fix = "send a safetensors file; docs/external.md describes its content"
            raise HTTPProblem(400, f"The body cannot be read: {error}.", kind="body", field="body", fix=fix) from None
        except ValidationError as error:
            raise of_validation(422, error) from None
        if body.step is not None:
            return PutView(left=0, version=await external.train(body.token, body.step, body.metrics, owner=owner))
        left = await external.put_experience(body.token, body.rows, columns, park=body.park, owner=owner)
        return PutView(left=left, version=None)


@external_operation("POST", "/v1/runs/{run}/leases/{token}/renew", summary="The lease has a new deadline")
async def renew_lease(service: Service, request: web.Request, path: LeasePath, query: LeaseQuery) -> LeaseView:
    """Hold a lease for another `lease` seconds from now."""
    async with joined(service, path.run) as external:
        held = await external.renew(path.token, query.lease, owner=_owner(service, request))
        return LeaseView(token=path.token, lease=held)


@external_operation("POST", "/v1/runs/{run}/leases/{token}/release", summary="The rows are ready for others")
async def release_lease(service: Service, request: web.Request, path: LeasePath) -> None:
    """Give back the rows that a lease still holds. Does nothing to a lease that has ended."""
    async with joined(service, path.run) as external:
        await external.release(path.token, owner=_owner(service, request))


@external_operation(
    "GET", "/v1/runs/{run}/weights", summary="The published version, or none that is newer", seconds=WAITING_SECONDS
)
async def get_published(service: Service, path: RunPath, query: WeightsQuery) -> WeightsView:
    """The published version and its tensors, when it is newer than `after`; waits up to `wait` seconds for it."""
    async with joined(service, path.run) as external:
        with service.held() as room:
            published = await external.weights(query.after, query.wait if room else 0.0)
        state, _, _ = await external.index.state()
        return await _weights(external, published, state or "created")


async def _weights(external: External, published: Published | None, state: str) -> WeightsView:
    view = WeightsView(version=None, state=state, bytes=0, tensors=[], local=None)  # type: ignore[arg-type]
    if published is None:
        return view
    path = (await external.place()).shared / f"weights-{published.slot}"
    view.version, view.bytes = published.version, published.nbytes
    view.tensors = [TensorView(name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset) for t in published.tensors]
    view.local = LocalWeights(node=platform.node(), path=str(path), buckets=list(published.buckets))
    return view


@external_operation(
    "GET",
    "/v1/runs/{run}/weights/{version:[0-9]+}",
    summary="One version's weights, as a safetensors file",
    produces=BINARY,
    sends={"ETag": "The sha256 of the file."},
    seconds=0,
)
async def get_weights(service: Service, request: web.Request, path: WeightsPath) -> web.StreamResponse:
    """All tensors of one of the two newest published versions, verified against the trainer's checksums. Later versions do
    not change them while they are sent. The ETag is the file's sha256."""
    session = await service.external_sessions.run(path.run)
    with refusals():
        held = await session.weights(path.version)
    response = web.StreamResponse(headers={"ETag": f'"{held.digest}"'})
    response.content_type, response.content_length = BINARY, held.nbytes
    await response.prepare(request)
    for at in range(0, held.nbytes, PIECE):
        async with asyncio.timeout(WRITE_SECONDS):  # a reader that stops reading does not keep the file open
            await response.write(await asyncio.to_thread(os.pread, held.file.fileno(), PIECE, at))
    await response.write_eof()
    return response


@external_operation(
    "PUT", "/v1/runs/{run}/weights/{version:[0-9]+}", summary="The version is published", consumes=BINARY, seconds=0
)
async def publish_weights(
    service: Service, request: web.Request, path: WeightsPath, query: PublishQuery
) -> WeightsView:
    """Publish the version that an external trainer's last step made, or the one that the run begins with (0), as a
    safetensors file. `covered`: the trainer's own checkpoint covers the steps below; the run need not keep their rows."""
    session = await service.external_sessions.run(path.run)
    external = session.external

    async def check(header: WeightHeader) -> None:
        await external.may_publish(path.version, header.layout)
        check_disk(service.settings.data, header)

    with refusals():
        wanted = await external.may_publish(path.version)
        async with session.publishing:
            weights = await receive_weights(request, service.settings.data, longest_header(wanted), check)
            published = await external.publish(path.version, weights, covered=query.covered)
        state, _, _ = await external.index.state()
        return await _weights(external, published, state)


@external_operation("POST", "/v1/runs/{run}/weights/notify", summary="The worker claims with this version from now on")
async def weight_sync_notify(service: Service, request: web.Request, path: RunPath, body: Notify) -> None:
    """Record the version that a rollout has loaded, and the seconds that this took: `exposed` without generation, `hidden`
    beside it."""
    async with joined(service, path.run) as external:
        await external.notify(
            body.worker, body.version, exposed=body.exposed, hidden=body.hidden, owner=_owner(service, request)
        )


def _owner(service: Service, request: web.Request) -> str:
    """Returns the owner of the leases of this request: its bearer token, which each later call for them must present."""
    return f"bearer:{service.principal(request).id}"


@contextlib.asynccontextmanager
async def joined(service: Service, run: str) -> AsyncIterator[External]:
    """Yields the interface of ``run``, and turns its exceptions into problems. Loads torch in a thread, at the first use."""
    external = (await service.external_sessions.run(run)).external
    with refusals():
        yield external


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns the exceptions of the interface into problems."""
    from orchestration.external.errors import NotBegun, NotExternal, WeightsGone, WeightsTooOld
    from pipeline.columns import ColumnError
    from pipeline.warehouse.dock import NoRoom
    from pipeline.warehouse.wire.protocol import WarehouseUnreachable
    from stages.external_checks import Misfit

    conflicts: tuple[tuple[Any, str, str, str], ...] = (  # exception, kind, field, fix
        ((WeightsTooOld, BoundBroken), "weights-too-old", "version", "load the newest version: GET …/weights"),
        (WeightsGone, "weights-gone", "path.version", "get the newest version from GET …/weights"),
        (LeaseLost, "lease-lost", "token", "discard the columns of these rows, and claim again"),
        (NotExternal, "not-external", "stage", ""),
        (NotBegun, "not-begun", "path.run", "wait until it is running"),
        (StaleHandle, "released", "rows", "claim again"),
        (IndexRefused, "refused", "", "follow the detail"),
    )
    try:
        yield
    except Misfit as error:
        own = error.column in ("version", "rows", "park", "step", "columns")
        field = error.column if own else "body" if error.column == "weights" else f"columns.{error.column}"
        raise HTTPProblem(422, str(error), kind="misfit", field=field, fix=error.fix) from None
    except ColumnError as error:
        named = re.match(r"column '(\w+)'", str(error))
        field = f"columns.{named[1]}" if named else "columns"
        raise HTTPProblem(422, str(error), kind="misfit", field=field, fix=_fix_of(error)) from None
    except PromptError as error:
        raise HTTPProblem(422, str(error), kind="prompt", field="prompts", fix=_fix_of(error)) from None
    except (ExternalPromptsFull, NoRoom, WarehouseUnreachable) as error:
        raise HTTPProblem(503, str(error), kind="no-room", fix="try again", headers={"Retry-After": "5"}) from None
    except tuple(kinds for kinds, *_ in conflicts[1:]) + conflicts[0][0] as error:
        kind, field, fix = next(found for kinds, *found in conflicts if isinstance(error, kinds))
        raise HTTPProblem(409, str(error), kind=kind, field=field or None, fix=fix or _fix_of(error)) from None


def _fix_of(error: Exception) -> str:
    """Returns what follows the last semicolon of the message."""
    return str(error).rpartition("; ")[2]
