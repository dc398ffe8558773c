"""Update: claims P whole groups in admission order, makes one optimizer step of them, publishes
what came out.

    claim P groups (the window) ─▶ check the bound ─▶ (draw replayed groups) ─▶ train ─▶ commit the step and its event
       ▲                                                          └─▶ publish v + 1: the gate opens ─▶ checkpoint?
    between two steps: an engine has reported v as damaged ─▶ the worker ends, and its successor publishes v again

A killed worker's successor loads the last checkpoint and replays the steps that the index has
recorded since: their rows are still there, the arithmetic is deterministic, so it arrives at the
very weights that were lost. Where the engine has several ranks, this is what the first of them does
(``stages.training.ranks``).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import structlog
import torch
import xxhash
from tensordict import TensorDict

from pipeline.data.arena import StaleHandle
from pipeline.data.columns import Packed
from pipeline.data.events import ForecastEvent, StepEvent, SyncEvent
from pipeline.documents.flow import VERSION
from pipeline.first_of import cancel_all, first_of
from pipeline.index.client import BoundBroken, Claim
from pipeline.problems import Passing
from pipeline.warehouse.dock import Dock
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Trained
from pipeline.worker.spans import Spans
from stages.algorithms.batch import trained_columns
from stages.algorithms.named import AlgorithmLike
from stages.engines.device_lease import DeviceLease
from stages.engines.protocols import TrainEngine, UndoableEngine
from stages.flow.catalogue import AGE, MASK, OBSERVED, TOKEN_STALENESS, VERSIONS
from stages.rewards.figures import centred, figures_by_function
from stages.rewards.scores import has_failed, has_reward
from stages.samples.sample_log import Recorder, Sample
from stages.training.ranks import RankGroup
from stages.training.token_versions import generated_tokens
from stages.weights.documents import DAMAGED, ENGINES, FORECAST, LAST_TAKEN, TAKEN
from stages.weights.published import Probe, Published, WeightsDamaged
from stages.weights.records import WeightRecords
from stages.weights.transport.roles import Publisher
from stages.weights.verification.probe import probed

if TYPE_CHECKING:
    from stages.training.critic import CriticOrders
    from stages.training.replay import Replay
    from stages.training.skipped import SkippedSteps

log = structlog.get_logger()

WAIT_SECONDS = 10.0  # a wait on the server is renewed this often
REWARDS = ("reward", "scores")
# tokens at most of a row that a swap is probed with
PROBE_PROMPT = 64
PROBE_RESPONSE = 16
# at most, in all and of one batch: the others are the batches' before
PROBE_ROWS = 16
PROBE_NEW_ROWS = 8


class SamplesGone(Passing, RuntimeError):
    """Rows of steps since the checkpoint lay on a node that was lost, so that these steps cannot be
    replayed."""


class Update(Stage):
    """The update stage. ``version``: policy version of the engine's weights. ``after_step`` is
    called with each new version when it is published (checkpoints); ``after_last`` is called when
    ``steps`` are done. ``before_publish`` is called with each version before there are rows of it,
    and with whether its step is made now, not replayed. With ``publish_first`` the weights that the
    run begins with are published too, for engines that are not built from its model. ``store`` is
    None where ranks pass the weights on themselves: only the version is published then. ``device``
    is what the engine computes on. ``functions``: weights of the reward functions by name, in the order of the column
    ``scores``, as the run's own reward stage writes it; without them all rows have a reward.
    ``skipped`` makes what takes the steps with a loss or gradient that is not finite; None: they
    end the run. ``critic``: a critic with a worker of its own, which trains on the rows of each
    step beside ``engine``: a step is committed when both have. ``replay`` draws the groups of
    earlier steps that each step trains again; the bound is that of its own rows."""

    name = "update"

    def __init__(
        self,
        dock: Dock,
        engine: TrainEngine,
        algorithm: AlgorithmLike,
        store: Publisher | None,
        *,
        steps: int,
        staleness: int,
        version: int,
        after_step: Callable[[int], Awaitable[None]],
        after_last: Callable[[], None],
        before_publish: Callable[[int, bool], Awaitable[None]] | None = None,
        rank_group: RankGroup | None = None,
        probe_tokens: int = 0,
        spans: Spans | None = None,
        recorder: Recorder | None = None,
        publish_first: bool = False,
        device: DeviceLease | None = None,
        skipped: Callable[[], SkippedSteps] | None = None,
        critic: CriticOrders | None = None,
        functions: Mapping[str, float] = MappingProxyType({}),
        replay: Replay | None = None,
    ) -> None:
        self.rank_group = rank_group or RankGroup(dock.index)
        # For the step's event; each rank fetches the columns that it trains on.
        wanted = (*REWARDS[: 1 + bool(functions)], "truncated", "response_ids")
        if MASK in dock.schema:
            wanted = (*wanted, VERSIONS)
        self.fetches = tuple(name for name in wanted if name in dock.schema)
        self.dock = dock
        self.records = WeightRecords(dock.index)
        self.engine = engine
        self.algorithm = algorithm
        self.store = store
        self.steps = steps
        self.staleness = staleness
        self.trained = version
        self._after_step = after_step
        self._after_last = after_last
        self._before_publish = before_publish
        self.spans = spans or Spans()
        self.recorder = recorder
        self._make_skipped = skipped
        self.skipped: SkippedSteps | None = None  # since the first one
        self.critic = critic
        self._replay = replay
        self._functions = functions
        self._since = time.monotonic()
        self._publish_first = publish_first
        self.device = device or DeviceLease()
        self.probe: Probe | None = None  # of the version published last
        # held from the check of the bound to the publishing of the step's weights
        self._stepping = asyncio.Lock()
        self._over = asyncio.Event()
        self._probe_tokens = probe_tokens
        self._probe = list[list[int]]()  # rows of the last batches

    def room(self, held: int) -> int:
        return 0 if held or self.trained >= self.steps else 1

    async def catch_up(self) -> None:
        """Replay the recorded steps past the engine's own version, then publish if the index does
        not have it yet."""
        status = await self.dock.index.status()
        began = self.trained
        await self._prepare_version(replayed=True)
        while self.trained < status.trained:
            try:
                claim = await self.dock.index.replay(self.trained)
                await self._train_or_skip(claim)
            except StaleHandle as gone:
                raise SamplesGone(str(gone)) from gone
            self.trained += 1
            await self._prepare_version(replayed=True)
            log.info("step replayed", step=self.trained)
        was_damaged = await DAMAGED.get(self.dock.index, version=self.trained) is not None
        if status.published < self.trained or was_damaged or not await self._reachable():
            await self.publish()
        if was_damaged:
            await DAMAGED.remove(self.dock.index, version=self.trained)
            await self.dock.index.wake(VERSION)
        if self.trained > began:
            await self._end_step()  # who made the last of these steps may not have come to it
        if self.trained >= self.steps:
            self._after_last()

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        async with self._stepping, self.device.training():
            stale = self._staleness(claim)
            if max(stale) > self.staleness or min(stale) < 0:
                raise BoundBroken(
                    f"step {self.trained + 1}: staleness {min(stale)}..{max(stale)}, the bound is "
                    f"{self.staleness}"
                )
            replayed = await self._replay.draw(self.trained) if self._replay else None
            metrics, reason, seconds, samples = await self._train_and_read(claim, replayed)
            if "truncated" in rows:
                metrics = {**metrics, "truncated": float(rows["truncated"].float().mean())}
            metrics = {**metrics, **variety(claim, rows)}
            ledger, amounts, forecast = await asyncio.gather(
                self.dock.index.ledger(),
                self.dock.index.amounts(),
                FORECAST.get(self.dock.index),
            )
            now = time.monotonic()
            spent = (now - self._since, seconds)
            scored = {name: rows[name] for name in REWARDS if name in rows}
            event = step_event(
                *(self.trained + 1, claim, scored, stale, metrics, ledger, spent),
                calls=(self._functions, amounts),
                skipped=reason,
                forecast=forecast,
            )
            self._since = now
            yield Trained(
                range(len(claim)),
                version=self.trained,
                event=event,
                reported=amounts,
                replayed=sorted(set(replayed.group.tolist())) if replayed else (),
                tokens=int(claim.tokens.sum()),
            )
            self.trained += 1
            await self._prepare_version()
            await self.publish()
            if self.recorder is not None:
                await self.recorder.write(samples)
            await self._end_step()
            if self.trained >= self.steps:
                self._after_last()

    async def _prepare_version(self, *, replayed: bool = False) -> None:
        if self._before_publish is not None:
            await self._before_publish(self.trained, not replayed)

    async def _end_step(self) -> None:
        await self._after_step(self.trained)
        await self.dock.index.emit(await self.dock.index.ledger_event())

    def _staleness(self, claim: Claim) -> list[int]:
        return (self.trained - claim.oldest_version.astype(int)).tolist()

    async def _train_and_read(
        self, claim: Claim, replayed: Claim | None
    ) -> tuple[Mapping[str, float], str, float, Sequence[Sample]]:
        """Train or skip the rows of ``claim``, and those ``replayed``, and read beside it what is
        recorded: the claim's rows, which are gone with the next checkpoint. Also the seconds of
        training."""
        began = time.monotonic()
        reading = None
        if self.recorder is not None:
            stale = self._staleness(claim)
            reading = asyncio.create_task(self.recorder.read(self.trained + 1, claim, stale))
        try:
            batch = claim.joined(replayed) if replayed else claim
            metrics, reason = await self._train_or_skip(batch)
            seconds = time.monotonic() - began
            if self._replay and replayed:
                metrics = {**metrics, **self._replay.figures(self._staleness(replayed))}
            return metrics, reason, seconds, await reading if reading is not None else []
        finally:
            await cancel_all(reading)

    async def _train_or_skip(self, claim: Claim) -> tuple[Mapping[str, float], str]:
        """Return the metrics of a step on the claim's rows, or why none was taken. Raises
        TooManySkipped."""
        try:
            metrics = await self._train(claim)
        except FloatingPointError as refused:
            if self._make_skipped is None:
                raise
            self.skipped = self.skipped or self._make_skipped()
            stale = self._staleness(claim)
            await self.skipped.add(self.trained + 1, claim, stale, str(refused))
            return {}, str(refused)
        if self.skipped is not None:
            self.skipped.end_row()
        return metrics, ""

    async def _train(self, claim: Claim) -> Mapping[str, float]:
        """Make the optimizer steps on the claim's rows, by all ranks, and by the critic beside
        them: of both or of neither."""
        if self.critic is None:
            return await self._train_policy(claim)
        critic = self.critic.send("train", claim=claim.record(), trained=self.trained)
        both = await asyncio.gather(self._train_policy(claim), critic, return_exceptions=True)
        policy, answer = both
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(policy, BaseException):
            if isinstance(policy, FloatingPointError) and not answer["skipped"]:
                await self.critic.send("undo")
            raise policy
        if answer["skipped"]:
            await self.rank_group.broadcast("undo")
            await asyncio.to_thread(cast("UndoableEngine", self.engine).undo)
            raise FloatingPointError(f"critic: {answer['skipped']}")
        return {**policy, **answer["metrics"]}

    async def _train_policy(self, claim: Claim) -> Mapping[str, float]:
        shares = await self.rank_group.deal(self.dock, claim, self.algorithm)
        await self.rank_group.broadcast("train", claim=claim.record(), shares=shares)
        columns = trained_columns(self.algorithm, self.dock.schema)
        by_token = TOKEN_STALENESS in self.algorithm.loss_reads
        batch = await self.rank_group.fetch(
            self.dock, claim, shares, columns, self.trained, by_token=by_token
        )
        if self._probe_tokens:
            self._probe = probe_rows(self._probe, batch, self._probe_tokens)
        with self.spans.during("train", rows=len(claim), version=self.trained):
            return await asyncio.to_thread(self._train_in_thread, batch)

    def _train_in_thread(self, batch: TensorDict) -> Mapping[str, float]:
        began = time.perf_counter()
        computed = time.thread_time()
        metrics = self.engine.train_batch(batch, self.algorithm)
        share = (time.thread_time() - computed) / max(1e-9, time.perf_counter() - began)
        return {**metrics, "train_cpu_share": min(1.0, share)}

    async def _reachable(self) -> bool:
        """Return whether engines can have the published version's weights: a trainer that is gone
        sends them no more. Those that the run begins with were not published, unless an engine
        needs them."""
        record = (await self.dock.index.published_weights()).record
        if not record or self.store is None:
            return not self._publish_first
        sources, store_sources = (
            json.loads(text or "[]") for text in (record.get("source"), self.store.source)
        )
        return sources[: len(store_sources)] == store_sources and bool(sources) == bool(
            store_sources
        )  # the ranks end together

    async def publish(self) -> None:
        """Put the engine's weights into host memory as the current version, and record it in the
        index."""
        began = time.monotonic()
        with self.spans.during("publish", version=self.trained):
            if self._probe or self.store is not None:
                version = None if self.store is None else self.trained
                await self.rank_group.broadcast("publish", probe=self._probe, version=version)
            published = await asyncio.to_thread(self._write)
            if published is not None and self.rank_group.coordinates.world > 1:
                published = await self.rank_group.join_parts(published)
            if published is None:
                await self.dock.index.publish_weights(self.trained, {})
            else:
                await self.records.publish(published)
        if published is None:
            return
        await self.dock.index.emit(
            SyncEvent(
                worker="update-0",
                version=self.trained,
                bytes=published.nbytes,
                publish_seconds=time.monotonic() - began,
                exposed_seconds=0.0,
                hidden_seconds=0.0,
            )
        )

    def _write(self) -> Published | None:
        self.probe = probed(self.engine, self._probe) if self._probe else None
        if self.store is None:
            return None
        weights = self.engine.weights()
        world = self.rank_group.coordinates.world
        part = () if world == 1 else ((0, world),)
        return self.store.publish(self.trained, weights, self.probe, *part)

    def over(self) -> None:
        """Record that nothing more will be trained."""
        self._over.set()

    async def until_taken(self, engines: Sequence[str]) -> None:
        """Return when nothing more will be trained and, after the last step, all of ``engines``
        have its version (those of the document ENGINES, where the supervisor has written it).
        Raises WeightsDamaged, between two steps, when an engine has reported the newest version as
        damaged."""
        position = ""
        index = self.dock.index
        while not self._over.is_set() or (
            self.trained >= self.steps and not await self._all_taken(engines)
        ):
            async with self._stepping:
                if reported_by := await DAMAGED.get(index, version=self.trained):
                    raise WeightsDamaged(
                        f"weights of version {self.trained}: {reported_by} has found them damaged; "
                        f"the trainer starts again "
                        "and publishes them again"
                    )
            waking = index.woken(TAKEN, position, WAIT_SECONDS)
            woken, *_ = await first_of(
                waking, *([] if self._over.is_set() else [self._over.wait()])
            )
            position = woken or position

    async def _all_taken(self, engines: Sequence[str]) -> bool:
        index = self.dock.index
        recorded = await ENGINES.get(index)
        if recorded is not None:
            engines = recorded
        taken = [await LAST_TAKEN.get(index, worker=each) for each in engines]
        return all(version == self.steps for version in taken)


def probe_rows(before: Sequence[list[int]], batch: TensorDict, tokens: int) -> list[list[int]]:
    """Return the sequences for the next probe: those of ``before``, the newest last, and of
    ``batch`` one row, or as many groups' first rows as it takes for ``tokens`` to be probed: the
    prompt and the generated tokens, without those that were observed. The oldest leave first,
    where the others are enough."""
    prompts, responses = (Packed.of(batch[name]).rows() for name in ("prompt_ids", "response_ids"))
    ages = Packed.of(batch[AGE]).rows() if AGE in batch else []
    first = {group: number for number, group in reversed(list(enumerate(batch["group"].tolist())))}
    fresh = []
    for number in sorted(first.values()):
        generated = responses[number][ages[number] != OBSERVED] if ages else responses[number]
        prompt = prompts[number][:PROBE_PROMPT].tolist()
        fresh.append([*prompt, *generated[:PROBE_RESPONSE].tolist()])
    rows = list(before)
    added = 0
    for ids in fresh:
        if (
            len(ids) > 1  # a failed trajectory may have generated nothing
            and ids not in rows
            and added < PROBE_NEW_ROWS
            and (not added or _probed_tokens(rows) < tokens)
        ):
            rows.append(ids)
            added += 1
    while len(rows) > PROBE_ROWS or (len(rows) > 1 and _probed_tokens(rows[1:]) >= tokens):
        del rows[0]
    return rows


def _probed_tokens(rows: Sequence[Sequence[int]]) -> int:
    return sum(len(ids) - 1 for ids in rows)


def variety(claim: Claim, rows: TensorDict) -> dict[str, float]:
    """Return the metrics of a step's ``rows``: ``distinct_responses``, the share of responses whose
    generated tokens are not those of another one; ``observed_tokens``, those that are not
    generated; ``equal_groups``, the share of groups whose rewards are all equal, of those with any;
    and the mean tokens of responses with a reward above and below the mean of their group."""
    out = dict[str, float]()
    if "response_ids" in rows:
        responses = Packed.of(rows["response_ids"])
        if VERSIONS in rows:
            tokens = len(responses.values)
            responses = generated_tokens(responses, Packed.of(rows[VERSIONS]))
            out["observed_tokens"] = tokens - len(responses.values)
        hashes = {xxhash.xxh3_64_intdigest(row.numpy().data) for row in responses.rows()}
        out["distinct_responses"] = len(hashes) / len(claim)
    if "reward" in rows:
        counted = rewarded(rows)
        groups = groups_of(claim)[counted]
        differences = centred(rows["reward"][counted].double()[:, None], groups)[:, 0]
        if len(groups):
            differing = groups[differences != 0].unique()
            out["equal_groups"] = 1 - len(differing) / len(groups.unique())
        lengths = torch.from_numpy(claim.tokens.astype("float64"))[counted]
        for side, chosen in (("above", differences > 0), ("below", differences < 0)):
            if chosen.any():
                out[f"response_length_{side}"] = float(lengths[chosen].mean())
    return out


def groups_of(claim: Claim) -> torch.Tensor:
    """Return int64 [B]: the group of each row."""
    return torch.from_numpy(claim.group.astype("int64"))


def rewarded(columns: Mapping[str, torch.Tensor] | TensorDict) -> torch.Tensor:
    """Return bool [B]: the rows that have a reward (:func:`stages.rewards.scores.has_reward`)."""
    if "scores" in columns:
        return has_reward(columns["scores"])
    return torch.ones(len(columns["reward"]), dtype=torch.bool)


def step_event(
    step: int,
    claim: Claim,
    columns: Mapping[str, torch.Tensor],
    stale: list[int],
    metrics: Mapping[str, float],
    ledger: Mapping[str, int],
    seconds: tuple[float, float],
    calls: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
    skipped: str = "",
    forecast: ForecastEvent | None = None,
) -> StepEvent:
    """Return the event of step ``step``, from 1, on the rows of ``claim``. ``metrics`` are what the engine
    measured, ``ledger`` the counts before the step, ``seconds`` those since the last step and those
    of training. Of ``columns`` ``reward`` and ``scores`` are read, where the flow has them.
    ``calls``: weights of the functions in ``scores`` by name, and amounts of the index.
    ``skipped``: why no step was taken. ``forecast``: the newest `forecast` event."""
    staleness = torch.tensor(stale, dtype=torch.float64)
    lengths = torch.from_numpy(claim.tokens.astype("float64"))
    counted = rewarded(columns) if "reward" in columns else torch.zeros(0, dtype=torch.bool)
    rewards = columns["reward"][counted].double() if "reward" in columns else torch.zeros(0)
    failed = has_failed(columns["scores"]).any(dim=1) if "scores" in columns else ~counted
    measured = {name: float(value) for name, value in metrics.items()}
    return StepEvent(
        step=step,
        version=step,
        rows=len(claim),
        groups=sorted(set(claim.group.tolist())),
        loss=measured.pop("loss", math.nan),
        reward_mean=float(rewards.mean()) if len(rewards) else None,
        reward_std=float(rewards.std(correction=0)) if len(rewards) else None,
        reward_failed=int(failed.sum()) if len(counted) else 0,
        reward_absent=int((~counted & ~failed).sum()) if len(counted) else 0,
        staleness_mean=float(staleness.mean()),
        staleness_p95=float(staleness.quantile(0.95)),
        staleness_max=float(staleness.max()),
        response_length_mean=float(lengths.mean()),
        tokens_generated=ledger["generated_tokens"],
        tokens_trained=ledger["trained_tokens"] + int(claim.tokens.sum()),
        tokens_filtered=ledger["filtered_tokens"],
        seconds=seconds[0],
        train_seconds=seconds[1],
        train_cpu_share=measured.pop("train_cpu_share", None),
        predicted_seconds=forecast.step_seconds if forecast else None,
        predicted_staleness=forecast.staleness_mean if forecast else None,
        skipped=skipped,
        rewards=figures_by_function(*calls, columns["scores"], groups_of(claim))
        if "scores" in columns
        else {},
        metrics=measured,
    )
