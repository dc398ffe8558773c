"""The stages of a run that other programs execute: AsyncFlow's service interface, over the run's
index and warehouses.

    put_prompts ─▶ external prompts ─▶ gate ─▶ … ─▶ get_experience ─▶ (their engine) ─▶ put_experience ─▶ the next stage
                                                         ▲ lease, fencing token             └ commit, or park
    weights ─▶ (they load) ─▶ weight_sync_notify ─▶ the version with which their next rows are claimed

Claims are not stored here: the token is all that a worker needs, so the process that serves this
may be restarted at any time. External workers have the same guarantees as the run's own: rows of an
expired lease are delivered again, a commit under it is refused, and no token is made with a version
that is too old for its group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchestration.external.accounting import OVER, PREFIX, StageTimes
from orchestration.external.errors import NotExternal, WeightsTooOld
from orchestration.external.experience import Experience, ExperienceRow
from orchestration.external.weights import DIRECT, WAIT_SECONDS, ExternalWeights
from orchestration.guard.rules import TOKENIZER
from orchestration.recipe.flow import flow_of
from orchestration.recipe.schema import Recipe
from orchestration.rewards.functions import scored_by
from orchestration.state.documents import LOADED, RUN_RECIPE, STEPPED
from pipeline.data.columns import Packed, Schema
from pipeline.documents.flow import SECRET, STATE
from pipeline.index.address import redacted
from pipeline.index.client import Claim, Index, LeaseLost
from pipeline.warehouse.dock import Dock
from stages.flow.catalogue import RESPONSE, TOKEN_REWARDS
from stages.prompts.external import put_prompts
from stages.rollout.external_checks import (
    Columns,
    Misfit,
    check_columns,
    check_logprobs,
    check_responses,
    check_rewards,
    check_token_rewards,
    check_tokenizer,
)
from stages.rollout.stage import PROGRESS, group_seed
from stages.training.update import REWARDS, step_event

# the state in which rows can be claimed: a run that starts has no warehouse yet
CLAIMED = "running"
MOST_ROWS = 4096  # of one claim
GROUPS = ("rollout", "reference")  # stages that take whole groups


class External(ExternalWeights):
    """The interface of one run to external stages.

    ``worker`` names the process that serves it. An earlier process of that name that was killed
    leaves no block open. Methods raise IndexUnreachable when the index cannot be reached.
    ``owner``, in all of them: the authenticated identity of the caller, which owns the leases of
    its claims.
    """

    def __init__(self, index: Index, recipe: Recipe, *, worker: str = "external") -> None:
        super().__init__(index, recipe)
        self.worker = worker
        self._dock: Dock | None = None
        self._opening = asyncio.Lock()
        self._times = StageTimes(index)

    @classmethod
    async def open(cls, url: str, run: str, *, worker: str = "external") -> External:
        """Open the run with id ``run`` on the index at ``url``.

        Raises LookupError when the index has no such run.
        """
        index = Index(url, run)
        try:
            recipe = await RUN_RECIPE.get(index)
            if recipe is None:
                raise LookupError(
                    f"run: {run!r} is not in index {redacted(url)}; give the id of a run that is"
                )
        except BaseException:
            await index.close()
            raise
        return cls(index, recipe, worker=worker)

    @property
    def schema(self) -> Schema:
        """The run's columns."""
        return flow_of(self.recipe).schema

    async def close(self) -> None:
        """Close the warehouses and the connections. Leases stay valid."""
        await self._times.close()
        if self._dock is not None:
            await self._dock.close()
        await self.index.close()

    # ── prompts ──

    async def put_prompts(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        first: int | None = None,
        last: bool = False,
        timeout: float = 30.0,
    ) -> int:
        """Add prompts, as :func:`stages.prompts.external.put_prompts`.

        Raises NotExternal when the run has its own.
        """
        if self.recipe.prompts.source != "external":
            problem = (
                f"prompts.source = {self.recipe.prompts.source!r}: the run has its own prompts"
            )
            raise NotExternal(problem, "open one with prompts.source = 'external'")
        column = self.recipe.prompts.column
        return await put_prompts(
            self.index, rows, column=column, first=first, last=last, timeout=timeout
        )

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
        tokenizer: str | None = None,
        owner: str = DIRECT,
    ) -> Experience:
        """Lease up to ``most`` rows of ``stage`` to ``worker`` (groups for stages that take groups,
        one batch for a trainer), waiting up to ``wait`` seconds for some.

        ``columns``: those to fetch; default: those that the stage needs. ``version``: the policy
        version that a rollout has loaded; default: that of its last :meth:`notify`. ``lease`` in
        seconds. ``tokenizer``: fingerprint of the worker's vocabulary
        (:func:`stages.rollout.external_checks.fingerprint`), refused where it is not the run's. Raises
        NotExternal, WeightsTooOld, Misfit, ColumnError."""
        self._check_external(stage)
        if tokenizer is not None and TOKENIZER not in self.recipe.guard.off:
            check_tokenizer(tokenizer, await self.terms())
        if stage == "rollout":
            version = await self._version(worker, version, owner)
        lease = lease or self.recipe.pipeline.lease_seconds
        with self._times.claiming(stage, worker) as time_spent:
            claim, state, reason = await self._claim(
                stage, worker, most, version, wait, lease, owner
            )
            experience = await self._experience(stage, claim, lease, state, reason, columns)
            if claim is not None:
                time_spent.begin(claim.token, len(claim), lease, version)
            return experience

    async def _claim(
        self,
        stage: str,
        worker: str,
        most: int,
        version: int | None,
        wait: float,
        lease: float,
        owner: str,
    ) -> tuple[Claim | None, str, str]:
        """Return a claim, or None when ``wait`` seconds passed or the run ended, and the run's
        state with its reason."""
        deadline = time.monotonic() + wait
        most = max(
            1, min(most, MOST_ROWS // (self.recipe.algorithm.group_size if stage in GROUPS else 1))
        )
        generated = version if stage == "rollout" else None
        while True:
            state, reason, position = await self.index.state()
            topics = {STATE: position}
            due = WAIT_SECONDS
            if state == CLAIMED:
                home = (await self._warehouses()).home
                outcome = await self.index.claim(
                    stage, f"{PREFIX}{worker}", most, lease, generated, home, owner=owner
                )
                if isinstance(outcome, Claim):
                    return outcome, state, reason
                if version is not None:
                    await self._refuse_old(stage, version)
                topics[outcome.topic], due = outcome.wait, min(outcome.due or due, due)
            remaining = deadline - time.monotonic()
            if state in OVER or remaining <= 0:
                return None, state, reason
            await self.index.wait_any(topics, min(remaining, due))

    async def _experience(
        self,
        stage: str,
        claim: Claim | None,
        lease: float,
        state: str,
        reason: str,
        columns: Sequence[str] = (),
    ) -> Experience:
        """Return the rows of ``claim``, or the answer without rows.

        Gives back rows that cannot be fetched.
        """
        try:
            status = await self.index.status()
            empty = Experience(
                stage, None, lease, state or "created", reason, status.published, status.trained
            )
            if claim is None:
                return empty
            rows = [
                ExperienceRow(*row, group_seed(self.recipe.seed, row.group)) for row in claim.rows
            ]
            column_values, begun = await self._fetch(claim, columns)
            sampling = (await self.terms()).sampling if stage == "rollout" else {}
        except BaseException:
            if claim is not None:
                await asyncio.shield(self.index.hand_back(claim))
            raise
        return replace(
            empty,
            token=claim.token,
            rows=rows,
            columns=column_values,
            begun=begun,
            sampling=sampling,
        )

    async def _fetch(
        self, claim: Claim, columns: Sequence[str]
    ) -> tuple[dict[str, Packed], tuple[list[int], dict[str, Packed]]]:
        """Return the columns of ``claim`` (default: those that its stage needs), and its parked
        rows: their ids and what they have so far."""
        dock = await self._warehouses()
        column_values = await dock.fetch_packed(
            claim, list(columns) or dock.schema.names(await self._of_stage(claim, "needs"))
        )
        if claim.stage != "rollout":
            return column_values, ([], {})
        refs = claim.refs[await dock.warehouses.producer("response_ids")]
        positions = np.flatnonzero(refs["block"])
        progress = await dock.gather(refs[positions], list(PROGRESS)) if len(positions) else {}
        return column_values, (claim.row[positions].tolist(), progress)

    async def _of_stage(self, claim: Claim, what: str) -> Any:
        """Return the columns that the stage of ``claim`` needs or makes, as the run declares them.
        ``what``: "needs" or "makes"."""
        config = await self.index.config()
        return next(stage[what] for stage in config["stages"] if stage["name"] == claim.stage)

    async def _version(self, worker: str, version: int | None, owner: str) -> int:
        """Return the version with which a rollout claims."""
        if version is None:
            version = await LOADED.get(self.index, owner=owner, worker=worker)
            if version is None:
                raise Misfit(
                    "version",
                    "is not known of this worker",
                    "give it, or call weight_sync_notify with what was loaded",
                )
        await self._refuse_unpublished(version)
        return version

    async def _refuse_old(self, stage: str, version: int) -> None:
        """Raises WeightsTooOld when rows wait that a newer version than ``version`` may
        generate."""
        status = await self.index.status([version])
        if version < status.published and await self.index.queue_depth(stage):
            raise WeightsTooOld(
                f"version {version} may make no tokens of the groups that wait, only of those "
                f"below {status.gates[version]}; load version {status.published} and claim again"
            )

    async def put_experience(
        self,
        token: str,
        rows: Sequence[int],
        columns: Columns,
        *,
        park: bool = False,
        owner: str = DIRECT,
    ) -> int:
        """Commit ``columns`` of ``rows`` (ids) under a lease, or park them (``park``) to be
        continued by any worker. Return the number of rows that the lease still holds. Raises
        LeaseLost, NotExternal, Misfit, ColumnError, IndexRefused."""
        claim, held_rows = await self._lease(token, owner)
        positions = _positions(claim, rows)
        dock = await self._warehouses()
        part = claim.part(positions)
        if claim.stage == "update":
            raise Misfit(
                "columns", "are not taken for a train batch", "give the step that was made of it"
            )
        if claim.stage != "rollout":
            if park:
                fix = "park responses that have not ended, commit the rest"
                raise Misfit("park", f"is not for stage {claim.stage!r}", fix)
            makes = dock.schema.names(await self._of_stage(claim, "makes"))
            check_columns(dock.schema, columns, makes, len(positions))
            if claim.stage == "reward":
                check_rewards(columns)
                if TOKEN_REWARDS in columns:
                    await self._check_token_rewards(part, columns)
            if claim.stage == "reference":
                responses = await dock.fetch_packed(part, ["response_ids"])
                lengths = responses["response_ids"].lengths()
                check_logprobs("ref_logprobs", columns["ref_logprobs"], lengths)
            await dock.commit(claim, positions, columns)
            return self._times.put(part, held_rows - len(positions), int(part.tokens.sum()))
        wanted = PROGRESS if park else tuple(RESPONSE)
        check_columns(dock.schema, columns, wanted, len(positions))
        newest = (await self.index.status()).published
        generations = check_responses(columns, await self.terms(), newest, parked=park)
        await self._refuse_stale(part, [oldest for oldest, _ in generations])
        put = dock.park if park else dock.commit
        await put(claim, positions, columns, generated=generations)
        parked_tokens = int(part.tokens.sum())  # made before the rows were parked
        return self._times.put(
            part,
            held_rows - len(positions),
            sum(tokens for _, tokens in generations) - parked_tokens,
            park=park,
        )

    async def _check_token_rewards(self, part: Claim, columns: Columns) -> None:
        dock = await self._warehouses()
        responses = await dock.fetch_packed(part, ["response_ids"])
        check_token_rewards(columns[TOKEN_REWARDS], responses["response_ids"].lengths())

    async def _refuse_stale(self, claim: Claim, oldest: Sequence[int]) -> None:
        """Raises WeightsTooOld when a token of ``claim`` is of a version that is too old for its
        group."""
        versions = sorted(set(oldest))
        gates = (await self.index.status(versions)).gates
        for group, version in zip(claim.group.tolist(), oldest, strict=True):
            if group >= gates[version]:
                raise WeightsTooOld(
                    f"column 'versions': version {version} may make no tokens of group {group}, "
                    f"only of those below {gates[version]}; generate with the version that was "
                    f"claimed for, or with a newer one"
                )

    async def train(
        self, token: str, step: int, metrics: Mapping[str, float], *, owner: str = DIRECT
    ) -> int:
        """End the train batch under ``token``: the trainer made optimizer step ``step`` of it, the one
        after the ``trained`` ones of its claim.

        ``metrics`` go into the step's event. Returns the
        trainer's new version, to be published next. Raises LeaseLost, NotExternal, BoundBroken,
        IndexRefused.
        """
        claim, _ = await self._lease(token, owner)
        if claim.stage != "update":
            raise Misfit(
                "step", f"is not for stage {claim.stage!r}", "put the columns that it makes"
            )
        functions = scored_by(self.recipe)
        names = list(REWARDS[: 1 + bool(functions)])
        dock = await self._warehouses()
        names = [name for name in names if name in dock.schema]
        rows = await dock.fetch(claim, names)
        rewards = {name: rows[name] for name in names}
        ledger, amounts = await self.index.ledger(), await self.index.amounts()
        now = time.time()
        since = await STEPPED.get(self.index) or now
        stale = (step - 1 - claim.oldest_version.astype(int)).tolist()
        spent = (now - since, now - since)
        calls = (functions, amounts)
        event = step_event(step, claim, rewards, stale, metrics, ledger, spent, calls)
        version = await self.index.train(claim, step - 1, event, amounts)
        self._times.put(claim, 0, int(claim.tokens.sum()))
        await STEPPED.put(self.index, now)
        await self.index.emit(await self.index.ledger_event())
        return version

    async def replay(self, step: int) -> Experience:
        """Return the rows of a trained step that no checkpoint covers, without a lease, for an
        external trainer that lost its state. Raises NotExternal, StaleHandle."""
        self._check_external("update")
        claim = await self.index.replay(step - 1)
        claim.stage = "update"
        state, reason, _ = await self.index.state()
        return await self._experience(
            "update", claim, self.recipe.pipeline.lease_seconds, state, reason
        )

    async def renew(self, token: str, lease: float | None = None, *, owner: str = DIRECT) -> float:
        """Hold a lease for ``lease`` seconds from now, and return these.

        Raises LeaseLost, NotExternal.
        """
        claim, _ = await self._lease(token, owner)
        lease = lease or self.recipe.pipeline.lease_seconds
        if token not in await self.index.renew(claim.stage, [token], lease, owner):
            self._times.ended(token)
            raise LeaseLost(f"token {token} has no lease any more: it expired")
        self._times.renewed(token, lease)
        return lease

    async def release(self, token: str, *, owner: str = DIRECT) -> None:
        """Give back the rows that a lease still holds, to be claimed by others at once.

        Does nothing to a lease that has ended, or that another owner has.
        """
        lease = await self.index.lease(token, owner)
        if lease is None:
            return
        self._check_external(lease[0].stage)
        await self.index.hand_back(lease[0])
        self._times.ended(token)

    async def _lease(self, token: str, owner: str) -> tuple[Claim, int]:
        """Return the claim under ``token`` and the number of rows that it still holds.

        A lease of another owner is treated as one that has ended, so that a caller learns nothing
        of it.
        """
        lease = await self.index.lease(token, owner)
        if lease is None:
            raise LeaseLost(
                f"token {token} has no lease any more: it expired, all of its rows are committed, "
                f"or another caller has it"
            )
        self._check_external(lease[0].stage)
        return lease

    async def _warehouses(self) -> Dock:
        async with self._opening:
            if self._dock is None:
                dock = Dock(
                    self.index,
                    self.schema,
                    worker=self.worker,
                    directory=(await self.place()).shared,
                    lease=self.recipe.pipeline.lease_seconds,
                    slab=0,  # a process that is killed leaves no open slab
                    secret=await SECRET.get(self.index) or b"",
                    tls=self.recipe.pipeline.tls_contexts(),
                )
                # blocks that an earlier process of this name left open
                await self.index.forget_worker(self.worker)
                await dock.warehouses.enter()
                self._dock = dock
            return self._dock


def _positions(claim: Claim, rows: Sequence[int]) -> list[int]:
    """Return the positions in ``claim`` of the rows with these ids."""
    at = {row: position for position, row in enumerate(claim.row.tolist())}
    if lost := [row for row in rows if row not in at]:
        raise LeaseLost(
            f"row {lost[0]} is not held by token {claim.token}; put rows of its claim, each once"
        )
    if len(set(rows)) != len(rows) or not rows:
        raise Misfit(
            "rows", "is empty, or holds one twice", "give the id of each row that is put, once"
        )
    return [at[row] for row in rows]
