"""The reward stage: calls several weighted functions, in TRL's signature, with a batch of finished
responses.

    prompts, completions, token ids, columns ──▶ each function, by its caller ──▶ scores [B, K] · weights ──▶ total [B]
                          │                          plain: many rows a call; async: one, up to `concurrency` at once
                          ▲                          │ raised, took too long, died
                          └── each of its rows ◀──────┘ … fails again: the run fails, the score is 0, or the group is dropped
                                                              returned no score for a row: that row fails at once
                                                              returned more or fewer than rows: all rows fail at once

A reward function is ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``,
plain or async. In the place of a number may be a list of rewards, one for each turn or each token
of the response (:mod:`stages.rewards.by_token`): the score is their sum. It gets the arguments that
it names, or all of them with ``**columns``. ``columns`` are the other columns of the prompts' rows,
one value per response, and those columns of the recipe's own stages that a function names. Where a
prompt is a conversation, its completion is one too: ``[{"role": "assistant", "content": ...}]``. Of
a trajectory it has each turn as a message of the assistant and what its environment answered as one
of the role "tool"; a completion that is a text has the turns alone. ``None``: the function does not
apply to the response. A response to which no function applies has no reward: it is in no mean
(:mod:`stages.rewards.scores`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import structlog
import torch
from tensordict import TensorDict

from pipeline.data.columns import plain_values
from pipeline.data.events import AlarmEvent
from pipeline.index.client import Claim, Index
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Written
from stages.flow.catalogue import BRANCHES, MASK, TOKEN_REWARDS, TURN_STARTS
from stages.model.load import Tokenizer
from stages.rewards.by_token import Placed, placed, total, turn_ends, weighted
from stages.rewards.calls import (
    LARGEST,
    Arguments,
    CallCounts,
    Caller,
    CallFailed,
    LocalCaller,
    Score,
    Scores,
    Stopwatch,
)
from stages.rewards.figures import amounts_of
from stages.rewards.registry import RESERVED, RewardError
from stages.rewards.scores import FAILED, FAILED_AS_ZERO, RewardScores, number_of
from stages.tasks.tasks import COMPUTED, HARMLESS

FETCHES = ("given", "fields", "response_ids")
ROWS_AT_ONCE = 64  # of one claim; rows that became ready together are scored together
LEAST_ROWS = 8  # of a call: fewer are not divided over several processes
# Samples of which the share of failures is taken, and how many count at the beginning as if scored.
RECENT = 256
FIRST = 32
# before the second call of a row alone, growing fourfold; at most
BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF = 10.0

METRIC = "reward_scores"  # of the alarm
LOOK = (
    "Correct the function: it must return one number, or None, for each completion, in their order."
)

log = structlog.get_logger()
T = TypeVar("T")
RowScore = float | list[float | None]  # of a function: a score, or its parts


@dataclass(frozen=True)
class ErrorPolicy:
    """The treatment of a reward function that fails: that raises, returns no scores, takes more
    than ``timeout`` seconds for a call, or ends its process. The rows of a failed call are called
    one by one, and ``retries`` times more, those of an async function at the same time. At most
    ``concurrency`` calls of async functions run at once. But where the function has returned, its
    rows without a score, or all where it has not one for each, have failed. A row that fails is a
    failed sample: the run fails, the function's score is 0, or the sample's group is dropped. The
    run also fails when more than ``max_error_share`` of the last :data:`RECENT` samples of a
    function failed."""

    timeout: float = 60.0
    retries: int = 2
    on_error: Literal["fail", "zero", "drop"] = "drop"
    max_error_share: float = 0.25
    concurrency: int = 64


class RewardSet:
    """Reward functions by name, and their weights.

    A name is ``module:function``, or one of :data:`stages.tasks.tasks.REWARDS`, or an entry point
    of the group ``asyncdock.rewards``. ``pool`` calls the functions that are not
    :data:`~stages.tasks.tasks.HARMLESS`, and those of :data:`~stages.tasks.tasks.COMPUTED`
    where a library computes; without it, all are called in this process. ``end_tokens``: special
    tokens stay in the texts, but for one of these at the end; None: they are left out. An async
    function is called with one row, unless ``batched`` has it. ``options``: further columns of a
    function, each with the value of all rows that have none of their own.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, float]],
        *,
        policy: ErrorPolicy = ErrorPolicy(),
        pool: Caller | None = None,
        end_tokens: Collection[int] | None = None,
        batched: Collection[str] = (),
        options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        if not functions:
            raise RewardError("rewards: at least one reward function is needed")
        self.names = tuple(name for name, _ in functions)
        repeated = {name for name in self.names if self.names.count(name) > 1}
        if repeated:
            raise RewardError(f"rewards: {sorted(repeated)} are given twice; add their weights up")
        self.weights = torch.tensor([weight for _, weight in functions], dtype=torch.float32)
        self._sizes = {
            name: abs(weight)
            for name, weight in zip(self.names, self.weights.tolist(), strict=True)
        }
        if not self.weights.isfinite().all():
            raise RewardError(
                f"rewards: the weights {self.weights.tolist()} of {self.names} must be finite"
            )
        self._callers = self._callers_of(pool)
        self._policy = policy
        self._end_tokens = end_tokens
        self._batched = frozenset(batched)
        self._options = options
        self._slots = asyncio.Semaphore(policy.concurrency)  # of calls of async functions
        self.counts = {name: CallCounts() for name in self.names}
        self._reported: Mapping[str, float] = {}  # amounts
        # whether it failed
        self._recent: dict[str, deque[bool]] = {name: deque(maxlen=RECENT) for name in self.names}
        self.failures: dict[str, str] = {}  # the reason of each function's first one
        # of those, where it did not return one score for each row
        self.misfits: dict[str, str] = {}

    def take_amounts(self) -> dict[str, float]:
        """Return what the calls have come to since this was last called, for the index."""
        before = self._reported
        self._reported = amounts_of(self.counts)
        return {name: n - before.get(name, 0) for name, n in self._reported.items() if n}

    def _callers_of(self, pool: Caller | None) -> list[Caller]:
        """Return the caller of each function."""
        local: Caller = LocalCaller(
            [name for name in self.names if pool is None or name in HARMLESS]
        )
        if pool is None:
            return [local] * len(self.names)
        divided: Caller = local
        if not COMPUTED.isdisjoint(self.names):
            from stages.rewards.divided import DividedCaller
            from stages.rewards.number_rewards import has_expression
            from stages.tasks.answers import computes

            divided = DividedCaller(local, pool, has_expression) if computes() else local
        callers: dict[str, Caller] = dict.fromkeys(HARMLESS, local) | dict.fromkeys(
            COMPUTED, divided
        )
        return [callers.get(name, pool) for name in self.names]

    async def open(self) -> None:
        """Find the functions, where that was not done before. Raises :class:`RewardError`."""
        for caller in set(self._callers):
            await caller.open()

    async def close(self) -> None:
        for caller in set(self._callers):
            await caller.close()

    def text(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        """Return a response as the functions get it."""
        if self._end_tokens is None:
            return str(tokenizer.decode(ids, skip_special_tokens=True))
        if ids and ids[-1] in self._end_tokens:
            ids = ids[:-1]
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    async def score(
        self,
        prompts: Sequence[str | list[dict[str, str]]],
        completions: Sequence[str | list[dict[str, str]]],
        completion_ids: Sequence[Sequence[int]],
        fields: Sequence[Mapping[str, Any]],
        columns: Mapping[str, list[Any]] = MappingProxyType({}),
        ends: Sequence[Sequence[int]] = (),
        *,
        by_token: bool = False,
    ) -> RewardScores:
        """Return the scores of B responses by all functions, which run at the same time.

        ``prompts`` are the rows' own (:attr:`stages.prompts.formatter.Prompt.given`), ``fields``
        their other columns (None where a row lacks one), ``columns`` those of stages. ``ends``:
        the last token of each turn; by default a response is one turn. ``by_token``: return
        rewards by token, too. Raises :class:`RewardError` where the policy lets the run fail.
        """
        names = dict.fromkeys(name for row in fields for name in row)
        if taken := [name for name in (*RESERVED, *columns) if name in names]:
            problem = f"the prompts have columns {taken}, which reward functions get from the run"
            raise RewardError(f"rewards: {problem}; rename")
        arguments: dict[str, list[Any]] = {
            "prompts": list(prompts),
            "completions": [
                _in_form_of(prompt, completion)
                for prompt, completion in zip(prompts, completions, strict=True)
            ],
            "completion_ids": [list(ids) for ids in completion_ids],
        }
        arguments |= {name: [row.get(name) for row in fields] for name in names} | dict(columns)
        lengths = {name: len(values) for name, values in arguments.items()}
        if len(set(lengths.values())) != 1:
            raise RewardError(
                f"rewards: as many values are needed of each, but there are {lengths}"
            )
        score_columns = await _all(
            self._column(*each, arguments) for each in zip(self.names, self._callers, strict=True)
        )
        ends = ends or [[len(ids) - 1] for ids in completion_ids]
        by_function = [
            [self._placed(name, arguments, at, score, ends[at]) for at, score in enumerate(column)]
            for name, column in zip(self.names, score_columns, strict=True)
        ]
        numbers = [[total(score) for score in column] for column in by_function]
        scores = torch.tensor(numbers, dtype=torch.float32).T.contiguous()
        if absent := int(scores.isnan().all(dim=1).sum()):
            log.warning(
                "no reward function applies to responses", responses=absent, functions=self.names
            )
        of_rows: list[torch.Tensor] = []
        if by_token:
            weights = self.weights.tolist()
            of_rows = [
                weighted(row, weights, row_ends[-1], len(ids))
                for row, row_ends, ids in zip(
                    zip(*by_function, strict=True), ends, completion_ids, strict=True
                )
            ]
        total_rewards = scores.nan_to_num(nan=0.0, posinf=0.0) @ self.weights
        return RewardScores(scores, total_rewards, of_rows)

    async def _column(self, name: str, caller: Caller, given: Arguments) -> list[RowScore]:
        """Return the scores of one function, called with parts of the rows as large as its caller
        can call at the same time, or, where it is async, with each row."""
        rows = len(given["completions"])
        self.counts[name].responses += rows
        options = self._options.get(name, {})
        given = {**given, **{key: _filled(given.get(key), options[key], rows) for key in options}}
        size = max(LEAST_ROWS, -(-rows // caller.parallel))
        if await caller.is_async(name) and name not in self._batched:
            size = 1  # so that a failure costs its own row alone, and the bound is one of responses
        starts = range(0, rows, size)
        parts = await _all(self._part(name, caller, _slice(given, at, at + size)) for at in starts)
        return [score for part in parts for score in part]

    async def _part(self, name: str, caller: Caller, given: Arguments) -> list[RowScore]:
        rows = range(len(given["completions"]))
        try:
            scores = await self._call(name, caller, given)
        except CallFailed as error:
            if error.misfit:
                return [self._failed(name, given, at, error) for at in rows]
            of_others = len(rows) > 1 or error.shared  # it may not be the row's own failure
            log.warning("a reward function failed", reward=name, rows=len(rows), error=str(error))
            return await _all(self._alone(name, caller, given, at, error, of_others) for at in rows)
        return [self._number(name, given, at, score) for at, score in enumerate(scores)]

    async def _call(
        self,
        name: str,
        caller: Caller,
        arguments: Arguments,
        *,
        alone: bool = False,
        again: bool = False,
    ) -> Scores:
        """Make one call, counted; ``again``: after a failed one. Raises CallFailed."""
        counts = self.counts[name]
        watch = Stopwatch()
        began = time.monotonic()
        async with self._slots if await caller.is_async(name) else contextlib.nullcontext():
            counts.calls += 1
            counts.again += again
            try:
                return await caller.call(
                    name, arguments, self._policy.timeout, alone=alone, watch=watch
                )
            except CallFailed:
                counts.failed += 1
                raise
            finally:
                counts.seconds += watch.seconds
                counts.waited += max(0.0, time.monotonic() - began - watch.seconds)

    async def _alone(
        self,
        name: str,
        caller: Caller,
        given: Arguments,
        at: int,
        error: CallFailed,
        of_others: bool,
    ) -> RowScore:
        """Return the score of the row ``at`` after a call that failed with ``error``."""
        row = {argument: values[at : at + 1] for argument, values in given.items()}
        alone = error.shared
        for attempt in range(0 if of_others else 1, self._policy.retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST_BACKOFF, BACKOFF_SECONDS * 4 ** (attempt - 1)))
            try:
                (score,) = await self._call(name, caller, row, alone=alone, again=True)
            except CallFailed as again:
                error = again
                alone = alone or again.shared
                if error.misfit:
                    break
            else:
                return self._number(name, given, at, score)
        return self._failed(name, given, at, error)

    def _number(self, name: str, given: Arguments, at: int, score: Score) -> RowScore:
        """Return the score that a function returned for the row ``at``, or NaN where it does not
        apply."""
        weight = self._sizes[name]
        numbers = score if isinstance(score, list) else [score]
        size = sum(abs(number) for number in numbers if isinstance(number, float))
        if size * weight * len(self.names) > LARGEST:
            score = f"returned {score} as a score, which is too large for its weight of {weight:g}"
        if isinstance(score, str):
            return self._failed(name, given, at, CallFailed(score))
        if isinstance(score, list):  # see _placed
            return score
        self._recent[name].append(False)
        return math.nan if score is None else number_of(score)

    def _placed(
        self, name: str, given: Arguments, at: int, score: RowScore, ends: Sequence[int]
    ) -> Placed:
        """Return the score of the row ``at``; a list by the tokens where its numbers count.
        ``ends``: the last token of each turn."""
        if not isinstance(score, list):
            return score
        tokens = len(given["completion_ids"][at])
        numbers = placed(score, ends, tokens)
        if numbers is None:
            sizes = f"a response of {len(ends)} turns and {tokens} tokens"
            problem = f"returned {len(score)} rewards for {sizes}; return one number, or a list"
            problem += " with one for each turn, or for each token"
            return self._failed(name, given, at, CallFailed(problem))
        self._recent[name].append(False)
        return numbers

    def _failed(self, name: str, given: Arguments, at: int, error: CallFailed) -> float:
        """Return the score of the row ``at``, which cannot be scored.

        Raises :class:`RewardError` where the run is to fail.
        """
        policy = self._policy
        recent = self._recent[name]
        recent.append(True)
        self.counts[name].lost += 1
        prompt = given["prompts"][at]
        completion = given["completions"][at]
        place = f" ({error.place})" if error.place else ""
        row = "" if error.misfit else f" at prompt {prompt!r:.200}, completion {completion!r:.200}"
        reason = f"reward {name!r} {error}{row}{place}"
        if policy.on_error == "fail":
            raise RewardError(f"{reason}; correct it, or set reward.on_error to 'drop' or 'zero'")
        if sum(recent) > policy.max_error_share * max(FIRST, len(recent)):
            failures = f"it failed for {sum(recent)} of the last {len(recent)} samples"
            raise RewardError(
                f"{reason}; {failures}, more than reward.max_error_share = "
                f"{policy.max_error_share:g}"
            )
        self.failures.setdefault(name, reason)
        if error.misfit:
            self.misfits.setdefault(name, reason)
        log.warning("a sample could not be scored", reason=reason, on_error=policy.on_error)
        return FAILED if policy.on_error == "drop" else FAILED_AS_ZERO


def _in_form_of(
    prompt: str | list[dict[str, str]], completion: str | list[dict[str, str]]
) -> str | list[dict[str, str]]:
    """Return a completion as the prompt is given: as a text, or as messages."""
    if isinstance(completion, str):
        is_text = isinstance(prompt, str)
        return completion if is_text else [{"role": "assistant", "content": completion}]
    if not isinstance(prompt, str):
        return completion
    turns = (message["content"] for message in completion if message["role"] == "assistant")
    return "".join(turns)


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of ``coroutines``, which run at the same time.

    Raises the first error, after the others are cancelled.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group.exceptions[0].__cause__
    return [task.result() for task in running]


def _filled(values: Sequence[Any] | None, default: Any, rows: int) -> list[Any]:
    """Return the ``values`` of ``rows`` rows with ``default`` in the place of None."""
    return [default if value is None else value for value in values or [None] * rows]


def _slice(given: Arguments, first: int, last: int) -> Arguments:
    return {name: values[first:last] for name, values in given.items()}


class MisfitAlarm:
    """Raises an alarm the first time that a function of ``rewards`` does not return one score for
    each row."""

    def __init__(self, index: Index, worker: str) -> None:
        self._index = index
        self._worker = worker
        self._reported: set[str] = set()

    async def report(self, rewards: RewardSet) -> None:
        for name in [*rewards.misfits.keys() - self._reported]:
            self._reported.add(name)
            step = (await self._index.status()).trained + 1
            reason = f"{METRIC}: {rewards.misfits[name]}"
            alarm = AlarmEvent(
                metric=METRIC,
                step=step,
                version=step,
                value=1.0,
                reason=reason,
                look=LOOK,
                worker=self._worker,
            )
            await self._index.emit(alarm)


class Reward(Stage):
    """The stage: claims finished responses one by one or many at once, as they come, and scores
    them."""

    name = "reward"

    def __init__(
        self,
        rewards: RewardSet,
        tokenizer: Tokenizer,
        fetches: tuple[str, ...] = FETCHES,
        alarm: MisfitAlarm | None = None,
        *,
        by_token: bool = False,
    ) -> None:
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.fetches = fetches
        self._alarm = alarm
        self._by_token = by_token

    def room(self, held: int) -> int:
        return ROWS_AT_ONCE

    def figures(self) -> Mapping[str, Any]:
        return {
            "calls": {
                name: asdict(counts) for name, counts in self.rewards.counts.items() if counts.calls
            }
        }

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        reads = [name for name in self.fetches if name not in (*FETCHES, MASK)]
        scores = await score_rows(
            self.rewards, self.tokenizer, rows, reads, by_token=self._by_token
        )
        if self._alarm is not None:
            await self._alarm.report(self.rewards)
        yield Written(
            range(len(claim)),
            rows=reward_columns(scores),
            tokens=int(claim.tokens.sum()),
            amounts=self.rewards.take_amounts(),
        )


def reward_columns(scores: RewardScores) -> dict[str, Any]:
    """Return the columns that the stage makes of ``scores``."""
    columns: dict[str, Any] = {"reward": scores.total, "scores": scores.scores}
    return columns | ({TOKEN_REWARDS: scores.by_token} if scores.by_token else {})


async def score_rows(
    rewards: RewardSet,
    tokenizer: Tokenizer,
    rows: TensorDict,
    reads: Sequence[str] = (),
    *,
    by_token: bool = False,
) -> RewardScores:
    """Return the scores of rows with the columns ``given`` and ``fields`` (JSON texts) and
    ``response_ids`` int64 jagged; of trajectories also ``loss_mask``, ``branches`` and
    ``turn_starts``. The columns ``reads`` are arguments of the functions by their names.
    ``by_token``: see :meth:`RewardSet.score`."""
    ids = plain_values(rows["response_ids"])
    completions: list[Any] = [rewards.text(tokenizer, row) for row in ids]
    ends: list[list[int]] = []
    if MASK in rows:
        masks = plain_values(rows[MASK])
        branches = plain_values(rows[BRANCHES])
        starts = plain_values(rows[TURN_STARTS])
        ends = [turn_ends(*of_row) for of_row in zip(starts, masks, strict=True)]
        completions = [
            [
                {"role": role, "content": rewards.text(tokenizer, part)}
                for role, part in segments(*of_row)
            ]
            for of_row in zip(ids, masks, branches, strict=True)
        ]
    return await rewards.score(
        [json.loads(text) for text in rows["given"]],
        completions,
        ids,
        [json.loads(text) for text in rows["fields"]],
        {name: plain_values(rows[name]) for name in reads},
        ends,
        by_token=by_token,
    )


def segments(
    ids: Sequence[int], mask: Sequence[bool], branches: Sequence[int] = ()
) -> Iterator[tuple[str, list[int]]]:
    """Yield the turns and the observations of a trajectory with the column ``branches``, each with
    the role of its message; of a branch without those that it shares.

    >>> [*segments([5, 6, 7, 8], [False, True, True, True], [2, 1])]
    [('tool', [5]), ('assistant', [6]), ('assistant', [7, 8])]
    """
    for begin, end in pairwise([0, *branches[::2], len(ids)]):
        pairs = zip(ids[begin:end], mask[begin:end], strict=True)
        for is_turn, tokens in groupby(pairs, key=itemgetter(1)):
            yield "assistant" if is_turn else "tool", [token for token, _ in tokens]
