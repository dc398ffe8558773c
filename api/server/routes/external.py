"""Stages for programs outside of the run, over HTTP: AsyncFlow's service interface. docs/external.md says how it is used.

    POST prompts ──▶ gate ──▶ … ──▶ POST experience/get ──▶ (their engine) ──▶ POST experience ──▶ …
    GET weights?after=v (waits) ──▶ GET weights/v ──▶ (they load) ──▶ POST weights/notify

Control is JSON; columns are JSON too, or one safetensors body (``application/octet-stream``), as Content-Type and Accept
say.
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
from typing import IO, TYPE_CHECKING, Any

from aiohttp import web
from pydantic import ValidationError
from safetensors import SafetensorError

from api.external.schemas import (
    Begun,
    ExperienceView,
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

# What handles tensors is imported where it is used: a server without runs that programs outside take part in does without
# torch, which takes seconds to import.
if TYPE_CHECKING:
    import torch

    from orchestration.external.session import Answer, Experience, External
    from pipeline.columns import Packed
    from stages.weights.store import Published

TAG = "external stages"
MOST_BYTES = 128 * 2**20  # of one body of columns
MOST_JSON = 4 * 2**20  # of one that is JSON: parsing it holds up all other requests
PROMPTS_BYTES = 16 * 2**20
JSON_VALUES = 500_000  # of one JSON body; columns with more come as safetensors
WAITING_SECONDS = 90.0  # what a request may take that may wait for 60
PIECE = 2**20
SILENT_SECONDS = 30.0  # for which a body of weights may stop
SLOWEST = 2**17  # bytes a second of a body of weights, at least
SPARE_DISK = 256 * 2**20  # bytes that weights on their way leave free on the disk


@operation(
    "POST",
    "/v1/runs/{run}/prompts",
    scope="run",
    summary="The prompts wait for the gate",
    tag=TAG,
    errors=(404, 409),
    seconds=WAITING_SECONDS,
    body_limit=PROMPTS_BYTES,
    body_values=JSON_VALUES,
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
    seconds=WAITING_SECONDS,
    binary=("answer",),
)
async def get_experience(
    service: Service, request: web.Request, path: RunPath, body: GetExperience
) -> ExperienceView | web.StreamResponse:
    """Lease what is ready for a stage, waiting up to `wait` seconds for some. The lease is held by renewing it; one that
    expires is delivered to somebody else. `over` says that nothing will come any more."""
    external = (await service.outside.run(path.run)).external
    from api.external.codec import to_lists

    with refusals(), service.held() as room:
        if body.replay is None:
            answer = await external.get_experience(
                body.stage,
                body.worker,
                body.count,
                columns=body.columns,
                version=body.version,
                wait=body.wait if room else 0.0,
                lease=body.lease,
                owner=_owner(service, request),
            )
        else:
            answer = await external.replayed(body.replay)
        if answer.experience is not None and _gone(request):  # nobody would hear of this lease
            await external.release(answer.experience.claim.token, owner=_owner(service, request))
        view = await _view(external, answer, body)
        experience = answer.experience
        if BINARY not in request.headers.get("Accept", ""):
            if experience is not None:
                schema = external.schema
                view.columns = await asyncio.to_thread(to_lists, schema, experience.columns)
                if view.begun is not None:
                    view.begun.columns = await asyncio.to_thread(to_lists, schema, experience.begun[1])
            return view
        return web.Response(body=await asyncio.to_thread(_body, external, view, experience), content_type=BINARY)


async def _view(external: External, answer: Answer, asked: GetExperience) -> ExperienceView:
    """All of an answer but its columns."""
    from api.external.codec import rows_of

    experience = answer.experience
    view = ExperienceView(
        token=None,
        stage=asked.stage,
        lease=asked.lease or external.recipe.pipeline.lease_seconds,
        state=answer.state,  # type: ignore[arg-type]
        reason=answer.reason,
        over=answer.over,
        published=answer.published,
        trained=answer.trained,
    )
    if experience is None:
        return view
    claim = experience.claim
    view.token = claim.token
    if asked.stage == "rollout":
        view.sampling = (await external.terms()).sampling
    view.rows = rows_of(experience)
    if positions := experience.begun[0]:
        view.begun = Begun(rows=[int(claim.row[at]) for at in positions])
    return view


def _body(external: External, view: ExperienceView, experience: Experience | None) -> bytes:
    from api.external.codec import to_body

    columns: dict[str, Packed | torch.Tensor] = {}
    if experience is not None:
        for name, packed in experience.columns.items():
            shape = (len(experience.claim), *(external.schema[name].shape or ()))
            columns[name] = packed if packed.offsets is not None else packed.values.reshape(shape)
        columns |= {f"begun.{name}": packed for name, packed in experience.begun[1].items()}
    return to_body(view.model_dump_json(exclude={"columns": True, "begun": {"columns"}}), columns)


@operation(
    "POST",
    "/v1/runs/{run}/experience",
    scope="run",
    summary="What was made of the rows is committed, or parked",
    tag=TAG,
    errors=(404, 409),
    body_limit=MOST_JSON,
    body_values=JSON_VALUES,
    binary=("body",),
)
async def put_experience(service: Service, request: web.Request, path: RunPath, body: PutExperience | None) -> PutView:
    """Commit what was made of rows under a lease, all of it in one step or none, or `park` responses to be continued by
    whoever claims them next. A trainer tells the `step` that it made of its batch, and its `metrics`."""
    external, columns = (await service.outside.run(path.run)).external, dict[str, Any]()
    from api.external.codec import Unreadable, from_body, from_lists

    if body is None:
        raw = await read_body(request, limit=MOST_BYTES, media_type=BINARY)
        try:
            control, columns = await asyncio.to_thread(from_body, raw)
            body = PutExperience.model_validate_json(control, strict=True)
        except Unreadable as error:
            fix = "send a safetensors file; docs/external.md says what is in it"
            raise HTTPProblem(400, f"The body cannot be read: {error}.", kind="body", field="body", fix=fix) from None
        except ValidationError as error:
            raise of_validation(422, error) from None
    owner = _owner(service, request)
    with refusals():
        if body.step is not None:
            version = await external.train(body.token, body.step, body.metrics, owner=owner)
            return PutView(left=0, version=version)
        if body.columns:
            columns |= await asyncio.to_thread(from_lists, external.schema, body.columns)
        left = await external.put_experience(body.token, body.rows, columns, park=body.park, owner=owner)
        return PutView(left=left, version=None)


@operation(
    "POST",
    "/v1/runs/{run}/leases/{token}/renew",
    scope="run",
    summary="The lease is held for longer",
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
    summary="What was left is ready for others",
    tag=TAG,
    errors=(404, 409),
)
async def release_lease(service: Service, request: web.Request, path: LeasePath) -> None:
    """Give back what is left under a lease. Harmless when it has ended."""
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
    """Which weights are published, when they are newer than `after`; waits up to `wait` seconds for them."""
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
    """All tensors of one of the two newest published versions. They were verified against the trainer's checksums, and stay
    as they are however often the trainer publishes meanwhile. The ETag is the file's sha256."""
    outside = await service.outside.run(path.run)
    with refusals():
        held = await outside.weights(path.version)
    response = web.StreamResponse(headers={"ETag": f'"{held.digest}"'})
    response.content_type, response.content_length = BINARY, held.nbytes
    await response.prepare(request)
    for at in range(0, held.nbytes, PIECE):
        async with asyncio.timeout(SILENT_SECONDS):  # a reader that takes nothing holds no file open for ever
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
    """An external trainer publishes the version that its last step made, or the one that the run begins with (0), as a
    safetensors file. `covered`: its own checkpoint covers the steps below; they need not be kept for it any more."""
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
    """The tensors of the body. They lie in a file that goes with them."""
    from safetensors.torch import load_file

    with tempfile.NamedTemporaryFile(dir=service.settings.data, suffix=".safetensors") as file:
        await _receive(request, file, longest, expect)
        try:
            return (await asyncio.to_thread(load_file, file.name)).items()
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise _unreadable(type(error).__name__) from None


async def _receive(request: web.Request, file: IO[bytes], longest: int, expect: Expect) -> None:
    """Write the body, a safetensors file, to ``file``: its header first, of at most ``longest`` bytes, for ``expect`` to
    refuse before the payload is taken, and then as many bytes as the header says, at no less than SLOWEST bytes a second."""
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
    """None when not all of it is there. Raises HeaderUnreadable."""
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
    summary="The worker's claims are made with this version",
    tag=TAG,
    errors=(404, 409),
)
async def weight_sync_notify(service: Service, request: web.Request, path: RunPath, body: Notify) -> None:
    """A rollout says which version it has loaded, and the seconds that it took: `exposed` while it could make no token,
    `hidden` beside generation."""
    external = (await service.outside.run(path.run)).external
    with refusals():
        await external.notify(
            body.worker, body.version, exposed=body.exposed, hidden=body.hidden, owner=_owner(service, request)
        )


def _owner(service: Service, request: web.Request) -> str:
    """The owner of what is claimed by this request: the bearer token, which each further call for the lease must present."""
    return f"bearer:{service.principal(request).id}"


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What the interface refuses, as problems."""
    from orchestration.external.session import NotBegun, NotExternal, WeightsGone, WeightsTooOld
    from pipeline.columns import ColumnError
    from pipeline.warehouse.dock import NoRoom
    from pipeline.warehouse.wire.protocol import WarehouseUnreachable
    from stages.external_checks import Misfit

    try:
        yield
    except Misfit as error:
        field = (
            error.column
            if error.column in ("version", "rows", "park", "step", "columns")
            else "body"
            if error.column == "weights"
            else f"columns.{error.column}"
        )
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
        fix = "ask GET …/weights which is the newest"
        raise HTTPProblem(409, str(error), kind="weights-gone", field="path.version", fix=fix) from None
    except LeaseLost as error:
        fix = "drop what was made of these rows, and claim again"
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
        raise HTTPProblem(409, str(error), kind="refused", fix="do what the detail says") from None
