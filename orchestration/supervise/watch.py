"""Follows a run's events, has the guard judge them, and acts on alarms.

It runs beside the supervisor, so it sees every worker's events, and those of external trainers.

    events ─▶ Guard.observe ─▶ alarm ─▶ events ─▶ warn: nothing further
      (the run's stream)                            pause: running ─▶ paused, with the reason
                                                    fail: GuardFailed, and the run with it

How far events were judged is kept in the index. A supervisor that takes the run over, or resumes
it, makes the windows again from the last events before that place, without alarms, and goes on
behind it (:mod:`orchestration.guard.past`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import structlog

from orchestration.guard.guard import Guard, GuardOptions
from orchestration.guard.past import KINDS, Past, read_past
from orchestration.guard.rules import COMPARED_STEPS
from orchestration.history.events_file import METRICS
from orchestration.recipe.flow import algorithm_of
from orchestration.recipe.schema import Recipe
from orchestration.state.documents import JUDGED
from pipeline.data.events import AlarmEvent, Event, EventData, order
from pipeline.documents.flow import STATE
from pipeline.index.client import Index

log = structlog.get_logger()

WINDOWS = 4  # windows of steps that are read again: not every step has every metric
STATE_SECONDS = 10.0


class GuardFailed(Exception):
    """An alarm ends the run, as its recipe asks. The message is the reason."""


def options_of(recipe: Recipe) -> GuardOptions:
    """Return the options of the guard of a run of ``recipe``."""
    rollout = recipe.rollout
    sync = recipe.sync
    section = recipe.guard
    # Which of these keys counts is decided where engines are made; a table of vLLM's is refused
    # with another engine.
    rebuilds = recipe.colocated or rollout.on_update == "cut" or rollout.vllm.kv_cache != "keep"
    return GuardOptions(
        sensitivity=section.sensitivity,
        off=tuple(section.off),
        gap_limit=(sync.probe_tolerance or 1e-3) / 5 if recipe.model.dtype == "float32" else 0.0,
        grad_clip=recipe.train.grad_clip,
        rebuilds=rebuilds,
        constants=algorithm_of(recipe).constants(recipe.oldest_trained)
        if recipe.runs_stage("update")
        else {},
    )


class GuardWatch:
    """The guard of the run in ``index``. Call :meth:`begin` before the run's first events, then
    :meth:`take` with those after id ``after``. ``folder``: of the run, with the events from before
    it was resumed."""

    def __init__(
        self,
        index: Index,
        guard: Guard,
        on_alarm: Literal["warn", "pause", "fail"],
        folder: Path | None = None,
    ) -> None:
        self.index = index
        self.guard = guard
        self.on_alarm = on_alarm
        self.folder = folder
        self.after = "0"  # the last event that was taken
        self._judged = (0, 0)
        self._taking = asyncio.Lock()
        # alarms of events after the last one that is known to be judged
        self._emitted: set[tuple[str, int]] = set()

    async def begin(self) -> None:
        """Say which metrics say nothing, and judge the events that a former supervisor has left,
        without alarms that were raised before."""
        for metric, reason in self.guard.options.constants.items():
            log.warning("not judged", metric=metric, reason=reason)
        past, last = await self._past()
        for event in past.events:
            if event.kind == "alarm" and order(event.id) > self._judged:
                self._emitted.add((event.data["metric"], event.data["step"]))
        await self._take(past.events)
        self.after = last  # behind events of steps that are made again
        await self.catch_up()

    async def _past(self) -> tuple[Past, str]:
        """Return what the run stands on: its last recorded events up to the one that was judged
        last, and what the index has behind them; and the id of the last event that was read."""
        steps = WINDOWS * COMPARED_STEPS
        recorded = list[Event]()
        if self.folder is not None:
            recorded = await asyncio.to_thread(read_past, self.folder / METRICS, steps)
        oldest, newest = await self.index.event_ends()
        judged = await JUDGED.get(self.index)
        if judged is None:  # what is older than this index was judged before the run was resumed
            ids = [event.id for event in recorded]
            older = [each for each in ids if newest == "0" or order(each) < order(oldest)]
            judged = max(older, key=order, default="0")
        self._judged = order(judged)
        past = Past(steps, judged)
        last = "0"
        for event in recorded:
            if order(event.id) <= self._judged:
                past.add(event)
                last = event.id
        while events := await self.index.past_events(last):
            last = events[-1].id
            for event in events:
                past.add(event)
        return past, last

    async def take(self, event: Event) -> None:
        """Judge ``event``. Raises GuardFailed."""
        await self._take([event])

    async def catch_up(self) -> None:
        """Judge the events that are there now. Raises GuardFailed."""
        while events := await self.index.past_events(self.after):
            await self._take(events)

    async def _take(self, events: Iterable[Event]) -> None:
        async with self._taking:  # `catch_up` may have read the same events
            new = [event for event in events if order(event.id) > order(self.after)]
            for event in new:
                self.after = event.id
                is_judged = event.kind in KINDS or event.data.get("trajectories")
                if (data := event.decoded() if is_judged else None) is not None:
                    await self._judge(data, order(event.id) <= self._judged)
            if any(event.kind in ("step", "alarm") for event in new):
                await JUDGED.put(self.index, self.after)

    async def _judge(self, data: EventData, before: bool) -> None:
        """Judge ``event`` and act on its alarms. ``before``: a former supervisor has judged it and
        acted."""
        alarms = self.guard.observe(data)
        if before:
            return
        for alarm in alarms:
            if (alarm.metric, alarm.step) not in self._emitted:
                await self.index.emit(alarm)
        if isinstance(data, AlarmEvent):
            await self._act(data)

    async def _act(self, alarm: AlarmEvent) -> None:
        if self.on_alarm == "warn":
            return
        reason = f"guard: step {alarm.step}: {alarm.reason}. {alarm.look}"
        if self.on_alarm == "fail":
            await JUDGED.put(self.index, self.after)
            raise GuardFailed(reason)
        while (await self.index.transition(["running"], "paused", reason))[0] in (
            "created",
            "starting",
        ):
            _, _, after = await self.index.state()
            await self.index.wait(STATE, after, STATE_SECONDS)
