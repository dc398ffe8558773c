"""A service that speaks the endpoints which a client needs, and fails as it is configured to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiohttp import web

RUN = "scripted-20260101-000000-abcd"


def run_view(run: str = RUN, **changes: Any) -> dict[str, Any]:
    """A run as ``GET /v1/runs/{run}`` returns it."""
    view: dict[str, Any] = {
        "id": run,
        "name": "scripted",
        "state": "running",
        "reason": "",
        "position": None,
        "owner": "ada",
        "created": 1_700_000_000.0,
        "started": 1_700_000_001.0,
        "former_seconds": 0.0,
        "ended": None,
        "agent": "here-1",
        "attempts": 1,
        "folder": "/data/runs/" + run,
        "steps": 8,
        "steps_done": 3,
        "reward": 0.5,
        "devices": 2,
        "recipe": {"name": "scripted", "pipeline": {"staleness": 2}, "train": {"steps": 8}},
    }
    return view | changes


def problem(status: int, detail: str, **more: Any) -> web.Response:
    problem = {
        "type": "about:blank",
        "title": "Refused",
        "status": status,
        "detail": detail,
        **more,
    }
    return web.json_response(problem, status=status, content_type="application/problem+json")


@dataclass
class Event:
    """An event as the stream returns it."""

    id: str
    kind: str
    data: dict[str, Any]

    def encoded(self) -> bytes:
        return f"id: {self.id}\nevent: {self.kind}\ndata: {json.dumps(self.data)}\n\n".encode()


@dataclass
class Stream:
    """One connection of the event stream: how many ``events`` are sent before it ends, what stands
    ``before`` them, how many earlier ones are sent ``again``, how many bytes of the next one follow
    (``half``), and what is sent at the ``end``."""

    events: int | None = None  # None: to the end of the run
    before: bytes = b""
    again: int = 0
    half: int = 0
    end: bytes = b""


Fault = Callable[[web.Request], web.StreamResponse]


def lost(request: web.Request) -> web.StreamResponse:
    """The connection breaks before the answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def busy(status: int = 503, after: str | None = None) -> Fault:
    def answer(request: web.Request) -> web.StreamResponse:
        answered = problem(status, "busy")
        if after is not None:
            answered.headers["Retry-After"] = after
        return answered

    return answer


@dataclass
class Service:
    """``async with Service() as service``.

    Each request first meets the next of ``faults`` (None: goes well). A fault under ``late`` comes
    after the request has had its effect: the answer is lost. Streams go by ``streams``, then well.
    """

    script: Sequence[Event] = ()
    runs: list[dict[str, Any]] = field(default_factory=lambda: [run_view()])
    faults: deque[Fault | None] = field(default_factory=deque)
    late: deque[Fault | None] = field(default_factory=deque)
    streams: deque[Stream] = field(default_factory=deque)
    token: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    ended: str = "finished"
    asked: int = 0  # checkpoints
    rollouts: list[int] = field(default_factory=lambda: [1])
    requests: list[web.Request] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    streaming: asyncio.Event = field(default_factory=asyncio.Event)  # a stream was opened
    # a reader went away from a stream that was held
    left: asyncio.Event = field(default_factory=asyncio.Event)
    hold: asyncio.Event | None = None  # a stream that goes well waits for it before it ends

    async def __aenter__(self) -> Service:
        app = web.Application(middlewares=[self._middleware])
        app.add_routes(
            [
                web.post("/v1/runs", self._submit),
                web.get("/v1/runs", self._list),
                web.get("/v1/runs/{run}", self._one),
                web.delete("/v1/runs/{run}", self._delete),
                web.get("/v1/runs/{run}/metrics/stream", self._stream),
                web.get("/v1/runs/{run}/samples", self._samples),
                web.get("/v1/runs/{run}/stages", self._stages),
                web.get("/v1/runs/{run}/logs", self._logs),
                web.get("/v1/recipes", self._recipes),
                web.post("/v1/runs/{run}/{action:pause|resume|stop|checkpoint}", self._move),
                web.post("/v1/runs/{run}/scale", self._scale),
                web.get("/v1/runs/{run}/checkpoints", self._checkpoints),
            ]
        )
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        self.url: str = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(request)
        if (fault := self.faults.popleft() if self.faults else None) is not None:
            return fault(request)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            sent = "Authorization" in request.headers
            return problem(401, "The token is not valid." if sent else "A token is needed.")
        answer: web.StreamResponse = await handler(request)
        late = self.late.popleft() if self.late else None
        return late(request) if late is not None else answer

    def _run(self, request: web.Request) -> dict[str, Any]:
        for run in self.runs:
            if run["id"] == request.match_info["run"]:
                return run
        problem = {
            "type": "urn:asyncdock:unknown-run",
            "title": "Not Found",
            "detail": "There is no such run.",
        }
        problem |= {"field": "path.run", "fix": "see GET /v1/runs"}
        raise web.HTTPNotFound(text=json.dumps(problem), content_type="application/problem+json")

    async def _submit(self, request: web.Request) -> web.Response:
        key = request.headers["Idempotency-Key"]
        body = await request.json()
        self.bodies.append(body)
        is_new = key not in self.keys
        if is_new:
            self.keys[key] = run_view(
                f"scripted-{len(self.keys)}", state="created", position=len(self.keys) + 1
            )
            self.runs.insert(0, self.keys[key])
        return web.json_response(self.keys[key], status=201 if is_new else 200)

    async def _list(self, request: web.Request) -> web.Response:
        """A page looks at ``limit`` runs: with a filter it may hold fewer, or none."""
        query = request.query
        begin = int(query.get("after", 0))
        limit = int(query.get("limit", 50))
        end = begin + limit
        state = query.get("state", "")
        page = [run for run in self.runs[begin:end] if state in ("", run["state"])]
        return web.json_response({"runs": page, "next": str(end) if len(self.runs) > end else ""})

    async def _one(self, request: web.Request) -> web.Response:
        return web.json_response(self._run(request))

    async def _move(self, request: web.Request) -> web.Response:
        run = self._run(request)
        if request.can_read_body:
            self.bodies.append(await request.json())
        if run["state"] in ("finished", "failed", "stopped"):
            return problem(409, f"The run is {run['state']}.", fix="start another one")
        states = {
            "pause": "paused",
            "resume": "running",
            "stop": "stopping",
            "checkpoint": run["state"],
        }
        run["state"] = states[request.match_info["action"]]
        self.asked += request.match_info["action"] == "checkpoint"
        return web.json_response(run, status=202)

    async def _scale(self, request: web.Request) -> web.Response:
        self.rollouts.append((await request.json())["rollout"])
        scaled = self._run(request) | {"rollouts_before": self.rollouts[-2]}
        return web.json_response(scaled, status=202)

    async def _checkpoints(self, request: web.Request) -> web.Response:
        """One for each step that is done, and each that was asked for."""
        run = self._run(request)
        versions = range(1, run["steps_done"] + self.asked + 1)
        saved = [
            {
                "version": n,
                "path": f"{run['folder']}/checkpoints/step-{n:08d}",
                "time": n,
                "bytes": 1,
            }
            for n in versions
        ]
        return web.json_response({"checkpoints": saved})

    async def _delete(self, request: web.Request) -> web.Response:
        self.runs.remove(self._run(request))
        return web.Response(status=204)

    async def _stages(self, request: web.Request) -> web.Response:
        view = {
            "stages": [],
            "ledger": {},
            "dropped": {"equal rewards": 3},
            "dropped_tokens": {"equal rewards": 1200},
        }
        view |= {
            "warehouses": [],
            "published": 0,
            "trained": 0,
            "flow": {},
            "epochs": {},
            "alarms": [],
        }
        return web.json_response({**view, "gate": {"admitted": 0, "allowed": 0, "open": 0}})

    async def _samples(self, request: web.Request) -> web.Response:
        begin = int(request.query.get("after", 0))
        limit = int(request.query.get("limit", 50))
        more = len(self.samples) > begin + limit
        page = self.samples[begin : begin + limit]
        return web.json_response({"samples": page, "next": str(begin + limit) if more else ""})

    async def _logs(self, request: web.Request) -> web.Response:
        self._run(request)
        return web.Response(text="one\ntwo\n")

    async def _recipes(self, request: web.Request) -> web.Response:
        return web.json_response({"recipes": [{"name": "mock", "description": "Mock engines"}]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self._run(request)
        last = request.headers.get("Last-Event-ID", "0")
        begin = next((at + 1 for at, event in enumerate(self.script) if event.id == last), 0)
        plan = self.streams.popleft() if self.streams else Stream()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.streaming.set()
        try:
            return await self._play(plan, begin, request, response)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise

    async def _play(
        self, plan: Stream, begin: int, request: web.Request, response: web.StreamResponse
    ) -> web.StreamResponse:
        run = self._run(request)
        await response.write(b"retry: 2000\n\n" + plan.before)
        end = len(self.script) if plan.events is None else begin + plan.events
        for event in self.script[max(0, begin - plan.again) : end]:
            await response.write(event.encoded())
        if plan.half and end < len(self.script):
            await response.write(self.script[end].encoded()[: plan.half])
        elif plan.end:  # not within half an event
            await response.write(plan.end)
        if plan.events is None:
            if self.hold is not None:
                await self.hold.wait()
            run["state"] = self.ended
            await response.write(
                f'event: end\ndata: {{"state":"{self.ended}","reason":""}}\n\n'.encode()
            )
            return response
        return lost(request)


@contextlib.contextmanager
def served(service: Service) -> Iterator[Service]:
    """``service`` in a thread of its own, for who asks it without asyncio."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(service.__aenter__(), loop).result(10)
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(service.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
