"""A run's stages for programs outside of it: AsyncFlow's service interface, over the run's index and warehouses.

    put_prompts ─▶ feed ─▶ gate ─▶ … ─▶ get_experience ─▶ (their engine) ─▶ put_experience ─▶ the next stage
                                             ▲ lease, fencing token             └ commit, or park to go on later
    weights ─▶ (they load) ─▶ weight_sync_notify ─▶ which version their next claims are asked by

Nothing of a claim is kept here: a token is all that its holder needs, so whoever serves this may die and be started again.
What holds for the run's own workers holds for these: a lease that expires is delivered again, a commit under it is refused,
and no version makes tokens of a group that it is too old for.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from orchestration.external.accounting import OVER, PREFIX, StageTime, StageTimes
from orchestration.recipe.planner import flow_of
from orchestration.recipe.schema import Recipe
from orchestration.run.paths import RunPaths
from pipeline.columns import Packed, Schema
from pipeline.index.client import Claim, Index, LeaseLost, redacted
from pipeline.warehouse.dock import Dock, NoRoom
from stages.columns import RESPONSE
from stages.external_checks import (
    TERMS,
    Columns,
    Layout,
    Misfit,
    Terms,
    check_columns,
    check_layout,
    check_logprobs,
    check_responses,
    check_rewards,
    checked_weights,
    nbytes_of,
)
from stages.prompts.external import put_prompts
from stages.rollout.stage import PROGRESS, group_seed
from stages.training.update import step_event
from stages.weights.store import Published, WeightsDamaged, WeightStore

CLAIMED = "running"  # the state in which there is something to claim: a run that starts has no warehouse yet
MOST_ROWS = 4096  # of one claim
WAIT_SECONDS = 10.0  # a wait on the server is renewed this often
DIRECT = "index"  # the owner of what is claimed by the index's URL; not "", which owns what the run's own workers claim
GROUPS = ("rollout", "reference")  # stages that take whole groups


class NotExternal(LookupError):
    """The run's own workers do this stage."""


class NotBegun(RuntimeError):
    """The run has no workers yet."""


class WeightsTooOld(RuntimeError):
    """The version that an engine has loaded may make no tokens of what waits: it must load a newer one first."""


class WeightsGone(LookupError):
    """A version's weights are not held any more, or not yet."""


@dataclass(frozen=True)
class Experience:
    """Rows under a lease: the claim, which stage it is of, the columns that were asked, and what rows that were parked
    before have so far (``begun``: their positions, and their columns)."""

    claim: Claim
    columns: dict[str, Packed]
    begun: tuple[list[int], dict[str, Packed]]
    seeds: list[int]  # of each row's group, for who draws tokens


@dataclass(frozen=True)
class Answer:
    """``experience`` is None when nothing came within the time; ``state`` says whether more can come."""

    experience: Experience | None
    state: str
    reason: str
    published: int
    trained: int

    @property
    def over(self) -> bool:
        return self.state in OVER


class External:
    """The interface to one run. ``worker`` names the process that serves it: a life of that name that was killed leaves
    nothing open. Raises IndexUnreachable when the index cannot be reached."""

    def __init__(self, index: Index, recipe: Recipe, *, worker: str = "external") -> None:
        self.index, self.recipe, self.worker = index, recipe, worker
        self._dock: Dock | None = None
        self._opening = asyncio.Lock()
        self._terms: Terms | None = None
        self._store: WeightStore | None = None
        self._timesheets = StageTimes(index)

    @classmethod
    async def open(cls, url: str, run: str, *, worker: str = "external") -> External:
        """By a running run's index and id. Raises LookupError when the index knows no such run."""
        index = Index(url, run)
        try:
            recipe = await index.get("recipe")
            if recipe is None:
                raise LookupError(f"run: {run!r} is not in index {redacted(url)}; give the id of a run that is")
        except BaseException:
            await index.close()
            raise
        return cls(index, Recipe.from_json(recipe), worker=worker)

    @property
    def schema(self) -> Schema:
        """The run's columns."""
        return flow_of(self.recipe).schema

    async def close(self) -> None:
        """Give back what is held open here, and the connections. Leases stay with their holders."""
        await self._timesheets.close()
        if self._dock is not None:
            await self._dock.close()
        await self.index.close()

    # ── prompts ──

    async def put_prompts(
        self, rows: Sequence[Mapping[str, Any]], *, first: int | None = None, last: bool = False, timeout: float = 30.0
    ) -> int:
        """See :func:`stages.prompts.external.put_prompts`. Raises NotExternal when the run has its own prompts."""
        if self.recipe.prompts.source != "external":
            raise NotExternal(
                f"prompts.source = {self.recipe.prompts.source!r}: the run has its own prompts; open one with "
                "prompts.source = 'external'"
            )
        column = self.recipe.prompts.column
        return await put_prompts(self.index, rows, column=column, first=first, last=last, timeout=timeout)

    # ── experience ──

    async def get_experience(
        self,
        stage: str,
        worker: str,
        most: int,
        *,
        columns: Sequence[str] = (),
        version: int | None = None,
        wait: float = 0.0,
        lease: float | None = None,
        owner: str = DIRECT,
    ) -> Answer:
        """Lease what is ready for ``stage`` to ``worker``: up to ``most`` rows, groups for stages that take groups, or a
        train batch; waiting up to ``wait`` seconds for some. ``columns``: which to fetch, those that the stage needs by
        default. ``version``: the policy version that a rollout has loaded, by default what it was last told to be by
        :meth:`notify`. ``lease`` in seconds. ``owner``, here and in all calls: the proven identity of the caller, to which
        the lease is bound. Raises NotExternal, WeightsTooOld, Misfit, ColumnError."""
        self._external(stage)
        if stage == "rollout":
            version = await self._version(worker, version, owner)
        lease = lease or self.recipe.pipeline.lease_seconds
        with self._timesheets.claiming(stage, worker) as sheet:
            return await self._claimed(stage, worker, most, columns, version, wait, lease, sheet, owner)

    async def _claimed(
        self,
        stage: str,
        worker: str,
        most: int,
        columns: Sequence[str],
        version: int | None,
        wait: float,
        lease: float,
        sheet: StageTime,
        owner: str,
    ) -> Answer:
        deadline = time.monotonic() + wait
        most = min(most, MOST_ROWS // (self.recipe.algorithm.group_size if stage in GROUPS else 1))
        while True:
            state, reason, position = await self.index.state()
            topics, due = {"state": position}, WAIT_SECONDS
            if state == CLAIMED:
                dock = await self._warehouses()
                generated = version if stage == "rollout" else None
                lessee = f"{PREFIX}{worker}"
                found = await self.index.claim(stage, lessee, max(most, 1), lease, generated, dock.home, owner=owner)
                if isinstance(found, Claim):
                    experience = await self._experience(found, columns)
                    self._timesheets.took(sheet, found.token, len(found), lease, version)
                    return await self._answer(experience, state, reason)
                if version is not None:
                    await self._refuse_old(stage, version)
                topics[found.topic], due = found.wait, min(found.due or due, due)
            left = deadline - time.monotonic()
            if state in OVER or left <= 0:
                return await self._answer(None, state, reason)
            await self.index.wait_any(topics, min(left, due))

    async def _answer(self, experience: Experience | None, state: str, reason: str) -> Answer:
        status = await self.index.status()
        return Answer(experience, state or "created", reason, status.published, status.trained)

    async def _version(self, worker: str, version: int | None, owner: str) -> int:
        """The version that a rollout's claim is made with."""
        if version is None:
            notified = await self.index.get(_loaded(worker, owner))
            if notified is None:
                raise Misfit(
                    "version", "is not known of this worker", "give it, or call weight_sync_notify with what was loaded"
                )
            version = int(notified)
        await self._refuse_unpublished(version)
        return version

    async def _refuse_unpublished(self, version: int) -> None:
        newest = (await self.index.status()).published
        if not 0 <= version <= newest:
            raise Misfit("version", f"{version} is not published", f"give one of 0 .. {newest}")

    async def _refuse_old(self, stage: str, version: int) -> None:
        """Nothing was there for ``version``; if there is for a newer one, say so instead of waiting."""
        status = await self.index.status([version])
        if version < status.published and await self.index.queue_depth(stage):
            raise WeightsTooOld(
                f"version {version} may make no tokens of the groups that wait, only of those below "
                f"{status.gates[version]}; load version {status.published} and claim again"
            )

    async def _experience(self, claim: Claim, columns: Sequence[str]) -> Experience:
        """The claim's rows; what cannot be fetched is handed back."""
        dock = await self._warehouses()
        try:
            wanted = list(columns) or await self._needed(claim.stage)
            found = await dock.fetch_packed(claim, wanted)
            positions, progress = list[int](), dict[str, Packed]()
            if claim.stage == "rollout":
                refs = claim.refs[dock.producer("response_ids")]
                positions = np.flatnonzero(refs["block"]).tolist()
                if positions:
                    progress = await dock.gather(refs[positions], list(PROGRESS))
        except BaseException:
            await asyncio.shield(self.index.hand_back(claim))
            raise
        seeds = [group_seed(self.recipe.seed, group) for group in claim.group.tolist()]
        return Experience(claim, found, (positions, progress), seeds)

    async def _needed(self, stage: str) -> list[str]:
        dock, config = await self._warehouses(), await self.index.config()
        return dock.schema.names(next(s["needs"] for s in config["stages"] if s["name"] == stage))

    async def put_experience(
        self, token: str, rows: Sequence[int], columns: Columns, *, park: bool = False, owner: str = DIRECT
    ) -> int:
        """Commit what was made of ``rows`` (ids) under a lease, or ``park`` it to be continued by whoever claims it next.
        Returns how many rows are left under the token. Raises LeaseLost, NotExternal, Misfit, ColumnError, IndexRefused."""
        claim, left = await self._lease(token, owner)
        positions = _positions(claim, rows)
        dock, part = await self._warehouses(), claim.part(positions)
        if claim.stage == "update":
            raise Misfit("columns", "are not what a train batch is answered with", "tell the step that was made of it")
        if claim.stage != "rollout":
            if park:
                raise Misfit(
                    "park", f"is not for stage {claim.stage!r}", "park responses that have not ended, commit the rest"
                )
            config = await self.index.config()
            makes = next(s["makes"] for s in config["stages"] if s["name"] == claim.stage)
            check_columns(dock.schema, columns, dock.schema.names(makes), len(positions))
            if claim.stage == "reward":
                check_rewards(columns)
            if claim.stage == "reference":
                check_logprobs("ref_logprobs", columns["ref_logprobs"], torch.from_numpy(part.tokens.astype("int64")))
            await dock.commit(claim, positions, columns)
            return self._put(part, left - len(positions), int(part.tokens.sum()))
        wanted = PROGRESS if park else tuple(column.name for column in RESPONSE)
        check_columns(dock.schema, columns, wanted, len(positions))
        newest = (await self.index.status()).published
        made = check_responses(columns, await self.terms(), newest, parked=park)
        await self._refuse_stale(part, [oldest for oldest, _ in made])
        put = dock.park if park else dock.commit
        await put(claim, positions, columns, generated=made)
        begun = int(part.tokens.sum())  # by whoever had parked them
        return self._put(part, left - len(positions), sum(tokens for _, tokens in made) - begun, park)

    def _put(self, part: Claim, left: int, tokens: int, park: bool = False) -> int:
        self._timesheets.put(part.token, len(part), tokens, left, parked=park)
        return left

    async def _refuse_stale(self, claim: Claim, oldest: Sequence[int]) -> None:
        """No token may be of a version that was not allowed to touch its group."""
        versions = sorted(set(oldest))
        gates = (await self.index.status(versions)).gates
        for group, version in zip(claim.group.tolist(), oldest, strict=True):
            if group >= gates[version]:
                raise WeightsTooOld(
                    f"column 'versions': version {version} may make no tokens of group {group}, only of those below "
                    f"{gates[version]}; generate with the version that was claimed for, or with a newer one"
                )

    async def train(self, token: str, step: int, metrics: Mapping[str, float], *, owner: str = DIRECT) -> int:
        """An optimizer step was made of all rows under the token: ``step`` is the version that the claim told as trained.
        ``metrics`` go into the step's event. Returns the trainer's new version, to be published next. Raises LeaseLost,
        NotExternal, BoundBroken, IndexRefused."""
        claim, _ = await self._lease(token, owner)
        if claim.stage != "update":
            raise Misfit("step", f"is not for stage {claim.stage!r}", "put the columns that it makes")
        reward = (await (await self._warehouses()).fetch_packed(claim, ["reward"]))["reward"].values
        ledger, now = await self.index.ledger(), time.time()
        since = float(await self.index.get("stepped") or now)
        stale = (step - claim.oldest_version.astype(int)).tolist()
        event = {
            "loss": float("nan"),
            **step_event(step, claim, reward, stale, metrics),
            "tokens_generated": ledger["generated_tokens"],
            "tokens_trained": ledger["trained_tokens"] + int(claim.tokens.sum()),
            "tokens_filtered": ledger["filtered_tokens"],
            "seconds": now - since,
            "train_seconds": now - since,
        }
        version = await self.index.train(claim, step, event)
        self._put(claim, 0, int(claim.tokens.sum()))
        await self.index.put("stepped", repr(now))
        await self.index.emit("ledger", await self.index.ledger())
        return version

    async def replay(self, step: int) -> Experience:
        """The rows of a step that was trained and is not covered by a checkpoint, without a lease: what an external trainer
        that lost its state makes again. Raises NotExternal, StaleHandle."""
        self._external("update")
        claim = await self.index.replay(step)
        claim.stage = "update"
        return await self._experience(claim, ())

    async def replayed(self, step: int) -> Answer:
        """:meth:`replay` as an answer."""
        experience = await self.replay(step)
        state, reason, _ = await self.index.state()
        return await self._answer(experience, state, reason)

    async def renew(self, token: str, lease: float | None = None, *, owner: str = DIRECT) -> float:
        """Hold a lease for another ``lease`` seconds from now, which are returned. Raises LeaseLost, NotExternal."""
        claim, _ = await self._lease(token, owner)
        lease = lease or self.recipe.pipeline.lease_seconds
        if token not in await self.index.renew(claim.stage, [token], lease, owner):
            self._timesheets.ended(token)
            raise LeaseLost(f"token {token} has no lease any more: it expired")
        self._timesheets.renewed(token, lease)
        return lease

    async def release(self, token: str, *, owner: str = DIRECT) -> None:
        """Give back what is left under a lease, to be claimed by others at once. Harmless when it has ended, or is not the
        owner's."""
        found = await self.index.lease(token, owner)
        if found is None:
            return
        self._external(found[0].stage)
        await self.index.hand_back(found[0])
        self._timesheets.ended(token)

    async def _lease(self, token: str, owner: str) -> tuple[Claim, int]:
        """The claim under ``token``, and how many of its rows are left. A lease of another owner is answered as an ended one
        is, so that nothing can be learnt of it."""
        found = await self.index.lease(token, owner)
        if found is None:
            raise LeaseLost(
                f"token {token} has no lease any more: it expired, all of its rows are committed, or another caller has it"
            )
        self._external(found[0].stage)
        return found

    # ── weights ──

    async def weights(self, after: int = -1, wait: float = 0.0) -> Published | None:
        """The published version, when it is newer than ``after``; waits up to ``wait`` seconds for one."""
        if not self.recipe.external.stages:
            raise NotExternal(
                "external.stages is empty: the run is its own workers' alone; open one with some stage in it"
            )
        deadline = time.monotonic() + wait
        while True:
            newest = await self.index.published_weights()
            if newest.record and newest.version > after:
                return Published.from_record(newest.record)
            state, _, position = await self.index.state()
            left = deadline - time.monotonic()
            if left <= 0 or state in OVER:
                return None
            await self.index.wait_any({"version": newest.wait, "state": position}, min(left, WAIT_SECONDS))

    async def read_weights(self, version: int) -> tuple[Published, dict[str, torch.Tensor]]:
        """A private, verified copy of one of the two newest versions. Raises WeightsGone."""
        record = await self.index.weights_record(version)
        if not record:
            raise WeightsGone(f"weights of version {version} are not held; ask for the newest")
        published = Published.from_record(record)
        try:
            return published, await asyncio.to_thread((await self._weight_store()).read, published)
        except WeightsDamaged as damaged:
            raise WeightsGone(f"{damaged}; ask for the newest") from None

    async def notify(
        self,
        worker: str,
        version: int,
        *,
        exposed: float = 0.0,
        hidden: float = 0.0,
        nbytes: int = 0,
        owner: str = DIRECT,
    ) -> None:
        """``worker`` has loaded ``version``: its claims are made with it from now on. ``exposed`` seconds it could make no
        token for that, ``hidden`` it went on beside. Raises Misfit for a version that is not published."""
        await self._refuse_unpublished(version)
        await self.index.put(_loaded(worker, owner), str(version))
        record = await self.index.weights_record(version)
        event = {
            "worker": f"{PREFIX}{worker}",
            "version": version,
            "bytes": nbytes or (record["nbytes"] if record else 0),
        }
        seconds = {"exposed_seconds": exposed, "hidden_seconds": hidden, "publish_seconds": 0.0}
        await self.index.emit("sync", event | seconds)

    async def publish(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], *, covered: int = 0
    ) -> Published:
        """An external trainer's weights after its step: ``version`` is what :meth:`train` returned, or the version that the
        run begins with. Its own checkpoint covers the steps below ``covered``; at most checkpoint.every steps are kept for
        :meth:`replay`. Raises NotExternal, Misfit."""
        wanted = await self.may_publish(version)
        began, store = time.monotonic(), await self._weight_store()
        published = await asyncio.to_thread(store.publish, version, checked_weights(weights, wanted))
        await self.index.publish_weights(version, published.record())
        told = {"worker": f"{PREFIX}update", "version": version, "bytes": published.nbytes}
        seconds = {"publish_seconds": time.monotonic() - began, "exposed_seconds": 0.0, "hidden_seconds": 0.0}
        await self.index.emit("sync", told | seconds)
        await self.index.release_steps(max(covered, version - self.recipe.checkpoint.every))
        return published

    async def may_publish(self, version: int, layout: Layout | None = None) -> Layout | None:
        """The names, dtypes and shapes that the weights of ``version`` must have (None: any, the model is not known). Raises
        NotExternal, NotBegun, Misfit unless ``version`` is what has to be published next, and unless ``layout`` fits where
        it is given, and NoRoom when shared memory has not the bytes for it."""
        self._external("update")
        place, terms = await self.place(), await self.terms()
        newest = await self.index.published_weights()
        trained = (await self.index.status()).trained
        if version != trained or (newest.record and version <= newest.version):
            published = f"version {newest.version} is published" if newest.record else "none is published"
            raise Misfit(
                "version",
                f"{version} cannot be published: the trainer is at {trained}, and {published}",
                f"publish {trained}",
            )
        wanted = terms.weights
        if wanted is None and newest.record:
            wanted = {t.name: (t.dtype, t.shape) for t in Published.from_record(newest.record).tensors}
        if layout is not None:
            check_layout(layout, wanted)
            if nbytes_of(layout) > (free := shutil.disk_usage(place.shared).free):
                raise NoRoom(f"weights: {nbytes_of(layout)} bytes do not fit into shared memory, where {free} are free")
        return wanted

    # ── what is known of the run ──

    async def terms(self) -> Terms:
        """Raises NotBegun before the run's workers have said them."""
        if self._terms is None:
            told = await self.index.get(TERMS)
            if told is None:
                raise NotBegun(f"run {self.index.run!r} has not begun; wait until its state is 'running'")
            self._terms = Terms.from_json(told)
        return self._terms

    async def place(self) -> RunPaths:
        """Raises NotBegun."""
        told = await self.index.get("place")
        if told is None:
            raise NotBegun(f"run {self.index.run!r} has not begun; wait until its state is 'running'")
        return RunPaths.from_json(told)

    def _external(self, stage: str) -> None:
        if stage not in self.recipe.external.stages:
            raise NotExternal(
                f"stage {stage!r} is done by the run's own workers; open a run with external.stages = [{stage!r}]"
            )

    async def _weight_store(self) -> WeightStore:
        if self._store is None:
            self._store = WeightStore((await self.place()).shared)
        return self._store

    async def _warehouses(self) -> Dock:
        async with self._opening:
            if self._dock is None:
                dock = Dock(
                    self.index,
                    self.schema,
                    worker=self.worker,
                    directory=(await self.place()).shared,
                    lease=self.recipe.pipeline.lease_seconds,
                    slab=0,  # whoever kills this leaves no slab behind that nobody would close
                    secret=(await self.index.get("secret") or "").encode(),
                    tls=self.recipe.pipeline.tls_contexts(),
                )
                await self.index.forget_worker(self.worker)  # blocks that a former life held open
                await dock.enter()
                self._dock = dock
            return self._dock


def _loaded(worker: str, owner: str) -> str:
    """The document of the index that says which version a worker has loaded. Owners cannot name each other's workers."""
    return f"loaded:{owner}:{worker}"


def _positions(claim: Claim, rows: Sequence[int]) -> list[int]:
    """Where in ``claim`` the rows with these ids are."""
    at = {row: position for position, row in enumerate(claim.row.tolist())}
    if lost := [row for row in rows if row not in at]:
        raise LeaseLost(f"row {lost[0]} is not held by token {claim.token}; put rows that its claim told, once")
    if len(set(rows)) != len(rows) or not rows:
        raise Misfit("rows", "are none, or hold one twice", "give the id of each row that is put, once")
    return [at[row] for row in rows]
