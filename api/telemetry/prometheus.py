"""Metrics for Prometheus: the totals of the active runs, and counters of the server itself.

    events of each active run, from its first one ──▶ RunListener: RunTotals ──┐
    requests, readers of streams, delays ──▶ counters ─────────────────────────┼──▶ text of GET /metrics
    the registry ──▶ runs by state ────────────────────────────────────────────┘

Runs are followed from the first scrape on, and no longer when scrapes have stopped. Labels are bounded: runs that are active
or ended a few minutes ago, with the stages and workers of their recipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.telemetry.fanout import Batch, Ending, Fanouts
from api.telemetry.totals import SHARES, RunTotals
from orchestration.service.registry import Registry, RunRecord
from pipeline.events import ENDED

log = structlog.get_logger()

STATES = ("created", "starting", "running", "paused", "stopping", *ENDED)
KEPT_SECONDS = 300.0  # for which an ended run is still exposed, so that several scrapes get its last numbers
UNSCRAPED_SECONDS = 300.0  # without a scrape, after which runs are no longer followed
CATCH_UP_SECONDS = 5.0  # for which a scrape waits for the past events of new runs
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
DELAYS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class RunListener:
    """Adds up the events of one run, as a listener of its fanout."""

    def __init__(self, record: RunRecord) -> None:
        self.run, self.name = record.id, record.name
        self.steps_planned = int(record.recipe["train"]["steps"])
        self.bound = int(record.recipe["pipeline"]["staleness"])
        self.totals = RunTotals()
        self.totals.state = record.state
        self.ended: float | None = None  # when, on the monotonic clock
        self.dropped = False

    async def catch_up(self, batch: Batch) -> None:
        self.deliver(batch)
        await asyncio.sleep(0)  # requests are answered between two pages of a long past

    def deliver(self, batch: Batch) -> None:
        for event in batch.events:
            self.totals.apply(event)

    def heartbeat(self, event_id: str) -> None:
        pass

    def end(self, ending: Ending) -> None:
        self.totals.state, self.ended = ending.state, time.monotonic()

    def drop(self, why: str, reason: str) -> None:
        self.dropped = True


class ServerMetrics:
    """Counters of the server itself, in a registry of their own."""

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
            "Seconds from a worker emitting an event to the server sending it to every reader.",
            buckets=DELAYS,
            registry=self.registry,
        )
        for reason in ("slow", "index", "deleted", "closing", "failed", "token"):
            self.dropped.labels(reason)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[str], None]]:
        """Counts a reader while it is connected. Yields a function to call with why it was dropped ("": it was not)."""
        with self.readers.track_inprogress():
            yield lambda why: self.dropped.labels(why).inc() if why else None

    @web.middleware
    async def count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Middleware that counts requests; the outermost one, so that refusals count too."""
        began = time.perf_counter()
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "none"  # a path could be anything
            method = request.method if request.method in ("GET", "HEAD", "POST", "PUT", "DELETE") else "other"
            self.requests.labels(method, route, str(status)).inc()
            if not route.endswith("/stream"):
                self.durations.labels(method, route).observe(time.perf_counter() - began)


class Exposition(Collector):
    """The text of ``GET /metrics``. Follows the active runs while it is scraped."""

    def __init__(self, registry: Registry, fanouts: Fanouts, server: ServerMetrics) -> None:
        self._registry, self._fanouts, self._server = registry, fanouts, server
        self._own = CollectorRegistry()
        self._own.register(self)
        self._counts: dict[str, int] = {}
        self._runs: dict[str, RunListener] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._scraped = time.monotonic()

    async def text(self) -> bytes:
        self._scraped = time.monotonic()
        active = [held.record for held in await self._registry.active()]
        self._counts = await self._registry.counts()
        for record in active:
            self._counts[record.state] = self._counts.get(record.state, 0) + 1
        joined = [self._follow(record) for record in active if record.id not in self._following]
        if joined:
            await asyncio.wait([asyncio.ensure_future(event.wait()) for event in joined], timeout=CATCH_UP_SECONDS)
        for record in active:
            if record.id in self._runs:
                self._runs[record.id].totals.state = record.state  # the registry knows that of a run without a runner
        return generate_latest(self._own) + generate_latest(self._server.registry)

    async def close(self) -> None:
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)

    def _follow(self, record: RunRecord) -> asyncio.Event:
        """Follow a run; the event is set when its past events are added up."""
        caught_up = asyncio.Event()
        self._following[record.id] = asyncio.create_task(self._listen(record, caught_up))
        return caught_up

    async def _listen(self, record: RunRecord, caught_up: asyncio.Event) -> None:
        run = RunListener(record)
        try:
            async with self._fanouts.listening(record, run) as fanout:
                await fanout.join(run)
                self._runs[record.id] = run
                caught_up.set()
                while not self._is_over(run):  # noqa: ASYNC110
                    await asyncio.sleep(10.0)
        except (ConnectionError, LookupError) as gone:
            log.warning("a run is not followed for /metrics", run=record.id, reason=str(gone))
        finally:
            caught_up.set()
            self._runs.pop(record.id, None)
            self._following.pop(record.id, None)  # the next scrape follows it again if it is active

    def _is_over(self, run: RunListener) -> bool:
        now = time.monotonic()
        ended = run.ended is not None and now - run.ended > KEPT_SECONDS
        return ended or run.dropped or now - self._scraped > UNSCRAPED_SECONDS

    # ── called by prometheus_client ──

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        states = Family("gauge", "asyncdock_runs", "Runs by state.", "state")
        for state in STATES:
            states.add(self._counts.get(state, 0), state)
        runs = list(self._runs.values())
        return [states.metric, *_of_runs(runs), *_of_stages(runs)]


class Family:
    """A metric of prometheus_client with the names of its ``labels``."""

    def __init__(self, kind: Literal["counter", "gauge"], name: str, text: str, *labels: str) -> None:
        self.metric = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[kind](name, text, labels=labels)

    def add(self, value: float | None, *labels: str) -> None:
        if value is not None:
            self.metric.add_metric(labels, value)


def _of_runs(runs: list[RunListener]) -> list[Metric]:
    info = Family("gauge", "asyncdock_run_info", "1 for each run.", "run", "name", "state")
    planned = Family("gauge", "asyncdock_run_steps_planned", "Optimizer steps of the recipe.", "run")
    steps = Family("counter", "asyncdock_run_steps", "Optimizer steps made.", "run")
    restarts = Family("counter", "asyncdock_run_restarts", "Times that something was started again.", "run")
    tokens = Family("counter", "asyncdock_run_tokens", "Tokens by what became of them.", "run", "what")
    why = ("run", "reason")
    dropped = Family("counter", "asyncdock_run_dropped_groups", "Groups that left untrained, by reason.", *why)
    lost = Family("counter", "asyncdock_run_dropped_tokens", "Their tokens, which count as filtered.", *why)
    prompts = Family("counter", "asyncdock_run_long_prompts", "Prompts that were too long.", "run", "what")
    epochs = Family("gauge", "asyncdock_run_prompt_epoch", "Epoch of a source of prompts, from 1.", "run", "source")
    skipped = Family("counter", "asyncdock_run_skipped_steps", "Steps with a loss or gradient not finite.", "run")
    alarms = Family("counter", "asyncdock_run_alarms", "Alarms of the guard, by metric.", "run", "metric")
    stale = "Of the newest step's samples, in policy versions; and the bound."
    staleness = Family("gauge", "asyncdock_run_staleness_versions", stale, "run", "stat")
    taking = (
        "Of taking new weights: publish by the trainer; at the engines what generation waited for (exposed), and not."
    )
    sync = Family("counter", "asyncdock_sync_seconds", taking, "run", "part")
    sync_bytes = Family("counter", "asyncdock_sync_bytes", "Bytes of weights that were published.", "run")
    reward = Family("gauge", "asyncdock_run_reward_mean", "Mean reward of the newest step.", "run")
    loss = Family("gauge", "asyncdock_run_loss", "Loss of the newest step.", "run")
    behaviour = "KL divergence to the behaviour policy in the newest step (k3)."
    kl = Family("gauge", "asyncdock_run_kl", behaviour, "run")
    entropy = Family(
        "gauge", "asyncdock_run_entropy", "Entropy of the policy in nats, mean over trained tokens.", "run"
    )
    for listener in runs:
        run, totals, step = listener.run, listener.totals, listener.totals.step
        info.add(1, run, listener.name, totals.state)
        planned.add(listener.steps_planned, run)
        steps.add(step.version if step else 0, run)
        restarts.add(totals.restarts, run)
        for what in ("generated", "trained", "filtered"):
            tokens.add(getattr(step, f"tokens_{what}", 0), run, what)
        for reason, (groups, count) in totals.dropped.items():
            dropped.add(groups, run, reason)
            lost.add(count, run, reason)
        prompts.add(totals.prompts_skipped, run, "skipped")
        prompts.add(totals.prompts_cut, run, "cut")
        for source, epoch in totals.epochs.items():
            epochs.add(epoch, run, source)
        skipped.add(totals.ledger.skipped_steps if totals.ledger else 0, run)
        for metric, raised in totals.alarm_counts.items():
            alarms.add(raised, run, metric)
        for stat in ("mean", "p95", "max"):
            staleness.add(getattr(step, f"staleness_{stat}", None), run, stat)
        staleness.add(listener.bound, run, "bound")
        for part, seconds in totals.sync_seconds.items():
            sync.add(seconds, run, part)
        sync_bytes.add(totals.published_bytes, run)
        if step:
            reward.add(step.reward_mean, run)
            loss.add(step.loss, run)
            kl.add(step.metrics.get("kl_behaviour"), run)
            entropy.add(step.metrics.get("entropy"), run)
    families = [info, planned, steps, restarts, tokens, dropped, lost, prompts, epochs, skipped, alarms, staleness]
    families += [sync, sync_bytes, reward, loss, kl, entropy]
    return [family.metric for family in families]


def _of_stages(runs: list[RunListener]) -> list[Metric]:
    worker = ("run", "stage", "worker")
    where = "Where a worker's time went; they add up to all of it."
    seconds = Family("counter", "asyncdock_stage_seconds", where, *worker, "state")
    rows = Family("counter", "asyncdock_stage_rows", "Samples done by a worker.", *worker)
    tokens = Family("counter", "asyncdock_stage_tokens", "Tokens of these samples.", *worker)
    held = Family("gauge", "asyncdock_stage_in_flight_rows", "Samples that a worker has in hand.", *worker)
    depth = Family("gauge", "asyncdock_stage_queue_depth", "Ready for a stage, not claimed.", "run", "stage")
    for listener in runs:
        depths: dict[str, float] = {}
        for name, one in listener.totals.workers.items():
            labels = (listener.run, one.latest.stage, name)
            for state in SHARES:
                seconds.add(one.totals[state], *labels, state)
            rows.add(one.totals["rows"], *labels)
            tokens.add(one.totals["tokens"], *labels)
            held.add(one.latest.in_flight, *labels)
            depths[one.latest.stage] = one.latest.queue_depth
        for stage, waiting in depths.items():
            depth.add(waiting, listener.run, stage)
    return [family.metric for family in (seconds, rows, tokens, held, depth)]
