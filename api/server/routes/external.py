"""The routes of external stages: AsyncFlow's service interface over HTTP (docs/external.md).

    POST prompts ──▶ gate ──▶ … ──▶ POST experience/get ──▶ (their engine) ──▶ POST experience ──▶ …
    GET weights?after=v (waits) ──▶ GET weights/v ──▶ (they load) ──▶ POST weights/notify

Requests and answers with columns are safetensors bodies (api/external/codec.py), all others JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING

from aiohttp import web
from pydantic import ValidationError
from safetensors import SafetensorError

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
from api.external.weight_header import (
    LENGTH_BYTES,
    HeaderUnreadable,
    WeightHeader,
    header_bytes,
    longest_header,
    parse_header,
)
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
    import torch

    from orchestration.external.session import External
    from stages.weights.store import Published

TAG = "external stages"
MOST_BYTES = 128 * 2**20  # of one body of columns
PROMPTS_BYTES = 16 * 2**20
PROMPTS_VALUES = 500_000  # of one body of prompts
WAITING_SECONDS = 90.0  # for requests that may wait 60 seconds
PIECE = 2**20
SILENT_SECONDS = 30.0  # for which a body of weights may stop
SLOWEST = 2**17  # bytes a second of a body of weights, at least
SPARE_DISK = 256 * 2**20  # bytes that uploads of weights leave free on the disk


@operation(
    "POST",
    "/v1/runs/{run}/prompts",
    scope="run",
    summary="The prompts wait for the gate",
    tag=TAG,
    errors=(404, 409),
    seconds=WAITING_SECONDS,
    body_limit=PROMPTS_BYTES,
    body_values=PROMPTS_VALUES,
)
async def put_prompts(service: Service, path: RunPath, body: PutPrompts) -> FedView:
    """Put prompts into a run with `prompts.source = "external"`, in the order in which they will be asked. With `first`, the
    position of the first of them, a repeat changes nothing. Waits up to `wait` seconds while too many wait already."""
    external = (await service.outside.run(path.run)).external
    with refusals(), service.held() as room:
        wait = body.wait if room else 0.0
        put = await external.put_prompts(body.prompts, first=body.first, last=body.last, timeout=wait)
    return FedView(next=put)


@operation(
    "POST",
    "/v1/runs/{run}/experience/get",
    scope="run",
    summary="Rows under a lease, or none that came in time",
    tag=TAG,
    errors=(404, 409),
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
    external, owner = (await service.outside.run(path.run)).external, _owner(service, request)
    from api.external.codec import encode_experience

    with refusals(), service.held() as room:
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
            if experience.token is not None and (request.transport is None or request.transport.is_closing()):
                await external.release(
                    experience.token, owner=owner
                )  # the client has gone without learning of the lease
        else:
            experience = await external.replay(body.replay)
        encoded = await asyncio.to_thread(encode_experience, external.schema, experience)
    return web.Response(body=encoded, content_type=BINARY)


@operation(
    "POST",
    "/v1/runs/{run}/experience",
    scope="run",
    summary="The columns are committed, or parked",
    tag=TAG,
    errors=(404, 409),
    consumes=BINARY,
)
async def put_experience(service: Service, request: web.Request, path: RunPath) -> PutView:
    """Commit columns of rows under a lease, all in one step or none, or `park` responses to be continued by any worker. A
    trainer gives the `step` that it made of its batch, and its `metrics`. The body is a safetensors file: columns as
    tensors, and under `asyncdock` in its metadata JSON with `token`, `rows`, `park`, `step` and `metrics`."""
    external, owner = (await service.outside.run(path.run)).external, _owner(service, request)
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
    with refusals():
        if body.step is not None:
            return PutView(left=0, version=await external.train(body.token, body.step, body.metrics, owner=owner))
        left = await external.put_experience(body.token, body.rows, columns, park=body.park, owner=owner)
        return PutView(left=left, version=None)


@operation(
    "POST",
    "/v1/runs/{run}/leases/{token}/renew",
    scope="run",
    summary="The lease has a new deadline",
    tag=TAG,
    errors=(404, 409),
)
async def renew_lease(service: Service, request: web.Request, path: LeasePath, query: LeaseQuery) -> LeaseView:
    """Hold a lease for another `lease` seconds from now."""
    external = (await service.outside.run(path.run)).external
    with refusals():
        held = await external.renew(path.token, query.lease, owner=_owner(service, request))
        return LeaseView(token=path.token, lease=held)


@operation(
    "POST",
    "/v1/runs/{run}/leases/{token}/release",
    scope="run",
    summary="The rows are ready for others",
    tag=TAG,
    errors=(404, 409),
)
async def release_lease(service: Service, request: web.Request, path: LeasePath) -> None:
    """Give back the rows that a lease still holds. Does nothing to a lease that has ended."""
    external = (await service.outside.run(path.run)).external
    with refusals():
        await external.release(path.token, owner=_owner(service, request))


@operation(
    "GET",
    "/v1/runs/{run}/weights",
    scope="run",
    summary="The published version, or none that is newer",
    tag=TAG,
    errors=(404, 409),
    seconds=WAITING_SECONDS,
)
async def get_published(service: Service, path: RunPath, query: WeightsQuery) -> WeightsView:
    """The published version and its tensors, when it is newer than `after`; waits up to `wait` seconds for it."""
    external = (await service.outside.run(path.run)).external
    with refusals(), service.held() as room:
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


@operation(
    "GET",
    "/v1/runs/{run}/weights/{version:[0-9]+}",
    scope="run",
    summary="One version's weights, as a safetensors file",
    tag=TAG,
    errors=(404, 409),
    produces=BINARY,
    sends={"ETag": "The sha256 of the file."},
    seconds=0,
)
async def get_weights(service: Service, request: web.Request, path: WeightsPath) -> web.StreamResponse:
    """All tensors of one of the two newest published versions, verified against the trainer's checksums. Later versions do
    not change them while they are sent. The ETag is the file's sha256."""
    outside = await service.outside.run(path.run)
    with refusals():
        held = await outside.weights(path.version)
    response = web.StreamResponse(headers={"ETag": f'"{held.digest}"'})
    response.content_type, response.content_length = BINARY, held.nbytes
    await response.prepare(request)
    for at in range(0, held.nbytes, PIECE):
        async with asyncio.timeout(SILENT_SECONDS):  # a reader that stops reading does not keep the file open
            await response.write(await asyncio.to_thread(os.pread, held.file.fileno(), PIECE, at))
    await response.write_eof()
    return response


@operation(
    "PUT",
    "/v1/runs/{run}/weights/{version:[0-9]+}",
    scope="run",
    summary="The version is published",
    tag=TAG,
    errors=(404, 409),
    consumes=BINARY,
    seconds=0,
)
async def publish_weights(
    service: Service, request: web.Request, path: WeightsPath, query: PublishQuery
) -> WeightsView:
    """Publish the version that an external trainer's last step made, or the one that the run begins with (0), as a
    safetensors file. `covered`: the trainer's own checkpoint covers the steps below; the run need not keep their rows."""
    outside = await service.outside.run(path.run)
    external = outside.external

    async def expect(header: WeightHeader) -> None:
        await external.may_publish(path.version, header.layout)
        if header.nbytes > (free := shutil.disk_usage(service.settings.data).free - SPARE_DISK):
            detail = f"The file has {header.nbytes} bytes, and the server's disk has room for {max(0, free)}."
            raise HTTPProblem(
                503, detail, kind="no-room", fix="ask the operator for room", headers={"Retry-After": "60"}
            )

    with refusals():
        wanted = await external.may_publish(path.version)
        async with outside.publishing:
            published = await external.publish(
                path.version, await _spooled(service, request, longest_header(wanted), expect), covered=query.covered
            )
        state, _, _ = await external.index.state()
        return await _weights(external, published, state)


Expect = Callable[[WeightHeader], Awaitable[None]]


async def _spooled(
    service: Service, request: web.Request, longest: int, expect: Expect
) -> Iterable[tuple[str, torch.Tensor]]:
    """Returns the tensors of the body. They are mapped from a file that is removed with them."""
    from safetensors.torch import load_file

    with tempfile.NamedTemporaryFile(dir=service.settings.data, suffix=".safetensors") as file:
        await _receive(request, file, longest, expect)
        try:
            return (await asyncio.to_thread(load_file, file.name)).items()
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise _unreadable(type(error).__name__) from None


async def _receive(request: web.Request, file: IO[bytes], longest: int, expect: Expect) -> None:
    """Writes the body, a safetensors file, to ``file``. ``expect`` may refuse its header, of at most ``longest`` bytes,
    before the payload is read. Raises an HTTPProblem for another number of bytes than the header declares, and below SLOWEST
    bytes a second."""
    if request.content_type != BINARY:
        fix = f"send the header 'Content-Type: {BINARY}'"
        raise HTTPProblem(415, "The body is of another media type.", kind="media-type", field="body", fix=fix)
    received, parts, beginning, header = 0, request.content.iter_chunked(PIECE), bytearray(), None
    began = time.monotonic()
    try:
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                part = await anext(parts, b"")
            if not part:
                break
            received += len(part)
            if time.monotonic() - began > SILENT_SECONDS + received / SLOWEST:
                raise TimeoutError
            if header is None:
                beginning += part
                header = await asyncio.to_thread(_weight_header, beginning, longest)
                if header is None:
                    continue
                await expect(header)
                part = bytes(beginning)
            if received > header.nbytes or (request.content_length or header.nbytes) != header.nbytes:
                raise _unreadable(f"its header declares {header.nbytes} bytes in all, and it has another number")
            await asyncio.to_thread(file.write, part)
    except TimeoutError:
        detail = f"The body stopped for {SILENT_SECONDS:.0f} s, or came at less than {SLOWEST} bytes a second."
        raise HTTPProblem(
            408, detail, kind="slow-body", fix="send it faster", headers={"Connection": "close"}
        ) from None
    except (web.RequestPayloadError, ConnectionError):
        raise HTTPProblem(
            400, "The body was cut off.", kind="broken-body", field="body", fix="send all of it"
        ) from None
    except HeaderUnreadable as error:
        raise _unreadable(str(error)) from None
    if header is None or received != header.nbytes:
        raise _unreadable("it is shorter than its header declares")
    file.flush()


def _weight_header(beginning: bytearray, longest: int) -> WeightHeader | None:
    """Returns None when not all of the header has arrived. Raises HeaderUnreadable."""
    if len(beginning) < LENGTH_BYTES or len(beginning) < header_bytes(beginning, longest):
        return None
    return parse_header(beginning)


def _unreadable(why: str) -> HTTPProblem:
    fix = "send a safetensors file of the model's parameters"
    return HTTPProblem(400, f"The body cannot be read: {why}.", kind="body", field="body", fix=fix)


@operation(
    "POST",
    "/v1/runs/{run}/weights/notify",
    scope="run",
    summary="The worker claims with this version from now on",
    tag=TAG,
    errors=(404, 409),
)
async def weight_sync_notify(service: Service, request: web.Request, path: RunPath, body: Notify) -> None:
    """Record the version that a rollout has loaded, and the seconds that this took: `exposed` without generation, `hidden`
    beside it."""
    external = (await service.outside.run(path.run)).external
    with refusals():
        await external.notify(
            body.worker, body.version, exposed=body.exposed, hidden=body.hidden, owner=_owner(service, request)
        )


def _owner(service: Service, request: web.Request) -> str:
    """Returns the owner of the leases of this request: its bearer token, which each later call for them must present."""
    return f"bearer:{service.principal(request).id}"


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns the exceptions of the interface into problems."""
    from orchestration.external.errors import NotBegun, NotExternal, WeightsGone, WeightsTooOld
    from pipeline.columns import ColumnError
    from pipeline.warehouse.dock import NoRoom
    from pipeline.warehouse.wire.protocol import WarehouseUnreachable
    from stages.external_checks import Misfit

    try:
        yield
    except Misfit as error:
        own = error.column in ("version", "rows", "park", "step", "columns")
        field = error.column if own else "body" if error.column == "weights" else f"columns.{error.column}"
        raise HTTPProblem(422, str(error), kind="misfit", field=field, fix=error.fix) from None
    except ColumnError as error:
        named = re.match(r"column '(\w+)'", str(error))
        fix = str(error).rpartition("; ")[2]
        field = f"columns.{named[1]}" if named else "columns"
        raise HTTPProblem(422, str(error), kind="misfit", field=field, fix=fix) from None
    except PromptError as error:
        raise HTTPProblem(422, str(error), kind="prompt", field="prompts", fix=str(error).rpartition("; ")[2]) from None
    except (WeightsTooOld, BoundBroken) as error:
        fix = "load the newest version: GET …/weights"
        raise HTTPProblem(409, str(error), kind="weights-too-old", field="version", fix=fix) from None
    except WeightsGone as error:
        fix = "get the newest version from GET …/weights"
        raise HTTPProblem(409, str(error), kind="weights-gone", field="path.version", fix=fix) from None
    except LeaseLost as error:
        fix = "discard the columns of these rows, and claim again"
        raise HTTPProblem(409, str(error), kind="lease-lost", field="token", fix=fix) from None
    except NotExternal as error:
        raise HTTPProblem(
            409, str(error), kind="not-external", field="stage", fix=str(error).rpartition("; ")[2]
        ) from None
    except NotBegun as error:
        raise HTTPProblem(409, str(error), kind="not-begun", field="path.run", fix="wait until it is running") from None
    except StaleHandle as error:
        raise HTTPProblem(409, str(error), kind="released", field="rows", fix="claim again") from None
    except (ExternalPromptsFull, NoRoom, WarehouseUnreachable) as error:
        raise HTTPProblem(503, str(error), kind="no-room", fix="try again", headers={"Retry-After": "5"}) from None
    except IndexRefused as error:
        raise HTTPProblem(409, str(error), kind="refused", fix="follow the detail") from None
