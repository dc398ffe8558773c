"""Any order of what workers do, dying ones included, against a small model: index and model agree
after every move.

    admit ▶ claim ▶ commit ▶ … ▶ train ▶ publish ▶ release     beside them: leases expire, workers are forgotten, groups
              ▲ └ park ┐                                      leave, writes are torn, the run resumes from a snapshot
              └────────┘ for the stage itself, or for the one that takes turns with it

Moves, and every choice inside them, are drawn by hypothesis, with weights that bring whole steps
about; a failure is shrunk until most of its moves are `admit_all`, which does nothing while the
gate is full.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st

from pipeline.data.arena import StaleHandle
from pipeline.data.blocks import pack
from pipeline.data.columns import Column, Schema
from pipeline.index.client import (
    Claim,
    GateClosed,
    Index,
    IndexRefused,
    LeaseLost,
    RunConfig,
    StageSpec,
    WrittenTwice,
)
from pipeline.index.warehouses import Full
from pipeline.schedule.staleness import max_age
from pipeline.warehouse.dock import Dock
from tests.pipeline.staleness_model import Plan, windowed_pick

SCHEMA = Schema(
    [
        Column.ragged("prompt", torch.int64),
        Column.ragged("response", torch.int64),
        Column.scalar("reward", torch.float32),
        Column.scalar("judged", torch.float32),
        Column.scalar("advantage", torch.float32),
    ]
)


@dataclass(frozen=True)
class Step:
    takes: Literal["rows", "groups", "batch"]
    needs: tuple[str, ...]
    makes: str = ""


FLOW = {
    "rollout": Step("groups", ("prompt",), "response"),
    "reward": Step("rows", ("response",), "reward"),
    "judge": Step("groups", ("response",), "judged"),
    "advantage": Step("groups", ("reward",), "advantage"),
    "update": Step("batch", ("advantage", "judged")),
}
INNER = [stage for stage in FLOW if stage != "update"]
# of runs in which an environment answers: it has the beginning and what is ready, rollout its turns
TURNS = {"environment": FLOW["rollout"], **FLOW}
SPECS = tuple(
    StageSpec(
        name, step.takes, SCHEMA.mask(step.needs), SCHEMA.mask([step.makes] if step.makes else [])
    )
    for name, step in FLOW.items()
)
TURN_SPECS = (
    replace(SPECS[0], name="environment"),
    StageSpec("rollout", "groups", 0, 0, takes_turns_with="environment"),
    *SPECS[1:],
)
WORKERS = ("a", "b", "c")
ARENA = 1 << 20


@dataclass(eq=False)
class Block:
    nbytes: int
    refs: int


@dataclass(eq=False)
class Row:
    id: int
    group: int
    place: int
    columns: set[str]
    blocks: list[Block]
    done: set[str] = field(default_factory=set)
    oldest: int = -1
    response: list[int] = field(default_factory=list)
    tokens: int = 0  # of the response, that rollout has made
    turns: int = 0  # as its commit has told them
    state: str = "live"
    progress: Block | None = None  # parked, and not committed: where it lies
    turn: str = ""  # the stage that it was parked for
    holder: str = ""  # the worker that made its last turn
    is_back: bool = False  # parked for rollout by the stage that answers turns


@dataclass(eq=False)
class Lease:
    claim: Claim
    worker: str
    version: int
    held: dict[int, Row]  # not committed; rows that were filtered meanwhile included


class Flow:
    """The model, and the moves that are made on it and on the index alike."""

    def __init__(
        self,
        url: str,
        home: Path,
        plan: Plan,
        size: int,
        slab: int,
        rng: random.Random,
        turns: bool = False,
    ) -> None:
        self.specs = TURN_SPECS if turns else SPECS
        self.stages = TURNS if turns else FLOW
        # those that make responses: the first one is offered what is ready
        self.makers = ("environment", "rollout") if turns else ("rollout",)
        self.others = [stage for stage in INNER if stage != "rollout"]
        self.headstart = rng.choice([0.0, 3600.0])  # it never ends, or there is none
        self.url = url
        self.home = home
        self.plan = plan
        self.size = size
        self.slab = slab
        self.rng = rng
        self.published = self.trained = self.admitted = self.texts = 0
        self.filtered: set[int] = set()
        self.remake: list[int] = []
        self.ledger = {"generated": 0, "trained": 0, "filtered": 0}
        self.tokens = dict(self.ledger)
        self.turns = dict(self.ledger)
        self.docks: dict[str, Dock] = {}

    async def enter(self, counters: dict[str, int]) -> None:
        """A run of its own: fresh index, fresh arena."""
        self.run = uuid.uuid4().hex[:8]
        self.directory = self.home / uuid.uuid4().hex[:8]
        config = RunConfig(
            self.specs,
            self.plan.groups_per_step,
            self.plan.slack,
            self.plan.window,
            self.plan.bound,
            headstart=self.headstart,
        )
        for worker in WORKERS:
            self.docks[worker] = self.process(worker)
            assert await self.docks[worker].index.init(config, counters, self.remake) == (
                worker == "a"
            )
            await self.docks[worker].join(ARENA)
        self.loaded = dict.fromkeys(WORKERS, self.trained)
        self.groups: dict[int, list[Row]] = {}
        self.blocks: set[Block] = set()
        self.pending: dict[str, list[Block]] = {worker: [] for worker in WORKERS}
        self.leases: list[Lease] = []
        self.lost: list[Lease] = []
        self.steps: dict[int, list[int]] = {}
        self.rows_made = 0

    def process(self, worker: str) -> Dock:
        index = Index(self.url, self.run)
        return Dock(index, SCHEMA, worker=worker, directory=self.directory, slab=self.slab)

    async def leave(self) -> None:
        await self.count_references()
        await self.look_at_ranges()
        await self.docks["a"].index.erase()
        for dock in self.docks.values():
            await dock.index.close()

    # ── what should be ──

    def open(self) -> list[int]:
        trained = {group for groups in self.steps.values() for group in groups}
        return sorted({*self.groups, *self.remake} - trained)

    def effective(self, group: int) -> int:
        """The group's number without the filtered ones before it."""
        return group - sum(other < group for other in self.filtered)

    def held(self, stage: str) -> set[int]:
        return {row for lease in self.leases if lease.claim.stage == stage for row in lease.held}

    def ready(self, stage: str) -> list[int]:
        """The rows, or the groups, that can be claimed."""
        if stage in self.makers[1:]:
            return []
        held = self.held(stage)
        needs = set(self.stages[stage].needs)
        if self.stages[stage].takes == "rows":
            rows = [row for rows in self.groups.values() for row in rows]
            return sorted(
                r.id
                for r in rows
                if r.columns >= needs and stage not in r.done and r.id not in held
            )
        return sorted(
            group
            for group, rows in self.groups.items()
            if all(row.columns >= needs for row in rows)
            and (fresh := self.fresh(stage, group))
            and not any(row.id in held for row in fresh)
        )

    def fresh(self, stage: str, group: int) -> list[Row]:
        """What is delivered together when the group is."""
        return [
            r
            for r in self.groups[group]
            if stage not in r.done and not (stage in self.makers and r.progress)
        ]

    def begun(self) -> list[Row]:
        return [row for rows in self.groups.values() for row in rows if row.progress]

    def parked(self, stage: str) -> list[Row]:
        held = self.held(stage)
        waiting = [row for row in self.begun() if row.turn == stage and row.id not in held]
        return sorted(waiting, key=lambda row: row.id)

    def left_to_others(self, stage: str, worker: str) -> list[Row]:
        """Parked rows that ``worker`` leaves to those that made their last turns."""
        if stage != "rollout" or not self.headstart:
            return []
        return [row for row in self.parked(stage) if row.is_back and row.holder != worker]

    def expected(self, stage: str, most: int, version: int | None, worker: str) -> list[Row]:
        """What a claim must bring, in its order."""
        ready = self.ready(stage)
        if self.stages[stage].takes == "rows":
            by_id = {row.id: row for rows in self.groups.values() for row in rows}
            return [by_id[row] for row in ready[:most]]
        if self.stages[stage].takes == "batch":
            left = self.open()
            gone = set(range(self.admitted)) - set(left)
            groups = (
                windowed_pick(left[0], ready, self.plan.groups_per_step, self.plan.window, gone)
                if left
                else None
            )
            return [row for group in groups or () for row in self.groups[group]]
        others = self.left_to_others(stage, worker)
        first = [row for row in self.parked(stage) if row not in others]
        if version is not None:  # rollout
            ready = [
                group for group in ready if self.plan.may_claim(self.effective(group), version)
            ]
            first = [
                row for row in first if self.plan.may_claim(self.effective(row.group), version)
            ]
        first = first[: most * self.size]
        most = (most * self.size - len(first)) // self.size
        return [*first, *(row for group in ready[:most] for row in self.fresh(stage, group))]

    def progress(self) -> tuple[int, int]:
        """Admitted groups, and those trained or that steps could pick one after the other; without
        filtered ones."""
        admitted = self.admitted - len(self.filtered)
        left = self.open()
        ready = self.ready("update")
        gone = set(range(self.admitted)) - set(left)
        pickable = [
            n
            for n in range(1, len(ready) + 1)
            if windowed_pick(left[0], ready, n, self.plan.window, gone)
        ]
        return admitted, admitted - len(left) + max(pickable, default=0)

    def erase(self, groups: list[int]) -> None:
        for row in (row for group in groups for row in self.groups.pop(group)):
            for block in row.blocks:
                block.refs -= 1
        torn = {block for blocks in self.pending.values() for block in blocks}
        self.blocks = {block for block in self.blocks if block.refs or block in torn}

    def lose(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.lost.append(lease)

    def some(self, *stages: str) -> Lease | None:
        found = [lease for lease in self.leases if lease.claim.stage in stages]
        return self.rng.choice(found) if found else None

    def any_worker(self) -> str:
        return self.rng.choice(WORKERS)

    # ── what workers do ──

    async def admit_all(self) -> None:
        """As many as the gate lets in."""
        gate = self.plan.admissible(self.published) + len(self.filtered)
        await self.admit(gate - self.admitted)

    async def admit_some(self) -> None:
        await self.admit(self.rng.randint(1, 4))

    async def admit(self, more: int) -> None:
        """As the gate does it: the lost ones first, all of them, then new ones."""
        new = list(range(self.admitted, self.admitted + more))
        numbers = [*self.remake, *new]
        if not numbers:
            return
        prompts = {"prompt": [torch.tensor([number, 7]) for number in numbers]}
        admission = self.docks[self.any_worker()].admit(
            [(number, self.size) for number in numbers], prompts
        )
        if new and not self.plan.may_claim(self.effective(new[-1]), self.published):
            with pytest.raises(GateClosed):
                await admission
            return
        await admission
        block = Block(pack(SCHEMA, prompts).nbytes, self.size * len(numbers))
        self.blocks.add(block)
        for number in numbers:
            first = self.rows_made
            self.rows_made = self.rows_made + self.size
            self.groups[number] = [
                Row(first + i, number, i, {"prompt"}, [block]) for i in range(self.size)
            ]
        self.admitted += more
        self.remake = []

    async def claim_some(self) -> None:
        await self.claim(
            self.any_worker(), self.rng.choice(list(self.stages)), self.rng.randint(1, 5)
        )

    async def claim(self, worker: str, stage: str, most: int) -> Lease | None:
        if stage == "update" and self.held(stage):
            return None  # there is one trainer, and it makes one step at a time
        version = self.loaded[worker] if stage == "rollout" else None
        wanted = self.expected(stage, most, version, worker)
        others = self.held(stage)
        claim = await self.docks[worker].claim(stage, most, version=version)
        assert [row.id for row in wanted] == [
            handle.row for handle in (claim.rows if claim else ())
        ]
        if claim is None:
            return None
        for row, handle in zip(wanted, claim.rows, strict=True):
            assert row.id not in others, "two leases of one stage hold a row"
            assert row.columns >= set(self.stages[stage].needs), "ready without its columns"
            assert (handle.group, handle.place, handle.oldest_version) == (
                row.group,
                row.place,
                row.oldest,
            )
        if stage == "update":
            assert len({row.group for row in wanted}) == self.plan.groups_per_step
            assert all(0 <= self.trained - row.oldest <= self.plan.bound for row in wanted)
        await self.check_bytes(worker, claim, wanted)
        self.leases.append(
            Lease(claim, worker, self.loaded[worker], {row.id: row for row in wanted})
        )
        return self.leases[-1]

    async def check_bytes(self, worker: str, claim: Claim, rows: list[Row]) -> None:
        prompts = (await self.docks[worker].fetch(claim, ["prompt"]))["prompt"].unbind()
        assert [prompt.tolist() for prompt in prompts] == [[row.group, 7] for row in rows], (
            "a group was mixed"
        )
        if claim.stage not in self.makers:
            responses = (await self.docks[worker].fetch(claim, ["response"]))["response"].unbind()
            assert [response.tolist() for response in responses] == [row.response for row in rows]
            return
        at, found = await self.docks[worker].begun(claim, ["response"])
        assert at == [i for i, row in enumerate(rows) if row.progress]
        if at:
            assert found["response"].lists() == [rows[i].response for i in at]
            assert [claim.rows[i].tokens for i in at] == [rows[i].tokens for i in at]

    def outputs(
        self, lease: Lease, rows: list[Row]
    ) -> tuple[dict[str, Any], list[tuple[int, int]] | None]:
        stage = lease.claim.stage
        if stage not in self.makers:
            return {self.stages[stage].makes: torch.tensor([float(row.id) for row in rows])}, None
        texts = []
        made = []
        for row in rows:
            self.texts += 1  # every response is another one
            news = [row.id, self.texts] * self.rng.randint(1, 3)
            if stage == "rollout":
                oldest = min(lease.version, row.oldest) if row.tokens else lease.version
                made.append((oldest, row.tokens + len(news)))
                texts.append(row.response + news)
            elif row.tokens and self.rng.random() < 0.2:  # begun anew
                made.append((-1, 0))
                texts.append(news)
            elif row.tokens and self.rng.random() < 0.2:  # cut
                made.append((row.oldest, self.rng.randint(1, row.tokens)))
                texts.append(row.response[:1] + news)
            else:  # an observation
                made.append((row.oldest, row.tokens))
                texts.append(row.response + news)
        return {"response": [torch.tensor(text) for text in texts]}, made

    async def commit_some(self) -> None:
        """Some of a lease's rows, in any order."""
        if (lease := self.some(*self.makers, *self.others)) is not None:
            await self.commit(
                lease, self.rng.sample(list(lease.held), self.rng.randint(1, len(lease.held)))
            )

    async def commit(self, lease: Lease, ids: list[int]) -> None:
        stage = lease.claim.stage
        rows = [lease.held[row] for row in ids]
        dock = self.docks[lease.worker]
        where = {handle.row: i for i, handle in enumerate(lease.claim.rows)}
        positions, (written, generated) = [where[row] for row in ids], self.outputs(lease, rows)
        if generated is not None:  # the present version has made none of no tokens
            generated = [(self.published if not n else oldest, n) for oldest, n in generated]
        if any(row.state == "filtered" for row in rows):  # by another stage, meanwhile
            with pytest.raises(StaleHandle, match="was released"):
                await dock.commit(lease.claim, positions, written, generated=generated)
            return
        double = {
            name: [*v, v[0]] if isinstance(v, list) else torch.cat([v, v[:1]])
            for name, v in written.items()
        }
        made = None if generated is None else [*generated, generated[0]]
        with pytest.raises(WrittenTwice, match="given twice"):
            await dock.commit(lease.claim, [*positions, positions[0]], double, generated=made)
        turns = [self.rng.randint(0, 3) for _ in rows] if generated and self.makers[1:] else None
        await dock.commit(lease.claim, positions, written, generated=generated, turns=turns)
        block = Block(pack(SCHEMA, written).nbytes, len(rows))
        self.blocks.add(block)
        for slot, row in enumerate(rows):
            row.columns.add(self.stages[stage].makes)
            row.done |= set(self.makers) if generated else {stage}
            row.blocks.append(block)
            if generated:
                self.let_go(row)
                row.oldest, row.tokens = generated[slot]
                row.response = written["response"][slot].tolist()
                row.turns = turns[slot] if turns else 0
                row.state = "generated"
                self.count("generated", row)
            del lease.held[row.id]
        if not lease.held:
            self.leases.remove(lease)

    def count(self, way: str, row: Row) -> None:
        self.ledger[way] += 1
        self.tokens[way] += row.tokens
        self.turns[way] += row.turns

    def let_go(self, row: Row) -> None:
        """The progress that the row was parked with before has been used."""
        if row.progress is not None:
            row.blocks.remove(row.progress)
            row.progress.refs -= 1
            self.blocks -= {row.progress} if not row.progress.refs else set()
            row.progress = None

    async def park(self) -> None:
        """Some rows are put aside with what they have so far."""
        lease = await self.making()
        if lease is None:
            return
        to = self.rng.choice(["", *self.makers, self.makers[0], self.makers[-1]])
        dock = self.docks[lease.worker]
        rows = self.rng.sample(list(lease.held.values()), self.rng.randint(1, len(lease.held)))
        where = {handle.row: i for i, handle in enumerate(lease.claim.rows)}
        positions, (written, generated) = [where[row.id] for row in rows], self.outputs(lease, rows)
        assert generated is not None
        if any(row.state == "filtered" for row in rows):
            with pytest.raises(StaleHandle, match="was released"):
                await dock.park(lease.claim, positions, written, generated=generated, to=to)
            return
        if any(row.tokens and n for row, (_, n) in zip(rows, generated, strict=True)):
            newer = [(version + 100, tokens) for version, tokens in generated]
            with pytest.raises(IndexRefused, match="was begun by version"):
                await dock.park(lease.claim, positions, written, generated=newer)
        with pytest.raises(IndexRefused, match="does not take turns with reward"):
            await dock.park(lease.claim, positions, written, generated=generated, to="reward")
        await dock.park(lease.claim, positions, written, generated=generated, to=to)
        block = Block(pack(SCHEMA, written).nbytes, len(rows))
        self.blocks.add(block)
        for slot, row in enumerate(rows):
            self.let_go(row)
            row.progress = block
            row.turn = to or lease.claim.stage
            if lease.claim.stage == "rollout":
                row.holder = lease.worker if row.turn != "rollout" else ""
                row.is_back = False
            elif row.turn == "rollout":
                row.is_back = bool(row.holder)
            row.oldest, row.tokens = generated[slot]
            row.response = written["response"][slot].tolist()
            row.blocks.append(block)
            del lease.held[row.id]
        with pytest.raises(LeaseLost):  # another worker may claim them from here on
            await dock.commit(lease.claim, positions, written, generated=generated)
        if not lease.held:
            self.leases.remove(lease)

    async def making(self) -> Lease | None:
        """A lease of a stage that makes responses."""
        stage = self.rng.choice(self.makers)
        return self.some(*self.makers) or await self.claim(self.any_worker(), stage, 100)

    async def work(self) -> None:
        """All that is ready at some stages goes on."""
        inner = [*self.makers, *self.others]
        for stage in self.rng.sample(inner, self.rng.randint(1, len(inner))):
            if (lease := await self.claim(self.any_worker(), stage, 100)) is not None:
                await self.commit(lease, list(lease.held))

    async def respond(self) -> None:
        """Some groups of a lease end, the others are slow."""
        lease = await self.making()
        if lease is not None and all(row.state == "live" for row in lease.held.values()):
            groups = sorted({row.group for row in lease.held.values()})
            ended = self.rng.sample(groups, self.rng.randint(1, len(groups)))
            await self.commit(lease, [row.id for row in lease.held.values() if row.group in ended])

    async def go_on(self) -> None:
        """All that is generated goes as far as the update."""
        for stage in self.others:
            if (lease := await self.claim(self.any_worker(), stage, 100)) is not None:
                await self.commit(lease, list(lease.held))

    async def train(self) -> None:
        lease = self.some("update") or await self.claim(self.any_worker(), "update", 1)
        if lease is None:
            return
        index = self.docks[lease.worker].index
        rows = list(lease.held.values())
        with pytest.raises(IndexRefused, match="is not next"):
            await index.train(lease.claim, self.trained + 1)
        assert await index.train(lease.claim, self.trained) == self.trained + 1
        self.steps[self.trained] = sorted({row.group for row in rows})
        self.trained += 1
        for row in rows:
            assert row.state == "generated", "trained twice, or never generated"
            row.state = "trained"
            row.done.add("update")
            self.count("trained", row)
        self.leases.remove(lease)
        replayed = await index.replay(self.trained - 1)
        assert {handle.row for handle in replayed.rows} == {row.id for row in rows}

    async def publish(self) -> None:
        if self.published < self.trained:
            await self.docks["a"].index.publish_weights(self.trained, {"slot": 1})
            self.published = self.trained

    async def load(self) -> None:
        worker = self.any_worker()
        self.loaded[worker] = self.rng.randint(self.loaded[worker], self.published)

    async def release(self) -> None:
        before = self.trained - self.rng.randint(0, 2)
        covered = {step: groups for step, groups in self.steps.items() if step < before}
        gone = [group for groups in covered.values() for group in groups]
        assert await self.docks["a"].index.release_steps(before) == len(gone)
        self.erase(gone)
        for step in covered:
            del self.steps[step]

    async def filter(self) -> None:
        """Groups leave: they are dropped without being trained."""
        if (lease := self.some("advantage", *self.makers)) is None:
            return
        whole = [g for g, rows in self.groups.items() if all(row.id in lease.held for row in rows)]
        leaving = self.rng.sample(whole, min(len(whole), self.rng.randint(1, 2)))
        if not leaving:
            return
        await self.docks[lease.worker].index.drop_groups(lease.claim, leaving)
        for row in (row for group in leaving for row in self.groups[group]):
            del lease.held[row.id]
            if row.state == "generated":
                self.count("filtered", row)
            row.state = "filtered"
        self.erase(leaving)
        self.filtered |= set(leaving)
        if not lease.held:
            self.leases.remove(lease)

    # ── what goes wrong ──

    async def expire(self) -> None:
        if (lease := self.some(*self.stages)) is not None:
            renewed = await self.docks[lease.worker].index.renew(
                lease.claim.stage, [lease.claim.token], 0
            )
            assert renewed == {lease.claim.token}
            self.lose(lease)

    async def forget(self) -> None:
        """A worker is taken for dead: it is, and another process takes its place, or it was only
        slow and writes on."""
        worker = self.any_worker()
        ended = self.rng.random() < 0.5
        await self.docks["a"].index.forget_worker(worker, ended=ended)
        for lease in [lease for lease in self.leases if lease.worker == worker]:
            self.lose(lease)
        if ended:
            self.blocks -= set(self.pending[worker])
            self.pending[worker] = []
            self.lost = [lease for lease in self.lost if lease.worker != worker]
            await self.docks[worker].index.close()
            self.docks[worker] = self.process(worker)
            await self.docks[worker].join(ARENA)

    async def tear(self) -> None:
        """A worker dies inside a write: its bytes are taken, and nothing points to them."""
        worker = self.any_worker()
        nbytes = self.rng.randint(1, 3000)
        assert not isinstance(await self.docks[worker].index.allocate(1, worker, nbytes), Full)
        self.pending[worker].append(Block(-(-nbytes // 64) * 64, 0))
        self.blocks.add(self.pending[worker][-1])

    async def come_late(self) -> None:
        """A worker that lost its lease goes on regardless."""
        if not self.lost:
            return
        lease = self.rng.choice(self.lost)
        dock = self.docks[lease.worker]
        rows = list(lease.held.values())
        assert await dock.index.renew(lease.claim.stage, [lease.claim.token], 60) == set()
        if lease.claim.stage == "update":
            late: Coroutine[Any, Any, Any] = dock.index.train(lease.claim, self.trained)
        else:
            positions = [i for i, handle in enumerate(lease.claim.rows) if handle.row in lease.held]
            written, generated = self.outputs(lease, rows)
            late = dock.commit(lease.claim, positions, written, generated=generated)
            if generated is not None and self.rng.random() < 0.5:
                late.close()
                late = dock.park(lease.claim, positions, written, generated=generated)
        with pytest.raises((LeaseLost, StaleHandle)):
            await late

    async def resume(self) -> None:
        """The run ends here and goes on elsewhere from a snapshot."""
        state = await self.docks["c"].index.resume_point()
        self.remake = self.open()
        assert sorted(state.remake) == self.remake
        await self.leave()
        self.published = self.trained
        await self.enter(state.counters)
        for kept in (self.ledger, self.tokens, self.turns):
            kept["generated"] = kept["trained"] + kept["filtered"]

    # ── what always holds ──

    async def count_references(self) -> None:
        """A block exists while rows point to it or a worker holds it open, and no longer."""
        index = self.docks["a"].index
        pointing = Counter[int]()
        for group in self.groups:
            found = await index.inspect(group)
            assert found is not None
            for refs in found[0].refs:
                pointing.update(block for block in refs["block"].tolist() if block)
        for worker in WORKERS:
            pointing.update(map(int, await index._redis.smembers(f"{index.prefix}open:{worker}")))  # type: ignore[misc]
        kept = await index._redis.hgetall(f"{index.prefix}refs")  # type: ignore[misc]
        assert {int(block): int(count) for block, count in kept.items()} == pointing
        assert set(map(int, await index._redis.hkeys(f"{index.prefix}blocks"))) == set(pointing)  # type: ignore[misc]

    async def look_at_ranges(self) -> None:
        """Neighbouring ranges of a set are joined, so that a set is as small as its gaps allow."""
        index = self.docks["a"].index
        names = ["open", f"begun:{self.makers[0]}", *(f"parked:{stage}" for stage in self.makers)]
        names += [f"ready:{stage}:{home}" for stage in self.stages for home in range(2)]
        for name in names:
            members = await index._redis.zrange(index.prefix + name, 0, -1)
            edges = [[int(edge) for edge in member.decode().split("-")] for member in members]
            assert all(last + 1 < first for (_, last), (first, _) in pairwise(edges)), (name, edges)

    async def agree(self) -> None:
        stats = await self.docks["a"].index.stats()
        for stage in self.stages:
            held = sum(len(lease.held) for lease in self.leases if lease.claim.stage == stage)
            queue = stats["stages"][stage]
            assert (queue["ready"], queue["leased"]) == (len(self.ready(stage)), held), stage
        assert stats["stages"][self.makers[0]]["begun"] == len(self.begun())
        for stage in self.makers:
            assert stats["stages"][stage]["parked"] == len(self.parked(stage)), stage
        at = {"admitted": self.admitted, "published": self.published, "trained": self.trained}
        assert {name: stats[name] for name in at} == at
        assert stats["open"] == len(self.open())
        assert stats["rows"] == sum(map(len, self.groups.values()))
        if not self.slab:  # otherwise writes share blocks, see `count_references`
            assert stats["blocks"] == len(self.blocks)
            assert stats["warehouses"]["local"]["used"] == sum(
                block.nbytes for block in self.blocks
            )
        if not self.held("update"):
            assert await self.docks["a"].index.progress() == self.progress()
        flying = [
            row
            for group in self.open()
            for row in self.groups.get(group, ())
            if row.state == "generated"
        ]
        ledger = await self.docks["b"].index.ledger()
        units = {"": self.ledger, "_tokens": self.tokens, "_turns": self.turns}
        for unit, known in units.items():
            assert {name: ledger[name + unit] for name in known} == known
            assert (
                known["generated"]
                == known["trained"] + known["filtered"] + ledger["in_flight" + unit]
            )
        assert ledger["in_flight"] == len(flying)
        assert ledger["in_flight_tokens"] == sum(row.tokens for row in flying)
        assert ledger["in_flight_turns"] == sum(row.turns for row in flying)


MOVES = {
    "admit_all": 8,
    "admit_some": 1,
    "claim_some": 6,
    "commit_some": 4,
    "work": 3,
    "park": 6,
    "respond": 10,
    "go_on": 10,
    "train": 12,
    "publish": 10,
    "load": 8,
    "release": 3,
    "filter": 5,
    "expire": 3,
    "forget": 1,
    "tear": 1,
    "come_late": 2,
    "resume": 0.3,
}


@dataclass(frozen=True)
class Walk:
    """Moves from a run's beginning, under a plan and with slabs of ``slab`` bytes (0: none).
    ``turns``: an environment answers."""

    slack: int
    groups: int
    window: int
    size: int
    slab: int
    turns: bool
    moves: list[str]


WALKS = st.builds(
    Walk,
    slack=st.integers(0, 3),
    groups=st.integers(1, 3),
    window=st.integers(1, 4),
    size=st.integers(1, 3),
    slab=st.sampled_from([0, 4096]),
    turns=st.booleans(),
    moves=st.lists(
        st.sampled_from([move for move, weight in MOVES.items() for _ in range(round(3 * weight))]),
        min_size=80,
        max_size=240,
    ),
)


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(walk=WALKS, rng=st.randoms(use_true_random=False))
async def test_the_index_keeps_its_promises_in_whatever_order_things_happen(
    index_url: str, tmp_path: Path, walk: Walk, rng: random.Random
) -> None:
    plan = Plan(max_age(walk.slack, walk.groups, walk.window), walk.groups, walk.window)
    assert plan.slack == walk.slack
    flow = Flow(index_url, tmp_path, plan, walk.size, walk.slab, rng, walk.turns)
    await flow.enter({"published": 0, "trained": 0, "admitted": 0})
    try:
        for move in walk.moves:
            await getattr(flow, move)()
            await flow.agree()
        target(float(flow.trained))  # towards whole steps, which most moves need
        await flow.leave()
    finally:
        for dock in flow.docks.values():
            await dock.index.close()


async def test_groups_filtered_ahead_make_no_room_for_a_slow_engine_behind(
    index: Index, tmp_path: Path
) -> None:
    """Group 2 needs version 1 (P = 1, S = 1): the filtered groups 3 and 4 stand behind it, and
    change nothing for it."""
    await index.init(RunConfig(SPECS, 1, 1, 1, 1), {"published": 0, "trained": 0, "admitted": 0})
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path)
    await dock.join(ARENA)

    async def admit(*numbers: int) -> None:
        await dock.admit(
            [(number, 1) for number in numbers], {"prompt": [torch.tensor([n]) for n in numbers]}
        )

    await admit(0, 1)
    for step in (0, 1):
        for stage in INNER:
            claim = await dock.claim(stage, 1, version=step if stage == "rollout" else None)
            assert claim is not None
            made = {FLOW[stage].makes: [torch.tensor([1])] if stage == "rollout" else torch.ones(1)}
            await dock.commit(
                claim, [0], made, generated=[(step, 1)] if stage == "rollout" else None
            )
        update = await dock.claim("update", 1)
        assert update is not None
        await index.train(update, step)
        await index.publish_weights(step + 1, {})
        if step == 0:
            await admit(2)
    await admit(3)
    slow = await dock.claim("rollout", 1, version=2)
    assert slow is not None
    assert [row.group for row in slow.rows] == [2]
    for number in (3, 4):  # a filtered group makes room for one more
        unwanted = await dock.claim("rollout", 1, version=2)
        assert unwanted is not None
        assert [row.group for row in unwanted.rows] == [number]
        await index.drop_groups(unwanted, [number])
        await admit(number + 1)
    await index.renew("rollout", [slow.token], 0)  # lost: group 2 can be claimed again
    assert await dock.claim("rollout", 1, version=0) is None
    found = await dock.claim("rollout", 1, version=1)
    assert found is not None
    assert [row.group for row in found.rows] == [2]
