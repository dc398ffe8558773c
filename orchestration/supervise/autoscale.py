"""Autoscaling: how many rollout workers a run needs, by how its stages spend their time.

    `stage` events ──▶ Window: seconds of trainer and rollouts ──▶ AutoscalePolicy ──▶ document "scale" ──▶ supervisor

The policy is arithmetic, without clocks or I/O. In a window of W seconds the rollouts were busy for
B seconds, all added up, while the trainer waited for samples for a share w of it. The number of
rollouts that makes both equal is

    need = B / W / (1 − w)

More than need would wait for the gate, fewer would let the trainer wait. B has what each rollout
really did, so a window in which some join or leave counts as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from orchestration.history.worker_clock import WorkerClock
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.state.documents import SCALE
from orchestration.state.registry import WrongState
from orchestration.supervise.scale import request_scale
from pipeline.data.events import Event
from pipeline.index.client import Index

log = structlog.get_logger()

WAITS = 0.1  # share of a window that the trainer waits, from which on it has too few rollouts
SPARE = 0.15  # of the rollouts' time that stays free, so that a number that is just enough is kept
PATIENCE = 3  # windows in a row that call for fewer rollouts, before there are fewer


@dataclass(frozen=True)
class Load:
    """The load of a window: how many ``rollouts`` reported, how many of them were ``busy`` on
    average, and the share in which the trainer ``waits`` for samples."""

    rollouts: int
    busy: float
    waits: float


@dataclass
class AutoscalePolicy:
    """The policy that decides the number of rollouts, from ``least`` to ``most``.

    Up at once; down by what :data:`PATIENCE` windows in a row would allow, so that a short lull
    ends no worker. Between both lies a band in which the number stays.

    >>> policy = AutoscalePolicy(1, 8)
    >>> policy.decide(2, Load(2, busy=2.0, waits=0.5))  # the trainer could make twice as many steps
    4
    >>> [policy.decide(4, Load(4, busy=1.6, waits=0.0)) for _ in range(3)]
    [4, 4, 2]
    """

    least: int
    most: int
    # what the last windows in a row would have allowed
    _fewer: list[int] = field(default_factory=list)

    def decide(self, asked: int, load: Load) -> int:
        """Return how many rollouts to ask for after a window with ``load``, when ``asked`` were
        asked for until now."""
        need = load.busy / max(1e-3, 1 - load.waits)
        if load.waits > WAITS:
            self._fewer.clear()
            # at most double of those that work: the estimate is rough far away
            return self._within(max(asked, math.ceil(min(need, 2 * load.rollouts) - SPARE)))
        self._fewer.append(self._within(math.ceil(need / (1 - SPARE))))
        if self._fewer[-1] >= asked:
            self._fewer.clear()
        if len(self._fewer) < PATIENCE:
            return self._within(asked)
        fewer = max(self._fewer)
        self._fewer.clear()
        return fewer

    def _within(self, rollouts: int) -> int:
        return max(self.least, min(self.most, rollouts))


class Window:
    """The seconds between two looks at the `stage` events of a run, from the first step on."""

    def __init__(self) -> None:
        self._clocks: dict[tuple[str, str], WorkerClock] = {}  # by stage and worker
        # their totals at the window's begin
        self._begin: dict[tuple[str, str], Mapping[str, float]] = {}
        self._untrained: set[str] = set()  # trainers whose process has trained no row yet

    def add(self, event: Event) -> None:
        """Take an event of the run into account."""
        if event.kind != "stage" or event.data["stage"] not in ("rollout", "update"):
            return
        stage, name = worker = event.data["stage"], event.data["worker"]
        is_new = worker not in self._clocks
        clock = self._clocks.setdefault(worker, WorkerClock())
        goes_on = clock.add(event.data)
        if is_new:
            self._begin[worker] = clock.totals
        elif goes_on and name in self._untrained:  # until the first step it waits for any number
            self._begin = {each: clock.totals for each, clock in self._clocks.items()}
        if stage == "update" and not event.data["rows"]:
            self._untrained.add(name)
        else:
            self._untrained.discard(name)

    def load(self) -> Load | None:
        """Return the load, and begin the next window; None, and the window goes on, while the
        trainer, or each rollout, has not reported a time."""

        spent = {
            worker: added
            for worker, clock in self._clocks.items()
            if (added := clock.since(self._begin[worker]))["wall"] > 0
        }
        trainers = [added for (stage, _), added in spent.items() if stage == "update"]
        busy = [added["busy"] for (stage, _), added in spent.items() if stage == "rollout"]
        if not busy or not trainers:
            return None
        # workers that are gone are forgotten
        self._clocks = {worker: self._clocks[worker] for worker in spent}
        self._begin = {worker: clock.totals for worker, clock in self._clocks.items()}
        waits = min(added["waiting_input"] / added["wall"] for added in trainers)
        return Load(len(busy), sum(busy) / max(added["wall"] for added in trainers), waits)


class LoadFollower:
    """Scales the run of ``index`` as ``launch.autoscale`` of its ``recipe`` says, by its events."""

    def __init__(self, index: Index, recipe: Recipe) -> None:
        section = recipe.launch.autoscale
        self._index = index
        self._workers = recipe.rollout.workers
        self._window = Window()
        self._window_seconds = section.window
        self._policy = AutoscalePolicy(section.min, section.max)
        self._decided = 0.0  # time of the event by which the last decision was made

    async def take(self, event: Event) -> None:
        self._window.add(event)
        self._decided = self._decided or event.time
        if event.kind != "stage" or event.time - self._decided < self._window_seconds:
            return
        if (load := self._window.load()) is not None:
            self._decided = event.time
            await self._scale(load)

    async def _scale(self, load: Load) -> None:
        asked = await SCALE.get(self._index) or self._workers
        wanted = self._policy.decide(asked, load)
        if wanted == asked:
            return
        log.info(
            "scales the rollouts",
            before=asked,
            after=wanted,
            trainer_waits=load.waits,
            busy=load.busy,
        )
        try:
            await request_scale(self._index, wanted)
        except (RecipeError, WrongState) as refused:
            log.warning("rollouts not scaled", wanted=wanted, reason=str(refused))
