"""Autoscaling: how many rollout workers a run needs, by how its stages spend their time.

    `stage` events ──▶ Window: shares of time of trainer and rollouts ──▶ AutoscalePolicy ──▶ document "scale" ──▶ supervisor

The policy is arithmetic, without clocks or I/O. With n rollouts that are busy for a share b of the time, while the trainer
waits for samples for a share w, a window has n·b of generation and 1 − w of training. The number that makes them equal is

    need = n · b / (1 − w)

More than need would wait for the gate, fewer would let the trainer wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import structlog

from orchestration.elastic.scale import SCALE, request_scale
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.sections import AutoscaleSection
from orchestration.service.registry import WrongState
from pipeline.events import Event
from pipeline.index.client import Index

log = structlog.get_logger()

WAITS = 0.1  # share of a window that the trainer waits, from which on it has too few rollouts
SPARE = 0.15  # of the rollouts' time that stays free, so that a number that is just enough is kept
MISSING = 20  # windows after which workers that were asked for and do not come, as no host has room, are given up
SETTLING = 1  # windows after a change in which rollouts join or leave: their times say nothing yet
PATIENCE = 3  # windows in a row that call for fewer rollouts, before there are fewer


@dataclass(frozen=True)
class Shares:
    """Of a window: the share in which the trainer ``waits`` for samples, and the mean share in which a rollout is
    ``busy``."""

    waits: float
    busy: float


@dataclass
class AutoscalePolicy:
    """Decides the number of rollouts, from ``least`` to ``most``. Up at once; down by what :data:`PATIENCE` windows in a row
    would allow, so that a short lull ends no worker. Between both lies a band in which the number stays.

    >>> policy = AutoscalePolicy(1, 8)
    >>> policy.decide(2, Shares(waits=0.5, busy=1.0))  # the trainer could make twice as many steps
    4
    >>> [policy.decide(4, Shares(waits=0.0, busy=0.4)) for _ in range(3)]
    [4, 4, 2]
    """

    least: int
    most: int
    _fewer: list[int] = field(default_factory=list)  # what the last windows in a row would have allowed

    def decide(self, rollouts: int, shares: Shares) -> int:
        """Returns how many rollouts there should be after a window with ``rollouts``."""
        need = rollouts * shares.busy / max(1e-3, 1 - shares.waits)
        if shares.waits > WAITS and need > rollouts:
            self._fewer.clear()
            return self._within(
                math.ceil(min(need, 2 * rollouts) - SPARE)
            )  # at most doubled: the estimate is rough far away
        fewer = self._within(math.ceil(need / (1 - SPARE)))
        if fewer >= rollouts or shares.waits > WAITS:
            self._fewer.clear()
            return self._within(rollouts)
        self._fewer.append(fewer)
        if len(self._fewer) < PATIENCE:
            return self._within(rollouts)
        fewer = max(self._fewer)
        self._fewer.clear()
        return fewer

    def _within(self, rollouts: int) -> int:
        return max(self.least, min(self.most, rollouts))


class Window:
    """Shares of time between two looks at the `stage` events of a run."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, str], tuple[float, float, float]] = {}  # wall, waiting, busy at the window's begin
        self._now: dict[tuple[str, str], tuple[float, float, float]] = {}

    def add(self, event: Event) -> None:
        """Take an event of the run into account."""
        if event.kind == "stage" and event.data["stage"] in ("rollout", "update"):
            worker, data = (event.data["stage"], event.data["worker"]), event.data
            before, now = self._now.get(worker), (data["wall"], data["waiting_input"], data["busy"])
            if before is None or now[0] < before[0]:  # its process has begun
                self._at[worker] = now
            self._now[worker] = now

    def shares(self) -> tuple[int, Shares] | None:
        """Returns how many rollouts reported in this window, and the shares, and begins the next window; None, and the
        window goes on, while either stage has not reported a time."""
        spent = {w: tuple(b - a for a, b in zip(self._at[w], now, strict=True)) for w, now in self._now.items()}
        passed = {worker: parts for worker, parts in spent.items() if parts[0] > 0}
        rollouts = [busy / wall for (stage, _), (wall, _, busy) in passed.items() if stage == "rollout"]
        trainers = [waiting / wall for (stage, _), (wall, waiting, _) in passed.items() if stage == "update"]
        if not rollouts or not trainers:
            return None
        self._at = {worker: self._now[worker] for worker in passed}
        self._now = dict(self._at)  # workers that are gone are forgotten
        return len(rollouts), Shares(min(trainers), sum(rollouts) / len(rollouts))


class Autoscaler:
    """Scales the run of ``index`` as its section says, until cancelled."""

    def __init__(self, index: Index, section: AutoscaleSection, rollouts: int) -> None:
        self._index, self._seconds, self._rollouts = index, section.window, rollouts
        self._policy = AutoscalePolicy(section.min, section.max)
        self._missing = 0  # windows in which another number than was asked for has worked
        self._unsettled = 1  # windows without a decision: the first one has the start of the run

    async def run(self) -> None:
        (_, after), window, settled = await self._index.event_ends(), Window(), 0.0
        while True:
            for event in await self._index.events(after):
                after = event.id
                window.add(event)
                settled = settled or event.time
                if event.kind == "stage" and event.time - settled >= self._seconds:
                    settled = event.time
                    await self._decide(window)

    async def _decide(self, window: Window) -> None:
        asked = int(await self._index.get(SCALE) or self._rollouts)
        if (found := window.shares()) is None:
            return
        if self._unsettled or (asked != self._rollouts):
            self._unsettled, self._rollouts = max(0, self._unsettled - 1), asked
            return
        self._missing = 0 if found[0] == asked else self._missing + 1
        if 0 < self._missing < MISSING:
            return
        wanted = self._policy.decide(*found)
        if wanted == asked:
            return
        log.info("scales the rollouts", before=found[0], after=wanted, trainer_waits=found[1].waits, busy=found[1].busy)
        try:
            await request_scale(self._index, wanted)
        except (RecipeError, WrongState) as refused:
            log.warning("rollouts not scaled", wanted=wanted, reason=str(refused))
            return
        self._rollouts, self._unsettled = wanted, SETTLING
