"""Environment: opens a trajectory for each row of a group, and answers the policy's turns.

    claim groups ──▶ open each row's environment ─▶ the first observation ──┐
                                                                            ▼
    claim rows whose turn has ended ──▶ step ──▶ the next observation ──▶ park for rollout
       ▲                                  └─ it was the last turn ──▶ commit: the row is a response now
       └── any turn, from any rollout worker ◀──────────────────────────────┘

Waits for: rows, an environment's answer. What is answered while a commit is under way goes out
together with the next one. The environments live in this worker. When it dies, those that are
replayable are opened again and given the recorded turns; the trajectories of others begin again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from tensordict import TensorDict

from pipeline.first_of import cancel_all
from pipeline.index.claims import Claim, Handle
from pipeline.index.errors import LeaseLost
from pipeline.warehouse.dock import Dock
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Parked, Written
from stages.environments.interface import EnvironmentFailed
from stages.flow.catalogue import ENVIRONMENT
from stages.rollout.stage import Rollout
from stages.trajectories.progress import (
    Ending,
    Progress,
    ended_columns,
    parked_columns,
    parked_progress,
)
from stages.trajectories.trajectory import EnvironmentUnusable, Episode, Trajectories

log = structlog.get_logger()

TEXTS = ("given", "fields")


@dataclass
class _Row:
    """The row at ``position`` of a claim, and its trajectory."""

    claim: Claim
    handle: Handle
    position: int
    episode: Episode


class Environments(Stage):
    """The stage. ``concurrency``: trajectories that it opens or answers at the same time.
    ``on_error``: a trajectory whose environment fails has no reward, so that its group is dropped,
    or the reward 0; or the run ends. ``end_token``: the only token of a trajectory that has failed
    before it had one. ``together``: rows that were claimed together are handed on together."""

    name = ENVIRONMENT
    fetches: tuple[str, ...] = ()  # TEXTS, of rows whose environment is to be opened

    def __init__(
        self,
        dock: Dock,
        trajectories: Trajectories,
        *,
        group_size: int,
        concurrency: int,
        end_token: int = 0,
        together: bool = False,
        on_error: Literal["drop", "zero", "fail"] = "drop",
    ) -> None:
        self.dock = dock
        self.trajectories = trajectories
        self.on_error = on_error
        self._group_size = group_size
        self._concurrency = concurrency
        self._end_token = end_token
        self._returns = asyncio.ALL_COMPLETED if together else asyncio.FIRST_COMPLETED

    def room(self, held: int) -> float:
        return (self._concurrency - held) / self._group_size

    def figures(self) -> Mapping[str, Any]:
        trajectories = self.trajectories
        return {
            "trajectories": {"open": len(trajectories.opened), **trajectories.seen.counts()},
        }

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        await self._close_gone()
        progress = await parked_progress(self.dock, claim)
        rows_claimed = [
            _Row(
                claim,
                handle,
                position,
                Episode(
                    self.trajectories,
                    handle.row,
                    handle.group,
                    handle.place,
                    progress=progress.get(position) or Progress(),
                    opened=self.trajectories.opened.get(handle.row),
                ),
            )
            for position, handle in enumerate(claim.rows)
        ]
        await self._read_columns([row for row in rows_claimed if not row.episode.is_waited_for])
        tasks = [asyncio.create_task(self._advance(row)) for row in rows_claimed]
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=self._returns)
                answered = sorted((task.result() for task in done), key=lambda row: row.position)
                if going_on := [row for row in answered if row.episode.ending is None]:
                    yield self._parked(going_on)
                if ended := [row for row in answered if row.episode.ending is not None]:
                    yield await self._ended(ended)
        finally:
            await cancel_all(*tasks)

    async def _read_columns(self, rows: Sequence[_Row]) -> None:
        """Read the prompt's columns of ``rows``, which are of one claim."""
        if not rows:
            return
        part = rows[0].claim.part([row.position for row in rows])
        texts = await self.dock.fetch(part, TEXTS)
        for row, given, fields in zip(rows, texts["given"], texts["fields"], strict=True):
            row.episode.columns = {**json.loads(fields), "prompt": json.loads(given)}

    # ── one row ──

    async def _advance(self, row: _Row) -> _Row:
        """Open the row's environment, or have it answer the last turn."""
        episode = row.episode
        if (
            not episode.columns and not episode.is_waited_for
        ):  # its process has died since the claim
            await self._read_columns([row])
        try:
            await episode.advance()
        except EnvironmentFailed as failed:
            await self._fail(row, failed)
        except BaseException:  # cancelled in the middle of a call: it knows more than the row
            await episode.close()
            raise
        if episode.ending is not None:
            self.trajectories.seen.endings[episode.ending] += 1
        return row

    async def _fail(self, row: _Row, failed: EnvironmentFailed) -> None:
        """End a trajectory whose environment has failed. Raises EnvironmentUnusable; LeaseLost where
        another claim of the row has closed it meanwhile."""
        episode = row.episode
        if not episode.is_current:
            raise LeaseLost(f"row {row.handle.row} is answered under a later lease")
        place = f" ({failed.place})" if failed.place else ""
        group, at = row.handle.group, row.handle.place
        if self.on_error == "fail":
            raise EnvironmentUnusable(f"environment: group {group}, place {at}: {failed}{place}")
        log.warning("environment failed", group=group, place=at, reason=f"{failed}{place}")
        await episode.close()
        episode.fail(Ending.FAILED if self.on_error == "zero" else Ending.DROPPED, self._end_token)

    async def _close_gone(self) -> None:
        """Close overdue environments whose rows have gone: their groups were dropped or lost."""
        trajectories = self.trajectories
        for number, opened in list(trajectories.opened.items()):
            if not trajectories.is_overdue(opened):
                continue
            group = await self.dock.index.inspect(opened.group)
            if group is None or number not in group[0].row:
                trajectories.opened.pop(number, None)
                await trajectories.caller.close(opened.key)

    # ── outputs ──

    def _parked(self, rows: Sequence[_Row]) -> Parked:
        return Parked(
            [row.position for row in rows],
            rows=parked_columns([row.episode.progress for row in rows]),
            generated=[_generated(row) for row in rows],
            to=Rollout.name,
        )

    async def _ended(self, rows: Sequence[_Row]) -> Written:
        trajectories = [row.episode.progress for row in rows]
        generated = [_generated(row) for row in rows]
        if any(not tokens for _, tokens in generated):  # the present policy has made none of them
            version = (await self.dock.index.status()).published
            generated = [(oldest if tokens else version, tokens) for oldest, tokens in generated]
        endings = [
            Ending.FAILED if row.episode.ending is None else row.episode.ending for row in rows
        ]
        return Written(
            [row.position for row in rows],
            rows=ended_columns(trajectories, [row.episode.reward for row in rows], endings),
            generated=generated,
            turns=[len(each.turn_starts) for each in trajectories],
        )


def _generated(row: _Row) -> tuple[int, int]:
    """Return the oldest version of the row's tokens and how many the policy has made. The oldest one
    stays when its tokens are cut off."""
    oldest, tokens = row.episode.progress.generated
    before = row.handle.oldest_version
    return min(oldest, before) if tokens and before >= 0 else oldest, tokens
