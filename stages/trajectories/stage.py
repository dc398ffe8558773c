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
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import structlog
from tensordict import TensorDict

from pipeline.first_of import cancel_all
from pipeline.index.claims import Claim, Handle
from pipeline.index.errors import LeaseLost
from pipeline.problems import Fatal
from pipeline.warehouse.dock import Dock
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Parked, Written
from stages.environments.dialogue.interface import Dialogue
from stages.environments.dialogue.program import ProgramDialogue
from stages.environments.interface import (
    EnvironmentCaller,
    EnvironmentDeclaration,
    EnvironmentFailed,
    Reply,
    Trajectory,
    TurnTokens,
)
from stages.flow.catalogue import ENVIRONMENT
from stages.rollout.stage import Rollout, group_seed
from stages.trajectories.progress import (
    Ending,
    Progress,
    ended_columns,
    parked_columns,
    parked_progress,
)
from stages.trajectories.writers import AppendingWriter, RequestWriter, Writer

log = structlog.get_logger()

COLUMN = "environment"  # of a prompt's row: which one, where the run has several
LARGEST_PLACE = 1 << 16
TEXTS = ("given", "fields")


@dataclass(frozen=True)
class Limits:
    """The limits of a trajectory.

    ``max_turns``. ``max_tokens``: of turns and observations together; a turn may have
    ``turn_tokens``, and the trajectory ends when a whole one has no room any more.
    ``step_seconds``: of one answer. ``trajectory_seconds``: of all, in one worker's life; it is
    looked at before and after an answer, and interrupts none.
    """

    max_turns: int
    max_tokens: int
    turn_tokens: int
    step_seconds: float
    trajectory_seconds: float


class EnvironmentUnusable(Fatal, RuntimeError):
    """An environment failed, and the recipe wants the run to end then (environment.on_error)."""


@dataclass
class _OpenTrajectory:
    """A trajectory whose environment was opened here. ``key``: another one each time that it is
    opened, so that a call of a lost lease never meets a later one. ``began``: by the monotonic
    clock. ``answered``: how many of the row's turns the environment was given; ``steps``: with those
    that were cut off since. ``wants_tokens``: it is given their tokens."""

    group: int
    key: str
    began: float
    writer: Writer
    answered: int = 0
    steps: int = 0
    wants_tokens: bool = False


@dataclass
class _Row:
    """The row at ``position`` of a claim. ``trajectory``: as it was opened here. ``columns``: of its
    prompt's row, read where its environment is to be opened. ``ending``: why it has ended; None: it
    goes on."""

    claim: Claim
    handle: Handle
    position: int
    progress: Progress
    trajectory: _OpenTrajectory | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    ending: Ending | None = None
    reward: float = math.nan


@dataclass
class Figures:
    """What the worker has seen since its process began. ``endings``: trajectories by why they have
    ended. ``remade``: those that began again because their environment was gone. ``cut_turns``: those
    that a program went back behind."""

    turns: int = 0
    cut_turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    observed_tokens: int = 0
    replayed: int = 0
    remade: int = 0
    endings: Counter[Ending] = field(default_factory=Counter)

    def counts(self) -> dict[str, int]:
        """Return all of it by name."""
        counts = {name: count for name, count in vars(self).items() if name != "endings"}
        ended = {f"ended_{ending.name.lower()}": n for ending, n in self.endings.items()}
        return {**counts, **ended}


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
        caller: EnvironmentCaller,
        declarations: Mapping[str, EnvironmentDeclaration],
        dialogue: Dialogue | ProgramDialogue,
        limits: Limits,
        *,
        seed: int,
        group_size: int,
        concurrency: int,
        end_token: int = 0,
        together: bool = False,
        on_error: Literal["drop", "zero", "fail"] = "drop",
    ) -> None:
        self.dock = dock
        self.caller = caller
        self.declarations = declarations
        self.dialogue = dialogue
        self.limits = limits
        self.seed = seed
        self.on_error = on_error
        self.seen = Figures()
        self._group_size = group_size
        self._concurrency = concurrency
        self._end_token = end_token
        self._returns = asyncio.ALL_COMPLETED if together else asyncio.FIRST_COMPLETED
        # by row; rows are never used again
        self._open: dict[int, _OpenTrajectory] = {}
        self._openings = itertools.count()

    def room(self, held: int) -> int:
        return (self._concurrency - held) // self._group_size

    def figures(self) -> Mapping[str, Any]:
        return {"trajectories": {"open": len(self._open), **self.seen.counts()}}

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        await self._close_gone()
        progress = await parked_progress(self.dock, claim)
        rows_claimed = [
            _Row(
                claim,
                handle,
                position,
                progress.get(position) or Progress(),
                self._open.get(handle.row),
            )
            for position, handle in enumerate(claim.rows)
        ]
        await self._read_columns([row for row in rows_claimed if not self._answers(row)])
        tasks = [asyncio.create_task(self._advance(row)) for row in rows_claimed]
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=self._returns)
                answered = sorted((task.result() for task in done), key=lambda row: row.position)
                if going_on := [row for row in answered if row.ending is None]:
                    yield self._parked(going_on)
                if ended := [row for row in answered if row.ending is not None]:
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
            row.columns = {**json.loads(fields), "prompt": json.loads(given)}

    # ── one row ──

    async def _advance(self, row: _Row) -> _Row:
        """Open the row's environment, or have it answer the last turn."""
        try:
            if not row.progress.turn_starts:
                await self._begin(row)
            elif row.trajectory is not None and self._is_overdue(row.trajectory):
                row.ending = Ending.TIMEOUT
                row.progress.turn_reward.append(math.nan)
                await self._end(row)
            elif await self._has_its_environment(row):
                await self._answer(row)
            else:
                self.seen.remade += 1
                row.progress = Progress()
                await self._begin(row)
        except EnvironmentFailed as failed:
            await self._fail(row, failed)
        except BaseException:  # cancelled in the middle of a call: it knows more than the row
            await self._close(row)
            raise
        if row.ending is not None:
            self.seen.endings[row.ending] += 1
        return row

    async def _begin(self, row: _Row) -> None:
        reply = await self._open_environment(row)
        if reply.done:
            raise EnvironmentFailed("its environment ended before the first turn")
        self._write(row, reply)
        if not self._has_room(row.progress):
            raise EnvironmentFailed(
                f"the first observation has {len(row.progress.token_ids)} tokens, and a turn of "
                f"rollout.max_tokens = {self.limits.turn_tokens} more does not fit "
                f"environment.max_tokens = {self.limits.max_tokens}"
            )
        row.progress.begin_turn()

    def _write(self, row: _Row, reply: Reply) -> None:
        """Append what ``reply`` adds; a program that goes on from an earlier point cuts off the
        turns after it."""
        progress = row.progress
        trajectory = self._live(row)
        turns, token_ids = trajectory.writer.write(reply, progress.turns)
        if turns < len(progress.turn_starts):
            self.seen.cut_turns += len(progress.turn_starts) - turns
            progress.cut(turns)
        progress.observe(token_ids)
        self.seen.observed_tokens += len(token_ids)
        trajectory.answered = turns
        trajectory.wants_tokens = reply.request is not None and reply.request.wants_tokens

    async def _open_environment(self, row: _Row, began: float | None = None) -> Reply:
        await self._close(row)
        key = f"{row.handle.row}.{next(self._openings)}"
        began = time.monotonic() if began is None else began
        row.trajectory = self._open[row.handle.row] = _OpenTrajectory(
            row.handle.group, key, began, self._writer()
        )
        seed = group_seed(self.seed, row.handle.group) * LARGEST_PLACE + row.handle.place
        name = self._environment_of(row)
        trajectory = Trajectory(key, row.columns, seed, name)
        waits = self.declarations[name].waits
        seconds = self.limits.trajectory_seconds if waits else self.limits.step_seconds
        return await self.caller.open(trajectory, seconds)

    def _writer(self) -> Writer:
        if isinstance(self.dialogue, ProgramDialogue):
            return RequestWriter(self.dialogue)
        return AppendingWriter(self.dialogue)

    def _environment_of(self, row: _Row) -> str:
        """Return which environment the row wants. Raises EnvironmentFailed."""
        if "" in self.declarations:
            return ""
        name = row.columns.get(COLUMN)
        if name not in self.declarations:
            raise EnvironmentFailed(
                f"the row has {COLUMN} = {name!r}; give one of {sorted(self.declarations)}"
            )
        return str(name)

    def _answers(self, row: _Row) -> bool:
        """Return whether the row's environment is open here and waits for the row's last turn."""
        trajectory = row.trajectory
        return (
            trajectory is not None
            and self.caller.knows(trajectory.key)
            and trajectory.answered == len(row.progress.turn_starts) - 1
        )

    async def _has_its_environment(self, row: _Row) -> bool:
        """Return whether the row's environment has answered all turns but the last one; one that is
        replayable is brought there."""
        trajectory = row.trajectory
        if self._answers(row):
            return True
        if not row.columns:  # its process has died since the claim
            await self._read_columns([row])
        began = None if trajectory is None else trajectory.began
        if not self.declarations[self._environment_of(row)].replayable:
            return False
        reply = await self._open_environment(row, began)
        progress = row.progress
        turns = progress.turns
        end = 0  # of what was compared
        for number, (begin, turn_ids) in enumerate(zip(progress.turn_starts, turns, strict=True)):
            if reply.done:
                return False
            observed = self._live(row).writer.write(reply, turns[:number])
            if observed != (number, progress.token_ids[end:begin]):  # it says something else now
                return False
            if number < len(turns) - 1:
                reply = await self._step(row, turn_ids, number)
            end = begin + len(turn_ids)
        self.seen.replayed += 1
        return True

    async def _step(self, row: _Row, turn_ids: Sequence[int], number: int) -> Reply:
        """Give the row's environment a turn: a truncated one is the last one."""
        trajectory = self._live(row)
        trajectory.answered += 1
        trajectory.steps += 1
        last = number == len(row.progress.turn_starts) - 1
        turn = trajectory.writer.turn(turn_ids, row.progress.truncated and last, number)
        if isinstance(self.dialogue, ProgramDialogue):
            tokens = self._tokens(row, number, self.dialogue.prefix_ids, trajectory.wants_tokens)
            turn = replace(turn, tokens=tokens)
        return await self.caller.step(trajectory.key, turn, self.limits.step_seconds)

    def _tokens(self, row: _Row, number: int, prompt_ids: list[int], is_wanted: bool) -> TurnTokens:
        """Return the tokens of a turn for the program that asked for it."""
        progress = row.progress
        begin = progress.turn_starts[number]
        token_ids = progress.turns[number]
        tokens = TurnTokens(len(prompt_ids) + begin, len(token_ids))
        if not is_wanted:
            return tokens
        logprobs = progress.logprobs[begin : begin + len(token_ids)]
        before = [*prompt_ids, *progress.token_ids[:begin]]
        return replace(tokens, prompt_ids=before, token_ids=token_ids, logprobs=logprobs)

    async def _answer(self, row: _Row) -> None:
        progress = row.progress
        turn_ids = progress.turns[-1]
        reply = await self._step(row, turn_ids, len(progress.turn_starts) - 1)
        self.seen.turns += 1
        self.seen.calls += reply.calls
        self.seen.failed_calls += reply.failed_calls
        progress.turn_reward.append(_number(reply.reward))
        row.ending = self._ending(row, reply)
        if row.ending is None:
            self._write(row, reply)
            if self._has_room(progress):
                progress.begin_turn()
            else:
                row.ending = Ending.TOKENS
        if row.ending is not None:
            await self._end(row)

    async def _end(self, row: _Row) -> None:
        """Ask for the reward that is due, and close the row's environment."""
        rewards = row.progress.turn_reward
        if row.ending is not Ending.DONE:
            last = await self.caller.finish(self._live(row).key, self.limits.step_seconds)
            rewards[-1] = _sum([rewards[-1], _number(last.reward)])
        row.reward = _sum(rewards)
        await self._close(row)

    def _has_room(self, progress: Progress) -> bool:
        return len(progress.token_ids) + self.limits.turn_tokens <= self.limits.max_tokens

    def _ending(self, row: _Row, reply: Reply) -> Ending | None:
        if reply.done:
            return Ending.DONE
        if row.progress.truncated:
            return Ending.TRUNCATED
        assert row.trajectory is not None
        if row.trajectory.steps >= self.limits.max_turns:
            return Ending.TURNS
        return Ending.TIMEOUT if self._is_overdue(row.trajectory) else None

    def _is_overdue(self, trajectory: _OpenTrajectory) -> bool:
        return time.monotonic() - trajectory.began >= self.limits.trajectory_seconds

    def _live(self, row: _Row) -> _OpenTrajectory:
        """Return the row's trajectory. Raises EnvironmentFailed where its environment has gone."""
        if row.trajectory is None or not self.caller.knows(row.trajectory.key):
            raise EnvironmentFailed("its environment is not open any more")
        return row.trajectory

    async def _fail(self, row: _Row, failed: EnvironmentFailed) -> None:
        """End a trajectory whose environment has failed. Raises EnvironmentUnusable; LeaseLost where
        another claim of the row has closed it meanwhile."""
        if self._open.get(row.handle.row) is not row.trajectory:
            raise LeaseLost(f"row {row.handle.row} is answered under a later lease")
        place = f" ({failed.place})" if failed.place else ""
        group, at = row.handle.group, row.handle.place
        if self.on_error == "fail":
            raise EnvironmentUnusable(f"environment: group {group}, place {at}: {failed}{place}")
        log.warning("environment failed", group=group, place=at, reason=f"{failed}{place}")
        await self._close(row)
        if not row.progress.token_ids:
            row.progress.observe([self._end_token])
        counts_as_zero = self.on_error == "zero"
        row.ending = Ending.FAILED if counts_as_zero else Ending.DROPPED
        row.reward = 0.0 if counts_as_zero else math.nan

    async def _close(self, row: _Row) -> None:
        if row.trajectory is not None:
            if self._open.get(row.handle.row) is row.trajectory:
                del self._open[row.handle.row]
            await self.caller.close(row.trajectory.key)

    async def _close_gone(self) -> None:
        """Close overdue environments whose rows have gone: their groups were dropped or lost."""
        for number, trajectory in list(self._open.items()):
            if not self._is_overdue(trajectory):
                continue
            group = await self.dock.index.inspect(trajectory.group)
            if group is None or number not in group[0].row:
                self._open.pop(number, None)
                await self.caller.close(trajectory.key)

    # ── outputs ──

    def _parked(self, rows: Sequence[_Row]) -> Parked:
        return Parked(
            [row.position for row in rows],
            rows=parked_columns([row.progress for row in rows]),
            generated=[_generated(row) for row in rows],
            to=Rollout.name,
        )

    async def _ended(self, rows: Sequence[_Row]) -> Written:
        trajectories = [row.progress for row in rows]
        generated = [_generated(row) for row in rows]
        if any(not tokens for _, tokens in generated):  # the present policy has made none of them
            version = (await self.dock.index.status()).published
            generated = [(oldest if tokens else version, tokens) for oldest, tokens in generated]
        endings = [Ending.FAILED if row.ending is None else row.ending for row in rows]
        return Written(
            [row.position for row in rows],
            rows=ended_columns(trajectories, [row.reward for row in rows], endings),
            generated=generated,
        )


def _generated(row: _Row) -> tuple[int, int]:
    """Return the oldest version of the row's tokens and how many the policy has made. The oldest one
    stays when its tokens are cut off."""
    oldest, tokens = row.progress.generated
    before = row.handle.oldest_version
    return min(oldest, before) if tokens and before >= 0 else oldest, tokens


def _number(reward: float | None) -> float:
    """Return the reward of a reply; NaN: it has none."""
    return math.nan if reward is None else reward


def _sum(rewards: Sequence[float]) -> float:
    """Return the sum of the turns' rewards; NaN where none has one."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return math.fsum(known) if known else math.nan
