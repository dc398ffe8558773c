"""Operations on a run's events: the stream, the history, the trace, and the metrics for
Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError, to_json

from api.schemas.events import MESSAGES
from api.schemas.runs import MetricsView, RunPath
from api.server.http.bodies import JSON
from api.server.http.problems import HTTPProblem
from api.server.service.operations import Strict, operation
from api.server.service.service import SERVICE, Service
from api.telemetry.fanout import Ending, EventReader, Fanout, Fanouts
from api.telemetry.history import History, id_at
from api.telemetry.perfetto import REPORT_SECONDS, Trace, trace_json
from api.telemetry.prometheus import Exposition, ServerMetrics
from api.telemetry.series import SERIES, Wanted, names_like, width
from orchestration.history.events_file import METRICS
from orchestration.history.kept import EVERY
from orchestration.history.reduction import TooMany
from orchestration.recipe.problems import suggest
from orchestration.state.registry import RunRecord
from pipeline.data.events import ENDED, Event, Kind, order

if TYPE_CHECKING:
    from orchestration.history.past import Series

EVENT_ID = r"^([0-9]{1,18}(-[0-9]{1,18})?|\$)$"
FINEST_SECONDS = 1e-3  # of a point; events have their times in milliseconds
WAITING_SECONDS = 2 * EVERY  # for which events wait for the file, where a run has few workers
Time = Annotated[float, Field(ge=0, le=1e11, description="Unix seconds.")]


class Telemetry:
    """State that the operations here share: the feeds of the runs that are watched, and the
    metrics."""

    def __init__(self, service: Service) -> None:
        self.server = ServerMetrics()
        self._service = service
        self.fanouts = Fanouts(self._fanout)
        self.exposition = Exposition(service.registry, self.fanouts, self.server)

    def history(self, record: RunRecord, *, detail: bool = False) -> History:
        return History(
            lambda: self._service.index(record.id),
            self._service.folder(record) / METRICS,
            detail=detail,
        )

    async def close(self, _: web.Application) -> None:
        self.fanouts.close()
        await self.exposition.close()

    def _fanout(self, record: RunRecord) -> Fanout:
        async def ending() -> Ending | None:
            now = await self._service.registry.get(record.id)
            return Ending(now.state, now.reason, now.ended or 0.0) if now.state in ENDED else None

        return Fanout(self.history(record), ending, observe_delay=self.server.delay.observe)


TELEMETRY = web.AppKey("telemetry", Telemetry)


def watch(app: web.Application) -> None:
    """Prepare ``app``, which has its service, for the operations here."""
    app[TELEMETRY] = telemetry = Telemetry(app[SERVICE])
    app.middlewares.insert(0, telemetry.server.count)
    app.on_shutdown.append(telemetry.close)


# --------------------------------------------------------------------------------------------------
# The stream


def _listed(given: object) -> object:
    """Return the values of a key that is given several times, or once with commas."""
    return (
        [name for text in given for name in str(text).split(",") if name]
        if isinstance(given, list)
        else given
    )


def _series(name: str) -> str:
    if not SERIES.fullmatch(name):
        kinds = (
            "step, evaluation, ledger, stage, sync, stage/WORKER, sync/WORKER, or a number of one "
            "of them as step.loss"
        )
        raise PydanticCustomError("series", "Input should be one of: {kinds}", {"kinds": kinds})
    return name


Name = Annotated[
    str,
    Field(max_length=200, json_schema_extra={"pattern": f"^({SERIES.pattern})$"}),
    AfterValidator(_series),
]


class StreamQuery(Strict):
    kinds: Annotated[list[Kind], BeforeValidator(_listed)] = Field(
        [],
        description="Only events of these kinds; none: all. The key is repeated, or has them "
        "with commas.",
    )
    last_event_id: str = Field(
        "",
        pattern=f"^$|{EVENT_ID}",
        description="As the header Last-Event-ID, where it cannot be set; $: from now on.",
    )


class StreamHeaders(Strict):
    last_event_id: str = Field(
        "",
        alias="Last-Event-ID",
        pattern=f"^$|{EVENT_ID}",
        description="Go on after this event; none: from the first.",
    )


@operation(
    "GET",
    "/v1/runs/{run}/metrics/stream",
    scope="read",
    summary="A run's events as they happen",
    tag="metrics",
    errors=(404,),
    produces="text/event-stream",
    seconds=0,
    events=MESSAGES,
)
async def stream(
    service: Service,
    path: RunPath,
    query: StreamQuery,
    headers: StreamHeaders,
    request: web.Request,
) -> web.StreamResponse:
    """Server-sent events: `event` is the kind, `data` its payload as JSON, `id` what
    `Last-Event-ID` takes. A comment comes every ten seconds with the id up to which there is
    nothing more. The last message is `end` when the run has ended, or `dropped` when the server
    gives the stream up: connect again then."""
    record = await service.registry.get(path.run)
    telemetry = request.app[TELEMETRY]
    reader = EventReader(request, frozenset(query.kinds) or None)
    with service.held(request) as room, telemetry.server.reading() as dropped:
        if not room:
            raise HTTPProblem(
                503,
                "Too many readers.",
                kind="readers",
                fix="try again",
                headers={"Retry-After": "30"},
            )
        try:
            await reader.open()
        except ConnectionResetError:  # the client has closed the connection
            return reader.response
        try:
            async with telemetry.fanouts.listening(record, reader) as fanout:
                await fanout.join(reader, headers.last_event_id or query.last_event_id or "0")
                dropped(await asyncio.shield(reader.closed))
        except (ConnectionError, LookupError):
            reader.drop("", "the index does not answer; connect again")
        except asyncio.CancelledError:
            if not reader.closed.done():
                reader.drop("token", "the token was revoked, or has expired")
                dropped("token")
            raise
    return reader.response


# --------------------------------------------------------------------------------------------------
# History and trace


class RangeQuery(Strict):
    begin: Time | None = Field(
        None, alias="from", description="Unix seconds; none: the run's beginning."
    )
    end: Time | None = Field(
        None, alias="to", description="Unix seconds; none: now, or the run's end."
    )


class HistoryQuery(RangeQuery):
    every: float | None = Field(
        None,
        ge=0,
        le=1e7,
        description="Seconds that a point stands for; 0 (or less than a millisecond): each event; "
        "none: as suits the range.",
    )
    names: Annotated[list[Name], BeforeValidator(_listed)] = Field(
        [],
        max_length=100,
        description="Series and numbers, as step, stage/rollout-0, step.reward_mean; none: all. "
        "The key is repeated, or has them with commas.",
    )


@operation(
    "GET",
    "/v1/runs/{run}/metrics",
    scope="read",
    summary="A run's past in numbers",
    tag="metrics",
    errors=(404, 422),
)
async def history(
    service: Service, path: RunPath, query: HistoryQuery, request: web.Request
) -> MetricsView:
    record = await service.registry.get(path.run)
    begin, end = _range(record, query)
    every = width(end - begin) if query.every is None else query.every
    every = 0.0 if every < FINEST_SECONDS else every
    selection = Wanted(query.names)
    file = service.folder(record) / METRICS
    # Clocks of workers differ a little from the service's: what is not asked for cuts nothing off.
    first = 0.0 if query.begin is None else begin
    last = math.inf if query.end is None else end
    try:
        past = await asyncio.to_thread(_past, file, first, last, every, selection)
        async for page in _pages(request, record, first, last, past.last):
            for event in page:
                if first <= event.time <= last and past.lacks(event):
                    past.add(event)
        view = MetricsView.model_validate({"from": begin, "to": end, "every": every, "series": {}})
        body = await asyncio.to_thread(_joined, view, past)
    except TooMany as error:
        raise HTTPProblem(
            422,
            f"{error}.",
            kind="too-many-points",
            field="query.every",
            value=every,
            fix=str(error),
        ) from None
    if missing := selection.missing:
        await _refuse_unknown(service, record, missing)
    return web.Response(body=body, content_type=JSON)  # type: ignore[return-value]


def _past(file: Path, begin: float, end: float, every: float, wanted: Wanted) -> Series:
    """Return the part of a run's files between two times. It is read in a thread, which imports
    numpy, too."""
    from orchestration.history.past import past_of

    return past_of(file, begin, end, every, wanted)


def _joined(view: MetricsView, past: Series) -> bytes:
    """Return ``view`` with the columns of ``past`` as JSON, column by column: writing one holds the
    interpreter lock."""
    parts = []
    for name, columns in past.columns():
        pairs = (
            to_json(key) + b":" + to_json(values, inf_nan_mode="null")
            for key, values in columns.items()
        )
        parts.append(to_json(name) + b":{" + b",".join(pairs) + b"}")
    head = view.model_dump_json(by_alias=True).encode()
    return head.removesuffix(b"{}}") + b"{" + b",".join(parts) + b"}}"


async def _refuse_unknown(service: Service, record: RunRecord, names: frozenset[str]) -> None:
    """Raise an HTTPProblem if one of ``names`` belongs to no worker and no step of the run.

    While a run has no workers or steps, every name is allowed.
    """
    index = service.index(record.id)
    totals = (await service.run_statuses.of(index)).totals
    step = totals.step
    newest = (
        {}
        if step is None
        else dict(sorted(step.wire().items(), key=lambda number: number[0] in step.metrics))
    )
    for name in sorted(names):
        allowed = names_like(name, totals.names, newest)
        if allowed and name not in allowed:
            raise HTTPProblem(
                422,
                f"{name} is not known here.",
                kind="unknown-name",
                field="query.names",
                value=name,
                fix=suggest(name, allowed),
            )


class TraceDocument(BaseModel):
    """Chrome's trace event format, as ui.perfetto.dev opens it."""

    displayTimeUnit: str
    traceEvents: list[dict[str, Any]]


@operation(
    "GET",
    "/v1/runs/{run}/trace",
    scope="read",
    summary="What every worker did and when, for Perfetto",
    tag="metrics",
    errors=(404, 422),
    seconds=300,
)
async def trace(
    service: Service, path: RunPath, query: RangeQuery, request: web.Request
) -> TraceDocument:
    record = await service.registry.get(path.run)
    begin, end = _range(record, query)
    pages = (
        request.app[TELEMETRY]
        .history(record, detail=True)
        .pages(id_at(begin), end + REPORT_SECONDS)
    )
    response: Any = web.StreamResponse(
        headers={
            "Content-Type": "application/json",
            "Content-Disposition": f'attachment; filename="{record.id}.trace.json"',
        }
    )
    with contextlib.suppress(ConnectionResetError):  # the client has closed the connection
        await response.prepare(request)
        # as it is made: a long run's trace is large
        async for piece in trace_json(pages, Trace(begin, end)):
            await response.write(piece)
        await response.write_eof()
    return response


def _range(record: RunRecord, query: RangeQuery) -> tuple[float, float]:
    begin = record.created if query.begin is None else query.begin
    end = (
        (record.ended + REPORT_SECONDS if record.ended else time.time())
        if query.end is None
        else query.end
    )
    if query.begin is not None and query.end is not None and end < begin:
        fix = "give a `to` that is not before `from`"
        raise HTTPProblem(
            422,
            "The range ends before it begins.",
            kind="range",
            field="query.to",
            value=end,
            fix=fix,
        )
    return begin, max(begin, end)


def _pages(
    request: web.Request, record: RunRecord, begin: float, end: float, known: str
) -> AsyncIterator[list[Event]]:
    """Return events of the index that the run's file, whose last event is ``known``, may lack: some
    wait a minute to be written."""
    seconds = order(known)[0] / 1000 - WAITING_SECONDS
    return request.app[TELEMETRY].history(record).pages(id_at(max(begin, seconds)), end)


# --------------------------------------------------------------------------------------------------
# Prometheus


@operation(
    "GET", "/metrics", scope="read", summary="For Prometheus", tag="metrics", produces="text/plain"
)
async def metrics(service: Service, request: web.Request) -> web.Response:
    text = await request.app[TELEMETRY].exposition.text() + await service.policies.metrics()
    return web.Response(
        body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )
