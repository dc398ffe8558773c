"""Metrics for Prometheus: the totals of the active runs, and counters of the server itself.

    events of each active run, from its first one ──▶ RunListener: RunTotals ──┐
    requests, readers of streams, delays ──▶ counters ─────────────────────────┼──▶ text of GET /metrics
    the registry ──▶ runs by state ────────────────────────────────────────────┘

Runs are followed from the first scrape on, and no longer when scrapes have stopped. Labels are
bounded: runs that are active, and the last ones that have ended until a few scrapes have their last
numbers, with the stages and workers of their recipes. Prometheus marks a series that is gone as
stale, and keeps what it has read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.telemetry.fanout import Batch, Ending, Fanouts
from api.telemetry.trajectories import endings
from orchestration.history.totals import SHARES, RunTotals, WorkerTotals
from orchestration.state.recording import recorded_totals
from orchestration.state.registry import Registry, RunRecord
from pipeline.data.events import ENDED, Event
from pipeline.first_of import cancel_all
from pipeline.index.client import Index
from stages.flow.catalogue import TIMES

log = structlog.get_logger()

STATES = ("created", "starting", "running", "paused", "stopping", *ENDED)
# An ended run is still exposed to so many scrapes, of several servers perhaps, for so long at most;
KEPT_SCRAPES = 5
KEPT_SECONDS = 300.0
MOST_ENDED = 20  # of many that end at once, the newest ones
UNSCRAPED_SECONDS = 300.0  # without a scrape, after which runs are no longer followed
CATCH_UP_SECONDS = 5.0  # for which a scrape waits for the past events of new runs
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
DELAYS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class RunListener:
    """The totals of the events of one run, as a listener of its fanout."""

    def __init__(self, record: RunRecord) -> None:
        self.run = record.id
        self.name = record.name
        self.steps_planned = int(record.recipe["train"]["steps"])
        self.bound = int(record.recipe["pipeline"]["staleness"])
        self.totals = RunTotals()
        self.totals.state = record.state
        self.ended: float | None = None  # when, on the monotonic clock
        self.scrapes = 0  # since then
        self.dropped = False

    async def ready(self) -> None:
        await asyncio.sleep(0)  # requests are answered between two pages of a long past

    def catch_up(self, events: Sequence[Event]) -> str:
        self.deliver(Batch(events))
        return events[-1].id

    def deliver(self, batch: Batch) -> None:
        for event in batch.events:
            self.totals.apply(event)

    def heartbeat(self, event_id: str) -> None:
        pass

    def end(self, ending: Ending) -> None:
        self.totals.state = ending.state
        self.ended = time.monotonic()

    def drop(self, why: str, reason: str) -> None:
        self.dropped = True


class ServerMetrics:
    """Counters of the server itself, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "asyncdock_http_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.durations = Histogram(
            "asyncdock_http_request_duration_seconds",
            "From a request to the end of its answer; streams are left out.",
            ("method", "route"),
            buckets=DURATIONS,
            registry=self.registry,
        )
        self.readers = Gauge(
            "asyncdock_stream_readers", "Readers of event streams now.", registry=self.registry
        )
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
        """Count a reader while it is connected.

        Yields a function to call with why it was dropped ("": it was not).
        """
        with self.readers.track_inprogress():
            yield lambda why: self.dropped.labels(why).inc() if why else None

    @web.middleware
    async def count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Count requests (a middleware; the outermost one, so that refusals count too)."""
        began = time.perf_counter()
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            # a path could be anything
            route = resource.canonical if resource is not None else "none"
            method = (
                request.method
                if request.method in ("GET", "HEAD", "POST", "PUT", "DELETE")
                else "other"
            )
            self.requests.labels(method, route, str(status)).inc()
            if not route.endswith("/stream"):
                self.durations.labels(method, route).observe(time.perf_counter() - began)


class Exposition(Collector):
    """The text of ``GET /metrics``. Follows the active runs while it is scraped."""

    def __init__(self, registry: Registry, fanouts: Fanouts, server: ServerMetrics) -> None:
        self._registry = registry
        self._fanouts = fanouts
        self._server = server
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
            await asyncio.wait(
                [asyncio.ensure_future(event.wait()) for event in joined], timeout=CATCH_UP_SECONDS
            )
        for record in active:
            if record.id in self._runs:
                # the registry knows that of a run without a runner
                self._runs[record.id].totals.state = record.state
        self._drop_ended()
        return generate_latest(self._own) + generate_latest(self._server.registry)

    def _drop_ended(self) -> None:
        """Leave out the ended runs that were exposed often enough, and those beyond MOST_ENDED."""
        ended = [(run.ended, run) for run in self._runs.values() if run.ended is not None]
        ended.sort(key=lambda entry: entry[0], reverse=True)
        for place, (_, run) in enumerate(ended):
            if place >= MOST_ENDED or run.scrapes >= KEPT_SCRAPES:
                del self._runs[run.run]
                run.dropped = True
            run.scrapes += 1

    async def close(self) -> None:
        await cancel_all(*self._following.values())

    def _follow(self, record: RunRecord) -> asyncio.Event:
        """Follow a run; the event is set when its past events are added up."""
        caught_up = asyncio.Event()
        self._following[record.id] = asyncio.create_task(self._listen(record, caught_up))
        return caught_up

    async def _listen(self, record: RunRecord, caught_up: asyncio.Event) -> None:
        run = RunListener(record)
        try:
            async with self._fanouts.listening(record, run) as fanout:
                recorded = await recorded_totals(Index(self._registry.link, record.id))
                run.totals = recorded.totals
                run.totals.state = record.state
                await fanout.join(run, recorded.after)
                self._runs[record.id] = run
                caught_up.set()
                while not self._is_over(run):  # noqa: ASYNC110
                    await asyncio.sleep(10.0)
        except (ConnectionError, LookupError) as error:
            log.warning("a run is not followed for /metrics", run=record.id, reason=str(error))
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
        states = GaugeMetricFamily("asyncdock_runs", "Runs by state.", labels=("state",))
        for state in STATES:
            states.add_metric((state,), self._counts.get(state, 0))
        runs = list(self._runs.values())
        return [states, *(family.collect(runs) for family in FAMILIES)]


Values = Callable[[RunListener], Mapping[Any, float | None]]  # by tuples of labels


@dataclass(frozen=True)
class Family:
    """A metric of every run.

    ``values``: those of one run by their ``labels`` (None: there is none yet).
    """

    kind: type[CounterMetricFamily | GaugeMetricFamily]
    name: str
    text: str
    labels: tuple[str, ...]
    values: Values

    def collect(self, runs: Iterable[RunListener]) -> Metric:
        metric = self.kind(f"asyncdock_{self.name}", self.text, labels=("run", *self.labels))
        for run in runs:
            for labels, value in self.values(run).items():
                if value is not None:
                    metric.add_metric((run.run, *labels), value)
        return metric


def _of_step(number: str) -> Values:
    """Return a number of the newest step, or of its metrics."""

    def read(run: RunListener) -> Mapping[Any, float | None]:
        step = run.totals.step
        return {(): getattr(step, number, step.metrics.get(number))} if step else {}

    return read


def _of_workers(number: Callable[[WorkerTotals], float]) -> Values:
    return lambda run: {
        (worker.latest.stage, name): number(worker) for name, worker in run.totals.workers.items()
    }


def _staleness(run: RunListener) -> Mapping[Any, float | None]:
    values = {
        (stat,): getattr(run.totals.step, f"staleness_{stat}", None)
        for stat in ("mean", "p95", "max")
    }
    return values | {("bound",): run.bound}


def _stage_seconds(run: RunListener) -> Mapping[Any, float]:
    workers = run.totals.workers.items()
    return {
        (worker.latest.stage, name, state): worker.totals[state]
        for name, worker in workers
        for state in SHARES
    }


def _of_trajectories(**names: str) -> Values:
    """Return numbers of trajectories, by their label."""

    def read(run: RunListener) -> Mapping[Any, float]:
        counts = run.totals.trajectories
        return {(label,): counts[name] for label, name in names.items() if name in counts}

    return read


COUNTER = CounterMetricFamily
GAUGE = GaugeMetricFamily
BY_REASON = ("reason",)
BY_WORKER = ("stage", "worker")
TAKING = (
    "Of taking new weights: publish by the trainer; at the engines what generation waited for "
    "(exposed), and not."
)
TOKENS = ("generated", "trained", "filtered")
FAMILIES = (
    Family(
        GAUGE,
        "run_info",
        "1 for each run.",
        ("name", "state"),
        lambda run: {(run.name, run.totals.state): 1},
    ),
    Family(
        GAUGE,
        "run_steps_planned",
        "Optimizer steps of the recipe.",
        (),
        lambda run: {(): run.steps_planned},
    ),
    Family(
        COUNTER,
        "run_steps",
        "Optimizer steps made.",
        (),
        lambda run: {(): getattr(run.totals.step, "version", 0)},
    ),
    Family(
        COUNTER,
        "run_restarts",
        "Times that something was started again.",
        (),
        lambda run: {(): run.totals.restarts},
    ),
    Family(
        COUNTER,
        "run_tokens",
        "Tokens by what became of them.",
        ("what",),
        lambda run: {(what,): getattr(run.totals.step, f"tokens_{what}", 0) for what in TOKENS},
    ),
    Family(
        COUNTER,
        "run_dropped_groups",
        "Groups that left untrained, by reason.",
        BY_REASON,
        lambda run: {(reason,): groups for reason, (groups, _) in run.totals.dropped.items()},
    ),
    Family(
        COUNTER,
        "run_dropped_tokens",
        "Their tokens, which count as filtered.",
        BY_REASON,
        lambda run: {(reason,): tokens for reason, (_, tokens) in run.totals.dropped.items()},
    ),
    Family(
        COUNTER,
        "run_long_prompts",
        "Prompts that were too long.",
        ("what",),
        lambda run: {("skipped",): run.totals.prompts_skipped, ("cut",): run.totals.prompts_cut},
    ),
    Family(
        GAUGE,
        "run_prompt_epoch",
        "Epoch of a source of prompts, from 1.",
        ("source",),
        lambda run: {(source,): epoch for source, epoch in run.totals.epochs.items()},
    ),
    Family(
        COUNTER,
        "run_skipped_steps",
        "Steps with a loss or gradient not finite.",
        (),
        lambda run: {(): getattr(run.totals.ledger, "skipped_steps", 0)},
    ),
    Family(
        COUNTER,
        "run_alarms",
        "Alarms of the guard, by metric.",
        ("metric",),
        lambda run: {(metric,): raised for metric, raised in run.totals.alarm_counts.items()},
    ),
    Family(
        GAUGE,
        "run_staleness_versions",
        "Of the newest step's samples, in policy versions; and the bound.",
        ("stat",),
        _staleness,
    ),
    Family(
        COUNTER,
        "sync_seconds",
        TAKING,
        ("part",),
        lambda run: {(part,): seconds for part, seconds in run.totals.sync_seconds.items()},
    ),
    Family(
        COUNTER,
        "sync_bytes",
        "Bytes of weights that were published.",
        (),
        lambda run: {(): run.totals.published_bytes},
    ),
    Family(
        GAUGE, "run_reward_mean", "Mean reward of the newest step.", (), _of_step("reward_mean")
    ),
    Family(
        GAUGE,
        "run_reward_function",
        "Scores of a reward function in the newest step.",
        ("function", "stat"),
        lambda run: {
            (name, stat): figures.get(stat)
            for name, figures in getattr(run.totals.step, "rewards", {}).items()
            for stat in ("mean", "std", "share", "correlation")
        },
    ),
    Family(
        COUNTER,
        "run_reward_calls",
        "Responses of a reward function: all, lost; and its calls: all, failed, made again.",
        ("function", "what"),
        lambda run: {
            (name, what): calls.get(what, 0)
            for name, calls in run.totals.reward_calls.items()
            for what in ("responses", "lost", "calls", "failed", "again")
        },
    ),
    Family(
        COUNTER,
        "run_reward_seconds",
        "Seconds inside a reward function, of all its calls.",
        ("function",),
        lambda run: {(name,): calls["seconds"] for name, calls in run.totals.reward_calls.items()},
    ),
    Family(
        GAUGE,
        "run_equal_groups",
        "Share of groups of the newest step whose rewards are all equal.",
        (),
        _of_step("equal_groups"),
    ),
    Family(GAUGE, "run_loss", "Loss of the newest step.", (), _of_step("loss")),
    Family(
        GAUGE,
        "run_kl",
        "KL divergence to the behaviour policy in the newest step (k3).",
        (),
        _of_step("kl_behaviour"),
    ),
    Family(
        GAUGE,
        "run_entropy",
        "Entropy of the policy in nats, mean over trained tokens.",
        (),
        _of_step("entropy"),
    ),
    Family(
        COUNTER,
        "run_draft_tokens",
        "Tokens that rollout engines looked up and computed ahead, and those that were drawn.",
        ("what",),
        lambda run: {
            (name.removesuffix("_tokens"),): count for name, count in run.totals.drafts.items()
        },
    ),
    Family(
        GAUGE,
        "run_trajectories_open",
        "Trajectories in progress: their environment is open.",
        (),
        lambda run: {(): run.totals.trajectories.get("open")},
    ),
    Family(
        COUNTER,
        "run_trajectories",
        "Trajectories that have ended, by reason: done by their environment, a limit, a failure.",
        BY_REASON,
        lambda run: {
            (reason,): count for reason, count in endings(run.totals.trajectories).items()
        },
    ),
    Family(
        COUNTER,
        "run_turns",
        "Turns of trajectories that were answered, and branches that programs began.",
        ("what",),
        _of_trajectories(answered="turns", branches="branches"),
    ),
    Family(
        COUNTER,
        "run_turn_tokens",
        "Tokens of trajectories by who made them: the policy, the environment.",
        ("what",),
        _of_trajectories(generated="generated_tokens", observed="observed_tokens"),
    ),
    Family(
        COUNTER,
        "run_turn_seconds",
        "Where the time of turns went.",
        ("part",),
        _of_trajectories(**{name: f"{name}_seconds" for name in TIMES}),
    ),
    Family(
        COUNTER,
        "run_tool_calls",
        "Calls of tools, and those of them that failed.",
        ("what",),
        _of_trajectories(made="calls", failed="failed_calls"),
    ),
    Family(
        COUNTER,
        "stage_seconds",
        "Where a worker's time went; they add up to all of it.",
        (*BY_WORKER, "state"),
        _stage_seconds,
    ),
    Family(
        COUNTER,
        "stage_rows",
        "Samples done by a worker.",
        BY_WORKER,
        _of_workers(lambda worker: worker.totals["rows"]),
    ),
    Family(
        COUNTER,
        "stage_tokens",
        "Tokens of these samples.",
        BY_WORKER,
        _of_workers(lambda worker: worker.totals["tokens"]),
    ),
    Family(
        GAUGE,
        "stage_in_flight_rows",
        "Samples that a worker has in hand.",
        BY_WORKER,
        _of_workers(lambda worker: worker.latest.in_flight),
    ),
    Family(
        GAUGE,
        "stage_queue_depth",
        "Ready for a stage, not claimed.",
        ("stage",),
        lambda run: {
            (worker.latest.stage,): worker.latest.queue_depth
            for worker in run.totals.workers.values()
        },
    ),
)
