"""One trajectory: its environment, opened by this process, and the row that it writes.

advance ─▶ open the environment ─▶ the first observation ─▶ a turn is to be made ──┐
   ▲                                                                               ▼
   └──────────────── the policy has made a turn (stages/trajectories/play.py, or a rollout worker)
   ├─▶ the environment answers ─▶ the next observation ─▶ a turn is to be made ─▶ …
   └─▶ it was the last turn, or a limit is reached ─▶ ended: the reward, the environment is closed
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.problems import Fatal
from stages.engines.protocols import SamplingParams
from stages.environments.dialogue.choice import Dialogues
from stages.environments.interface import (
    EnvironmentCaller,
    EnvironmentDeclaration,
    EnvironmentFailed,
    Reply,
    Trajectory,
    Turn,
    TurnTokens,
    environment_of,
)
from stages.flow.catalogue import TIMES
from stages.rollout.stage import group_seed
from stages.trajectories.progress import Ending, Progress
from stages.trajectories.writers import Writer, writer_of

LARGEST_PLACE = 1 << 16


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
class Opened:
    """An environment that was opened here for a trajectory of ``group``. ``key``: another one each
    time that it is opened, so that a call of a lost lease never meets a later one. ``began``: by the
    monotonic clock. ``answered``: how many of the row's turns the environment was given.
    ``wants_tokens``: it is given their tokens. ``asked``: when the policy was asked for the present
    turn; NaN: before the environment was opened here."""

    group: int
    key: str
    began: float
    writer: Writer
    answered: int = 0
    wants_tokens: bool = False
    asked: float = math.nan


@dataclass
class Figures:
    """What a process has seen of trajectories. ``endings``: trajectories by why they have ended.
    ``remade``: those that began again because their environment was gone. ``branches``: how often a
    program went back behind turns. The tokens and seconds are those of the turns that were answered; what
    of them was waiting is not known after a restart."""

    turns: int = 0
    branches: int = 0
    calls: int = 0
    failed_calls: int = 0
    generated_tokens: int = 0
    observed_tokens: int = 0
    engine_seconds: float = 0.0
    waiting_seconds: float = 0.0
    environment_seconds: float = 0.0
    replayed: int = 0
    remade: int = 0
    endings: Counter[Ending] = field(default_factory=Counter)

    def add_turn(self, tokens: int, seconds: Sequence[float], reply: Reply) -> None:
        """Count a turn of ``tokens`` that ``reply`` answers. ``seconds``: its TIMES."""
        self.turns += 1
        self.calls += reply.calls
        self.failed_calls += reply.failed_calls
        self.generated_tokens += tokens
        engine, waiting, environment = seconds
        self.engine_seconds += engine
        self.waiting_seconds += 0.0 if math.isnan(waiting) else waiting
        self.environment_seconds += environment

    def counts(self) -> dict[str, float]:
        """Return all of it by name."""
        counts = {name: count for name, count in vars(self).items() if name != "endings"}
        ended = {f"ended_{ending.name.lower()}": n for ending, n in self.endings.items()}
        return {**counts, **ended}


@dataclass
class Trajectories:
    """The trajectories of this process: the ``caller`` of their environments, what these declare,
    the ``dialogues`` that write them, their ``limits``, the run's ``seed``.

    ``opened``: the environments that are open, by row; rows are never used again.
    """

    caller: EnvironmentCaller
    declarations: Mapping[str, EnvironmentDeclaration]
    dialogues: Dialogues
    limits: Limits
    seed: int
    seen: Figures = field(default_factory=Figures)
    opened: dict[int, Opened] = field(default_factory=dict)
    openings: itertools.count[int] = field(default_factory=itertools.count)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the tokens that end a turn."""
        ends = {*params.stop_token_ids, *self.dialogues.stop_token_ids}
        return replace(params, stop_token_ids=tuple(sorted(ends)))

    def is_overdue(self, opened: Opened) -> bool:
        return time.monotonic() - opened.began >= self.limits.trajectory_seconds


def trajectory_seed(seed: int, group: int, place: int) -> int:
    """Return the seed that a trajectory's environment gets: the same in each attempt."""
    return group_seed(seed, group) * LARGEST_PLACE + place


@dataclass
class Episode:
    """The trajectory of the row ``row``, at ``place`` of ``group``. ``columns``: of its prompt's row,
    needed where its environment is to be opened. ``turn``, ``reply``: the last ones that it was given
    here. ``ending``: why it has ended; None: it goes on."""

    shared: Trajectories
    row: int
    group: int
    place: int
    columns: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    opened: Opened | None = None
    turn: Turn | None = None
    reply: Reply = field(default_factory=Reply)
    ending: Ending | None = None
    reward: float = math.nan

    async def advance(self) -> None:
        """Open the environment, or have it answer the last turn. Raises EnvironmentFailed; the
        environment is to be closed then."""
        progress = self.progress
        if not progress.turn_starts:
            await self._begin()
        elif self.opened is not None and self.shared.is_overdue(self.opened):
            self.ending = Ending.TIMEOUT
            progress.turn_reward.append(math.nan)
            await self._end()
        elif await self._has_environment():
            await self._answer()
        else:
            self.shared.seen.remade += 1
            self.progress = Progress()
            await self._begin()

    @property
    def is_waited_for(self) -> bool:
        """Whether the environment is open here and waits for the last turn."""
        return (
            self.opened is not None
            and self.shared.caller.knows(self.opened.key)
            and self.opened.answered == len(self.progress.turn_starts) - 1
        )

    @property
    def is_current(self) -> bool:
        """Whether nobody else has opened or closed the row's environment since."""
        return self.shared.opened.get(self.row) is self.opened

    def fail(self, ending: Ending, token: int) -> None:
        """End it, as its environment has failed. ``token``: its only one, if it has none."""
        if not self.progress.token_ids:
            self.progress.observe([token])
        self.ending = ending
        self.reward = 0.0 if ending is Ending.FAILED else math.nan

    async def close(self) -> None:
        if self.opened is not None:
            if self.is_current:
                del self.shared.opened[self.row]
            await self.shared.caller.close(self.opened.key)

    async def _begin(self) -> None:
        began = time.monotonic()
        reply = await self._open()
        if reply.done:
            raise EnvironmentFailed("its environment ended before the first turn")
        self._write(reply)
        limits = self.shared.limits
        if not self._has_room():
            raise EnvironmentFailed(
                f"the first observation has {len(self.progress.token_ids)} tokens, and a turn of "
                f"rollout.max_tokens = {limits.turn_tokens} more does not fit "
                f"environment.max_tokens = {limits.max_tokens}"
            )
        self._ask(time.monotonic() - began)

    def _ask(self, opening_seconds: float = 0.0) -> None:
        """Ask the policy for a turn."""
        self.progress.begin_turn(opening_seconds)
        self._live().asked = time.monotonic()

    def _write(self, reply: Reply) -> None:
        """Append what ``reply`` adds; a program that goes on from an earlier point begins a
        branch."""
        progress = self.progress
        seen = self.shared.seen
        opened = self._live()
        after, token_ids = opened.writer.write(reply, progress.turns)
        seen.branches += after < len(progress.turn_starts)
        seen.observed_tokens += progress.observe(token_ids, after)
        opened.wants_tokens = reply.request is not None and reply.request.wants_tokens

    async def _open(self, began: float | None = None) -> Reply:
        await self.close()
        shared = self.shared
        key = f"{self.row}.{next(shared.openings)}"
        name = environment_of(self.columns, shared.declarations)
        began = time.monotonic() if began is None else began
        writer = writer_of(shared.dialogues.by_name[name])
        self.opened = shared.opened[self.row] = Opened(self.group, key, began, writer)
        seed = trajectory_seed(shared.seed, self.group, self.place)
        trajectory = Trajectory(key, self.columns, seed, name)
        waits = shared.declarations[name].waits
        limits = shared.limits
        seconds = limits.trajectory_seconds if waits else limits.step_seconds
        self.reply = await shared.caller.open(trajectory, seconds)
        return self.reply

    async def _has_environment(self) -> bool:
        """Return whether the environment has answered all turns but the last one; one that is
        replayable is brought there."""
        if self.is_waited_for:
            return True
        began = None if self.opened is None else self.opened.began
        declarations = self.shared.declarations
        if not declarations[environment_of(self.columns, declarations)].replayable:
            return False
        reply = await self._open(began)
        progress = self.progress
        turns = progress.turns
        again = Progress()
        for number, (begin, turn_ids) in enumerate(zip(progress.turn_starts, turns, strict=True)):
            if reply.done:
                return False
            end = len(again.token_ids)
            after, token_ids = self._live().writer.write(reply, turns[:number])
            again.observe(token_ids, after)
            branches = progress.branches[: len(again.branches)]
            if (again.token_ids[end:], again.branches) != (progress.token_ids[end:begin], branches):
                return False  # it says something else now
            again.begin_turn()
            again.append(turn_ids, [0.0] * len(turn_ids), 0)
            if number < len(turns) - 1:
                reply = await self._step(turn_ids, number)
        self.shared.seen.replayed += 1
        return True

    async def _step(self, turn_ids: Sequence[int], number: int) -> Reply:
        """Give the environment a turn: a truncated one is the last one."""
        opened = self._live()
        opened.answered += 1
        last = number == len(self.progress.turn_starts) - 1
        self.turn = turn = opened.writer.turn(turn_ids, self.progress.truncated and last, number)
        if (prefix_ids := opened.writer.prefix_ids) is not None:
            tokens = self._tokens(number, prefix_ids, opened.wants_tokens)
            turn = replace(turn, tokens=tokens)
        seconds = self.shared.limits.step_seconds
        self.reply = await self.shared.caller.step(opened.key, turn, seconds)
        return self.reply

    def _tokens(self, number: int, prompt_ids: Sequence[int], is_wanted: bool) -> TurnTokens:
        """Return the tokens of a turn for the program that asked for it."""
        progress = self.progress
        begin = progress.turn_starts[number]
        token_ids = progress.turns[number]
        context = progress.context(number)
        tokens = TurnTokens(len(prompt_ids) + len(context), len(token_ids))
        if not is_wanted:
            return tokens
        logprobs = progress.logprobs[begin : begin + len(token_ids)]
        versions = [version for version, count in progress.versions for _ in range(count)]
        return replace(
            tokens,
            prompt_ids=[*prompt_ids, *(progress.token_ids[place] for place in context)],
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions[begin : begin + len(token_ids)],
        )

    async def _answer(self) -> None:
        progress = self.progress
        turn_ids = progress.turns[-1]
        began = time.monotonic()
        away = began - self._live().asked
        reply = await self._step(turn_ids, len(progress.turn_starts) - 1)
        progress.time_turn(away, time.monotonic() - began)
        self.shared.seen.add_turn(len(turn_ids), progress.turn_seconds[-len(TIMES) :], reply)
        progress.turn_reward.append(_number(reply.reward))
        self.ending = self._ending(reply)
        if self.ending is None:
            self._write(reply)
            if self._has_room():
                self._ask()
            else:
                self.ending = Ending.TOKENS
        if self.ending is not None:
            await self._end()

    async def _end(self) -> None:
        """Ask for the reward that is due, and close the environment."""
        rewards = self.progress.turn_reward
        due = math.nan
        if self.ending is not Ending.DONE:
            seconds = self.shared.limits.step_seconds
            last = await self.shared.caller.finish(self._live().key, seconds)
            due = _number(last.reward)
        self.reward = _sum([*rewards, due])
        if rewards:  # none where a program has gone back behind all turns
            rewards[-1] = _sum([rewards[-1], due])
        await self.close()

    def _has_room(self) -> bool:
        limits = self.shared.limits
        return len(self.progress.token_ids) + limits.turn_tokens <= limits.max_tokens

    def _ending(self, reply: Reply) -> Ending | None:
        if reply.done:
            return Ending.DONE
        if self.progress.truncated:
            return Ending.TRUNCATED
        assert self.opened is not None
        if self.opened.answered >= self.shared.limits.max_turns:
            return Ending.TURNS
        return Ending.TIMEOUT if self.shared.is_overdue(self.opened) else None

    def _live(self) -> Opened:
        """Return the open environment. Raises EnvironmentFailed where it has gone."""
        if self.opened is None or not self.shared.caller.knows(self.opened.key):
            raise EnvironmentFailed("its environment is not open any more")
        return self.opened


def _number(reward: float | None) -> float:
    """Return the reward of a reply; NaN: it has none."""
    return math.nan if reward is None else reward


def _sum(rewards: Sequence[float]) -> float:
    """Return the sum of the turns' rewards; NaN where none has one."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return math.fsum(known) if known else math.nan
