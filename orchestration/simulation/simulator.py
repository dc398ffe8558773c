"""Simulates a run as a sequence of events, with the rules of the real one and the costs given.

    gate admits q < (v + S + 1)·P ──▶ a replica with room and a version that may ──▶ rows decode (mock engine's clock)
         ▲                                                                               │ all rows of the group ended
         │                                                                    rewards, reference ──▶ dropped?
         └── v + 1 published ◀── between_steps ◀── step ◀── P groups, within the window ◀┘
                  └──▶ each replica: copy, its turn, swap

Rules and arithmetic of the bound are :mod:`pipeline.schedule.staleness`'s; a replica's clock is that of
:mod:`stages.engines.mock.engines`: one clock for all rows, whose rate depends on how many decode.
Nothing here sleeps: a simulated run of 100,000 samples takes about a second. Equal arguments give
equal results.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from orchestration.simulation.costs import Costs, LengthsOf
from orchestration.simulation.groups import Group, Groups
from pipeline.schedule.pacing import Pacer
from pipeline.schedule.staleness import StalenessPlan


@dataclass(frozen=True)
class Setup:
    """The workers and limits of a simulated run.

    ``max_rows``: responses that a replica decodes at once, of ``most_rows`` that it holds.
    ``first_groups``: groups of a replica's first claim. ``budget``: tokens of one visit of a
    response, 0: all. ``cut``: a swap parks what decodes. ``at_once``: replicas that may swap
    together, 0: all. ``references``: workers that compute reference logprobs, 0: no such stage.
    ``failures``: of each replica, an hour. ``paced``: the gate admits groups as late as keeps the
    trainer fed. ``replica_threads``, ``trainer_threads``: on which a replica and the trainer
    compute, where they share the cores of one machine. Warehouses have room for all that the bound
    lets in: a recipe in which they have not is refused.
    """

    plan: StalenessPlan
    group_size: int
    steps: int
    replicas: int = 1
    max_rows: int = 64
    most_rows: int = 64
    first_groups: int = 1
    budget: int = 0
    cut: bool = False
    at_once: int = 0
    colocated: bool = False
    references: int = 0
    failures: float = 0.0
    paced: bool = False
    replica_threads: int = 1
    trainer_threads: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """An optimizer step: seconds from the run's beginning to its end, seconds of training, seconds
    that the trainer waited before it; response tokens, samples, and how many of them had each
    staleness."""

    at: float
    train_seconds: float
    waited: float
    tokens: int
    rows: int
    staleness: dict[int, int]


_Row = tuple[Group, int, int]  # group, place, tokens that it has


@dataclass(eq=False)
class _Batch:
    """What the trainer trains: ``left`` seconds of it at ``time``, on cores of its own."""

    groups: list[Group]
    began: float
    waited: float
    staleness: dict[int, int]
    left: float
    time: float
    stamp: int = 0


class _Replica:
    """A rollout worker: the mock engine's clock, without what tokens are."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.version = 0
        self.held = 0
        self.waiting: deque[_Row] = deque()
        self.decoding: list[
            tuple[float, int, _Row, int, float]
        ] = []  # end, order, row, tokens then, clock at its start
        self.clock = self.time = self.busy = 0.0  # ``busy``: seconds with rows that decode
        self.joined = self.stamp = 0
        self.stopped = self.taking = self.gone = False
        self.claimed = False  # it has had its first claim

    def advance(self, now: float, rates: Sequence[float]) -> None:
        """The clock to ``now``. No row ends before it: each end is an event."""
        if self.decoding:
            self.busy += now - self.time
            self.clock += 0.0 if self.stopped else (now - self.time) * rates[len(self.decoding)]
        self.time = now

    def join(self, setup: Setup, costs: Costs, alone: Sequence[float]) -> None:
        """Waiting rows begin to decode while there is room. ``alone``: rates with cores of its
        own."""
        prefilled = 0.0
        while self.waiting and len(self.decoding) < setup.max_rows:
            row = group, place, begun = self.waiting.popleft()
            if begun or not group.versions:
                prefilled += costs.prompt_tokens + begun
            if not begun:
                group.versions[place] = self.version
            length = group.lengths[place]
            until = min(length, begun + setup.budget) if setup.budget else length
            start = self.clock + (costs.prompt_tokens + begun) / costs.prefill_rate * costs.row_rate
            self.joined += 1
            heapq.heappush(self.decoding, (start + until - begun, self.joined, row, until, start))
        if prefilled:
            self.stall(costs.prefill_seconds + prefilled * costs.prefill_token_seconds, alone)

    def stall(self, seconds: float, alone: Sequence[float]) -> None:
        """Nothing decodes for ``seconds``: the clock is back by the tokens of that time."""
        self.clock -= seconds * alone[len(self.decoding)] if self.decoding else 0.0

    def park(self) -> list[_Row]:
        """Rows with a token of this visit leave; the others stay."""
        staying = []
        parked = []
        for entry in self.decoding:
            _, _, (group, place, begun), _, start = entry
            made = int(self.clock - start + 1e-9)
            if made > 0:
                parked.append((group, place, begun + made))
            else:
                staying.append(entry)
        self.decoding, self.held = staying, self.held - len(parked)
        heapq.heapify(self.decoding)
        return parked


class Simulator:
    """One simulated run. :meth:`run` returns its steps."""

    def __init__(self, setup: Setup, costs: Costs, lengths: LengthsOf) -> None:
        self.setup = setup
        self.costs = costs
        self.lengths = lengths
        self.plan = setup.plan
        self.replicas = [_Replica(number) for number in range(setup.replicas)]
        self._alone = self._rates = [costs.rate(rows) for rows in range(setup.max_rows + 1)]
        # of their time in which threads compute, where there are more of them than cores
        self._share = 1.0
        self.steps: list[Step] = []
        self.now = 0.0
        self._random = Random(setup.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._scheduled = 0
        self._version = 0
        self._groups = Groups(setup.plan)
        self._ready: deque[Group] = deque()
        self._parked: deque[_Row] = deque()
        self._training = False  # or what follows it, until the new version is published
        self._batch: _Batch | None = None
        self._idle_since = 0.0
        self._swapping = 0
        self._turns: deque[_Replica] = deque()
        self._references = [0.0] * setup.references  # when each is free
        self.remade_tokens = 0
        self._pacer = Pacer(setup.plan) if setup.paced else None

    def run(self) -> list[Step]:
        """Simulate to the last step. Raises RuntimeError where nothing can happen any more."""
        self._admit()
        if self._pacer is not None:
            self._look()
        for replica in self.replicas:
            self._plan_failure(replica)
        while len(self.steps) < self.setup.steps:
            if not self._events:
                raise RuntimeError(
                    f"the simulated run stands still after {len(self.steps)} steps: nothing can be "
                    f"claimed"
                )
            self.now, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)
            if self.costs.cores:
                self._share_cores()
        return self.steps

    def _at(self, time: float, happen: Callable[..., None], *arguments: object) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (time, self._scheduled, happen, arguments))

    # --- the gate and claims
    # ----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        setup = self.setup
        size = self.setup.group_size
        groups = self._groups
        last = setup.steps * self.plan.groups_per_step + self._groups.dropped
        limit = min(groups.limit(self._version), last)
        if self._pacer is not None:
            self._pacer.see(self.now, self._version, groups.admitted - groups.dropped, groups.left)
            limit = min(limit, self._pacer.limit(self.now) + groups.dropped)
        self._ready.extend(
            Group(number, self.lengths(number), size) for number in groups.admit(limit)
        )
        if self._ready or self._parked:
            for replica in self.replicas:
                self._claim(replica)

    def _look(self) -> None:
        """As the gate does."""
        assert self._pacer is not None
        self._admit()
        if self._events or self._pacer.limit(self.now) < self._groups.limit(self._version):
            self._at(self.now + self._pacer.look(), self._look)

    def _claim(self, replica: _Replica) -> None:
        """Parked rows first, then groups, as many as there is room for."""
        setup = self.setup
        limit = self._groups.limit(replica.version)
        if replica.gone:
            return
        joined = False
        room = setup.most_rows - replica.held
        while self._parked and room > 0 and self._parked[0][0].number < limit:
            replica.waiting.append(self._parked.popleft())
            replica.held = replica.held + 1
            room = room - 1
            joined = True
        most = room // setup.group_size
        if not replica.claimed:
            most = min(most, setup.first_groups)
        while most > 0 and self._ready and self._ready[0].number < limit:
            group = self._ready.popleft()
            replica.waiting.extend((group, place, 0) for place in range(setup.group_size))
            replica.held += setup.group_size
            most = most - 1
            joined = True
            replica.claimed = True
        if joined:
            replica.advance(self.now, self._rates)
            replica.join(self.setup, self.costs, self._alone)
            self._arm(replica)

    # --- a replica's clock
    # --------------------------------------------------------------------------------------------

    def _arm(self, replica: _Replica) -> None:
        replica.stamp += 1
        if replica.decoding and not replica.stopped:
            end = (
                self.now
                + max(0.0, replica.decoding[0][0] - replica.clock)
                / self._rates[len(replica.decoding)]
            )
            self._at(end, self._end_row, replica, replica.stamp)

    def _end_row(self, replica: _Replica, stamp: int) -> None:
        """The row that ends first, and those that end before anything else happens."""
        if stamp != replica.stamp:
            return
        while True:
            end, _, (group, place, _), until, _ = heapq.heappop(replica.decoding)
            replica.busy += self.now - replica.time
            replica.clock = end
            replica.time = self.now
            replica.held -= 1
            if replica.waiting:
                replica.join(self.setup, self.costs, self._alone)
            replica.stall(self.costs.response_seconds, self._alone)
            if until < group.lengths[place]:
                self._parked.append((group, place, until))
            else:
                group.left -= 1
                if not group.left:
                    self._at(self.now, self._ended, group)
            room = self.setup.most_rows - replica.held
            if (self._ready and room >= self.setup.group_size) or (self._parked and room > 0):
                self._claim(replica)
            if replica.stopped or not replica.decoding:
                replica.stamp += 1
                return
            following = (
                self.now
                + max(0.0, replica.decoding[0][0] - replica.clock)
                / self._rates[len(replica.decoding)]
            )
            if self._events and self._events[0][0] <= following:
                self._arm(replica)
                return
            self.now = following

    # --- between rollout and update
    # ----------------------------------------------------------------------------------

    def _ended(self, group: Group) -> None:
        if self._references:
            first = min(range(len(self._references)), key=self._references.__getitem__)
            seconds = (group.tokens + self.costs.prompt_tokens) * self.costs.reference_token_seconds
            self._references[first] = max(self.now, self._references[first]) + seconds
            self._at(self._references[first], self._scored, group)
        else:
            self._scored(group)

    def _scored(self, group: Group) -> None:
        if self.costs.dropped and self._random.random() < self.costs.dropped:
            self._groups.drop(group)
            self._admit()
            self._train()
        elif self._groups.complete(group):
            self._train()

    # --- training
    # ----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        if self._training or not (groups := self._groups.pick()):
            return
        stale = dict[int, int]()
        for group in groups:
            for version in group.versions.values():
                stale[self._version - version] = stale.get(self._version - version, 0) + 1
        tokens = sum(group.tokens for group in groups) + self.costs.prompt_tokens * len(groups)
        seconds = self.costs.step_seconds + self.costs.token_seconds * tokens
        self._training = True
        self._batch = _Batch(
            groups, self.now, self.now - self._idle_since, stale, seconds, self.now
        )
        if self.setup.colocated:
            self._stop_all(True)
        self._arm_trainer(self._batch)

    def _arm_trainer(self, batch: _Batch) -> None:
        batch.stamp += 1
        self._at(self.now + batch.left / self._share, self._trained, batch, batch.stamp)

    def _trained(self, batch: _Batch, stamp: int) -> None:
        if stamp != batch.stamp:
            return
        self._batch = None
        tokens = sum(group.tokens for group in batch.groups)
        rows = len(batch.groups) * self.setup.group_size
        self.steps.append(
            Step(self.now, self.now - batch.began, batch.waited, tokens, rows, batch.staleness)
        )
        self._at(self.now + self.costs.between_steps, self._published)

    def _published(self) -> None:
        self._version += 1
        self._training = False
        self._idle_since = self.now
        if self.setup.colocated:
            self._stop_all(False)
        self._admit()
        for replica in self.replicas:
            self._take(replica)
        self._train()

    def _stop_all(self, stopped: bool) -> None:
        for replica in self.replicas:
            self._set_stopped(replica, stopped)

    def _set_stopped(self, replica: _Replica, stopped: bool) -> None:
        replica.advance(self.now, self._rates)
        replica.stopped = stopped
        self._arm(replica)

    def _share_cores(self) -> None:
        """Threads that compute at the same time take turns on the machine's cores: all of them slow
        down alike."""
        setup = self.setup
        batch = self._batch
        threads = self.costs.other_threads + (setup.trainer_threads if self._training else 0)
        threads += setup.replica_threads * sum(
            bool(one.decoding) and not one.stopped for one in self.replicas
        )
        share = min(1.0, self.costs.cores / threads) if threads else 1.0
        if share == self._share:
            return
        for replica in self.replicas:
            replica.advance(self.now, self._rates)
        if batch:
            batch.left -= (self.now - batch.time) * self._share
            batch.time = self.now
        self._share = share
        self._rates = [rate * share for rate in self._alone]
        for replica in self.replicas:
            self._arm(replica)
        if batch:
            self._arm_trainer(batch)

    # --- swaps and failures
    # ----------------------------------------------------------------------------------------------

    def _take(self, replica: _Replica) -> None:
        if replica.taking or replica.gone or replica.version >= self._version:
            return
        replica.taking = True
        self._turns.append(replica)
        self._next_turn()

    def _next_turn(self) -> None:
        while self._turns and not (self.setup.at_once and self._swapping >= self.setup.at_once):
            self._swapping += 1
            replica = self._turns.popleft()
            self._at(self.now + self.costs.copy_seconds, self._swap, replica, self._version)

    def _swap(self, replica: _Replica, version: int) -> None:
        self._set_stopped(replica, True)
        self._at(self.now + self.costs.swap_seconds, self._swapped, replica, version)

    def _swapped(self, replica: _Replica, version: int) -> None:
        if self.setup.cut:
            self._parked.extend(replica.park())
            replica.join(self.setup, self.costs, self._alone)
        replica.version = max(replica.version, version)
        replica.taking = False
        self._swapping -= 1
        self._set_stopped(replica, replica.gone or (self.setup.colocated and self._training))
        self._next_turn()
        self._claim(replica)
        self._take(replica)

    def _plan_failure(self, replica: _Replica) -> None:
        if self.setup.failures:
            self._at(
                self.now + self._random.expovariate(self.setup.failures / 3600), self._fail, replica
            )

    def _fail(self, replica: _Replica) -> None:
        """The replica's rows go back without the tokens of their visits, and it is gone until it
        has started again."""
        replica.advance(self.now, self._rates)
        for _, _, row, until, start in replica.decoding:
            self.remade_tokens += max(0, min(until - row[2], int(replica.clock - start)))
            self._parked.append(row)
        self._parked.extend(replica.waiting)
        replica.decoding = []
        replica.held = 0
        replica.gone = True
        replica.stopped = True
        replica.waiting.clear()
        replica.stamp += 1
        self._at(self.now + self.costs.restart_seconds, self._started_again, replica)
        for other in self.replicas:
            self._claim(other)

    def _started_again(self, replica: _Replica) -> None:
        replica.gone = False
        replica.version = self._version
        self._set_stopped(replica, self.setup.colocated and self._training)
        self._claim(replica)
        self._plan_failure(replica)
