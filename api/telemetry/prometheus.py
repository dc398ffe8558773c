"""What Prometheus reads: the runs' events summed up, and what the server itself does.

    events of each active run ──▶ RunSums (a listener of its feed, from the run's first event) ──┐
    requests, readers of streams, delays ──▶ counters ───────────────────────────────────────────┼──▶ text, when asked
    the registry ──▶ runs by state ──────────────────────────────────────────────────────────────┘

Nobody follows a run before the first scrape, and nobody goes on when scrapes have stopped. Labels are bounded: runs are
those that are active, or ended a few minutes ago, stages and workers those of their recipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.telemetry.fanout import Batch, Ending, Feeds
from orchestration.service.registry import ENDED, Registry, RunRecord
from pipeline.events import Event

log = structlog.get_logger()

STATES = ("created", "starting", "running", "paused", "stopping", *ENDED)
SHARES = ("busy", "waiting_input", "waiting_room", "other")
TOKENS = ("generated", "trained", "filtered")
KEPT_SECONDS = 300.0  # after a run's end: several scrapes see its last numbers
UNASKED_SECONDS = 300.0  # without a scrape, after which runs are followed no more
CATCH_UP_SECONDS = 5.0  # that a scrape waits for the past of runs that are new to it
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
DELAYS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class RunSums:
    """One run's events, summed up; a listener of its feed. A worker that is started again counts on where its predecessor
    ended, so that no counter falls."""

    def __init__(self, record: RunRecord) -> None:
        self.run, self.name, self.state = record.id, record.name, record.state
        self.steps_planned = int(record.recipe["train"]["steps"])
        self.bound = int(record.recipe["pipeline"]["staleness"])
        self.ended: float | None = None  # when, on the monotonic clock
        self.lost = False  # the feed has dropped it
        self.step: Mapping[str, Any] = {}
        self.stages: dict[tuple[str, str], Mapping[str, Any]] = {}  # by stage and worker
        self._before: dict[tuple[str, str], dict[str, float]] = {}  # what earlier lives of a worker came to
        self.sync = {"publish": 0.0, "exposed": 0.0, "hidden": 0.0}
        self.sync_bytes = self.restarts = 0

    async def catch_up(self, batch: Batch) -> None:
        self.deliver(batch)
        await asyncio.sleep(0)  # others' requests come between two pages of a long past

    def deliver(self, batch: Batch) -> None:
        for event in batch.events:
            self.apply(event)

    def heartbeat(self, event_id: str) -> None:
        pass

    def end(self, ending: Ending) -> None:
        self.state, self.ended = ending.state, time.monotonic()

    def drop(self, why: str, reason: str) -> None:
        self.lost = True

    def apply(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case "step":
                self.step = data
            case "stage":
                key = (data["stage"], data["worker"])
                last = self.stages.get(key)
                if last is not None and data["wall"] < last["wall"]:  # its process began anew
                    self._before[key] = {name: self.total(key, name) for name in (*SHARES, "rows", "tokens")}
                self.stages[key] = data
            case "sync":
                for part in self.sync:
                    self.sync[part] += data[f"{part}_seconds"]
                if data["publish_seconds"]:  # otherwise it is an engine's load of the same bytes
                    self.sync_bytes += data["bytes"]
            case "worker":
                self.restarts += data["change"] == "restarted"
            case "state":
                self.state = data["state"]

    def total(self, key: tuple[str, str], name: str) -> float:
        """A worker's count over all of its lives."""
        return self._before.get(key, {}).get(name, 0.0) + self.stages[key][name]


class ServerMetrics:
    """What the server counts of itself, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "asyncdock_http_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self.durations = Histogram(
            "asyncdock_http_request_duration_seconds",
            "From a request to the end of its answer; streams are left out.",
            ("method", "route"),
            buckets=DURATIONS,
            registry=self.registry,
        )
        self.readers = Gauge("asyncdock_stream_readers", "Readers of event streams now.", registry=self.registry)
        self.dropped = Counter(
            "asyncdock_stream_readers_dropped",
            "Readers that were let go, and why.",
            ("reason",),
            registry=self.registry,
        )
        self.delay = Histogram(
            "asyncdock_event_delay_seconds",
            "From when a worker tells an event to when it is on its way to every reader.",
            buckets=DELAYS,
            registry=self.registry,
        )
        for reason in ("slow", "index", "deleted", "closing", "failed", "token"):
            self.dropped.labels(reason)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[str], None]]:
        """While a reader is connected. Call what it gives with why the reader was dropped ("": it was not)."""
        with self.readers.track_inprogress():
            yield lambda why: self.dropped.labels(why).inc() if why else None

    @web.middleware
    async def count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The middleware that counts; outermost, so that refusals count too."""
        began = time.perf_counter()
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "none"  # no label from what somebody may invent
            method = request.method if request.method in ("GET", "HEAD", "POST", "PUT", "DELETE") else "other"
            self.requests.labels(method, route, str(status)).inc()
            if not route.endswith("/stream"):
                self.durations.labels(method, route).observe(time.perf_counter() - began)


class Exposition(Collector):
    """The text of ``GET /metrics``. Follows every active run while it is asked."""

    def __init__(self, registry: Registry, feeds: Feeds, server: ServerMetrics) -> None:
        self._runs, self._feeds, self._server = registry, feeds, server
        self._own = CollectorRegistry()
        self._own.register(self)
        self._counts: dict[str, int] = {}
        self._sums: dict[str, RunSums] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._asked = time.monotonic()

    async def text(self) -> bytes:
        self._asked = time.monotonic()
        active = [held.record for held in await self._runs.active()]
        self._counts = await self._runs.counts()
        for record in active:
            self._counts[record.state] = self._counts.get(record.state, 0) + 1
        joined = [self._follow(record) for record in active if record.id not in self._following]
        if joined:
            await asyncio.wait([asyncio.ensure_future(event.wait()) for event in joined], timeout=CATCH_UP_SECONDS)
        for record in active:
            if record.id in self._sums:
                self._sums[record.id].state = record.state  # the registry knows when nobody runs it
        return generate_latest(self._own) + generate_latest(self._server.registry)

    async def close(self) -> None:
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)

    def _follow(self, record: RunRecord) -> asyncio.Event:
        """Follow a run; the event is set when its past is summed up."""
        caught_up = asyncio.Event()
        self._following[record.id] = asyncio.create_task(self._sum(record, caught_up))
        return caught_up

    async def _sum(self, record: RunRecord, caught_up: asyncio.Event) -> None:
        sums = RunSums(record)
        try:
            async with self._feeds.listening(record, sums) as feed:
                await feed.join(sums)
                self._sums[record.id] = sums
                caught_up.set()
                while not self._done(sums):  # noqa: ASYNC110
                    await asyncio.sleep(10.0)  # what ends it is that time passes
        except (ConnectionError, LookupError) as gone:
            log.warning("a run is not followed for /metrics", run=record.id, reason=str(gone))
        finally:
            caught_up.set()
            self._sums.pop(record.id, None)
            self._following.pop(record.id, None)  # the next scrape follows it again if it is active

    def _done(self, sums: RunSums) -> bool:
        now = time.monotonic()
        over = sums.ended is not None and now - sums.ended > KEPT_SECONDS
        return over or sums.lost or now - self._asked > UNASKED_SECONDS

    # ── what prometheus_client asks for ──

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        runs = list(self._sums.values())
        states = GaugeMetricFamily("asyncdock_runs", "Runs by state.", labels=["state"])
        for state in STATES:
            states.add_metric([state], self._counts.get(state, 0))
        yield states
        info = GaugeMetricFamily("asyncdock_run_info", "1 for each run.", labels=["run", "name", "state"])
        for sums in runs:
            info.add_metric([sums.run, sums.name, sums.state], 1)
        yield info
        yield from _of_runs(runs)
        yield from _of_stages(runs)


def _of_runs(runs: list[RunSums]) -> Iterator[Metric]:
    planned = GaugeMetricFamily("asyncdock_run_steps_planned", "Optimizer steps of the recipe.", labels=["run"])
    steps = CounterMetricFamily("asyncdock_run_steps", "Optimizer steps made.", labels=["run"])
    restarts = CounterMetricFamily("asyncdock_run_restarts", "Times that something was started again.", labels=["run"])
    tokens = CounterMetricFamily("asyncdock_run_tokens", "Tokens by what became of them.", labels=["run", "what"])
    staleness = GaugeMetricFamily(
        "asyncdock_run_staleness_versions",
        "Of the newest step's samples, in policy versions; and the bound.",
        labels=["run", "stat"],
    )
    sync = CounterMetricFamily(
        "asyncdock_sync_seconds",
        "Of taking new weights: publish by the trainer; at the engines what generation waited for (exposed), and not.",
        labels=["run", "part"],
    )
    sync_bytes = CounterMetricFamily("asyncdock_sync_bytes", "Bytes of weights that were published.", labels=["run"])
    newest = {
        "reward_mean": GaugeMetricFamily(
            "asyncdock_run_reward_mean", "Mean reward of the newest step.", labels=["run"]
        ),
        "loss": GaugeMetricFamily("asyncdock_run_loss", "Loss of the newest step.", labels=["run"]),
        "kl_behaviour": GaugeMetricFamily(
            "asyncdock_run_kl", "KL divergence to the behaviour policy in the newest step (k3).", labels=["run"]
        ),
    }
    for sums in runs:
        run, step = sums.run, sums.step
        planned.add_metric([run], sums.steps_planned)
        steps.add_metric([run], step.get("version", 0))
        restarts.add_metric([run], sums.restarts)
        for what in TOKENS:
            tokens.add_metric([run, what], step.get(f"tokens_{what}", 0))
        for stat in ("mean", "p95", "max"):
            if step:
                staleness.add_metric([run, stat], step[f"staleness_{stat}"])
        staleness.add_metric([run, "bound"], sums.bound)
        for part, seconds in sums.sync.items():
            sync.add_metric([run, part], seconds)
        sync_bytes.add_metric([run], sums.sync_bytes)
        for name, family in newest.items():
            if step.get(name) is not None:
                family.add_metric([run], step[name])
    yield from (planned, steps, restarts, tokens, staleness, sync, sync_bytes, *newest.values())


def _of_stages(runs: list[RunSums]) -> Iterator[Metric]:
    of_worker = ["run", "stage", "worker"]
    seconds = CounterMetricFamily(
        "asyncdock_stage_seconds", "Where a worker's time went; they add up to all of it.", labels=[*of_worker, "state"]
    )
    rows = CounterMetricFamily("asyncdock_stage_rows", "Samples done by a worker.", labels=of_worker)
    tokens = CounterMetricFamily("asyncdock_stage_tokens", "Tokens of these samples.", labels=of_worker)
    held = GaugeMetricFamily("asyncdock_stage_in_flight_rows", "Samples that a worker has in hand.", labels=of_worker)
    depth = GaugeMetricFamily(
        "asyncdock_stage_queue_depth", "What is ready for a stage and nobody has.", labels=["run", "stage"]
    )
    for sums in runs:
        depths: dict[str, float] = {}
        for (stage, worker), data in sums.stages.items():
            labels = [sums.run, stage, worker]
            for state in SHARES:
                seconds.add_metric([*labels, state], sums.total((stage, worker), state))
            rows.add_metric(labels, sums.total((stage, worker), "rows"))
            tokens.add_metric(labels, sums.total((stage, worker), "tokens"))
            held.add_metric(labels, data["in_flight"])
            depths[stage] = data["queue_depth"]
        for stage, waiting in depths.items():
            depth.add_metric([sums.run, stage], waiting)
    yield from (seconds, rows, tokens, held, depth)
