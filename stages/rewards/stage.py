"""The reward stage: calls several weighted functions, in TRL's signature, with a batch of finished responses.

    prompts, completions, token ids, columns ── each function (a thread, or the loop when async) ──▶ scores [B, K]
                                                                        scores · weights ──▶ total [B]

A reward function is ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, plain or async. It gets
the arguments that it names, or all of them with ``**columns``. ``columns`` are the other columns of the prompts' rows, one
value per response, and those columns of the recipe's own stages that a function names. Where a prompt is a conversation, its
completion is one too: ``[{"role": "assistant", "content": ...}]``. ``None``: the function does not apply to the response.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import structlog
import torch
from tensordict import TensorDict

from pipeline.controller import Output, Stage
from pipeline.index.client import Claim
from stages.flow.adapter import call
from stages.models import Tokenizer
from stages.rewards.registry import RESERVED, RewardError, RewardFunctions
from stages.user_code import place_of

FETCHES = ("given", "fields", "response_ids")
ROWS_AT_ONCE = 64  # of one claim; rows that became ready together are scored together

log = structlog.get_logger()


@dataclass(frozen=True)
class RewardScores:
    """``scores`` float32 [B, K]: one column per function, NaN where it does not apply. ``total`` float32 [B]: the sum
    of score times weight, in which NaN counts as 0."""

    scores: torch.Tensor
    total: torch.Tensor


class RewardSet:
    """Reward functions by name, and their weights.

    A name is ``module:function``, or one of :data:`stages.prompts.tasks.REWARDS`, or an entry point of the group
    ``asyncdock.rewards``. ``timeout`` is the seconds that one call of one function may take.
    """

    def __init__(self, functions: Sequence[tuple[str, float]], *, timeout: float = 120.0) -> None:
        if not functions:
            raise RewardError("rewards: at least one reward function is needed")
        self.names = tuple(name for name, _ in functions)
        repeated = {name for name in self.names if self.names.count(name) > 1}
        if repeated:
            raise RewardError(f"rewards: {sorted(repeated)} are given twice; add their weights up")
        self.weights = torch.tensor([weight for _, weight in functions], dtype=torch.float32)
        if not self.weights.isfinite().all():
            raise RewardError(f"rewards: the weights {self.weights.tolist()} of {self.names} must be finite")
        known = RewardFunctions()
        self._functions = [known.find(name) for name in self.names]
        self._timeout = timeout

    async def score(
        self,
        prompts: Sequence[str | list[dict[str, str]]],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        fields: Sequence[Mapping[str, Any]],
        columns: Mapping[str, list[Any]] = MappingProxyType({}),
    ) -> RewardScores:
        """Scores of B responses by all functions, which run at the same time. ``prompts`` are the rows' own
        (:attr:`stages.prompts.formatter.Prompt.given`), ``fields`` their other columns (None where a row lacks one),
        ``columns`` those of stages. Raises :class:`RewardError`."""
        names = dict.fromkeys(name for row in fields for name in row)
        if taken := [name for name in (*RESERVED, *columns) if name in names]:
            wrong = f"the prompts have columns {taken}, which reward functions get from the run"
            raise RewardError(f"rewards: {wrong}; rename")
        given: dict[str, list[Any]] = {
            "prompts": list(prompts),
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, completions, strict=True)
            ],
            "completion_ids": [list(ids) for ids in completion_ids],
        }
        given |= {name: [row.get(name) for row in fields] for name in names} | dict(columns)
        lengths = {name: len(values) for name, values in given.items()}
        if len(set(lengths.values())) != 1:
            raise RewardError(f"rewards: as many values are needed of each, but there are {lengths}")
        scored = await asyncio.gather(
            *(self._column(name, f, given) for name, f in zip(self.names, self._functions, strict=True))
        )
        scores = torch.stack(scored, dim=1)
        for row in scores.isnan().all(dim=1).nonzero()[:, 0].tolist():
            log.warning("no reward function applies; the response gets 0", row=row, functions=self.names)
        return RewardScores(scores, scores.nan_to_num(nan=0.0) @ self.weights)

    async def _column(self, name: str, function: Callable[..., Any], given: dict[str, list[Any]]) -> torch.Tensor:
        """Scores float32 [B] of one function."""
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                result = await _call(function, given)
        except Exception as error:
            if deadline.expired():
                raise RewardError(
                    f"reward {name!r} took more than {self._timeout:g} s for {_rows(given)} rows"
                ) from None
            row = await self._culprit(function, given)
            raise RewardError(f"reward {name!r} raised {error!r} at {row} ({place_of(error, function)})") from error
        return _checked(name, result, _rows(given))

    async def _culprit(self, function: Callable[..., Any], given: dict[str, list[Any]]) -> str:
        """The row that makes ``function`` raise, found by calling it with one row after the other."""
        try:
            async with asyncio.timeout(self._timeout):
                for row in range(_rows(given)):
                    try:
                        await _call(function, {name: [values[row]] for name, values in given.items()})
                    except Exception:
                        prompt, completion = given["prompts"][row], given["completions"][row]
                        return f"row {row}: prompt {prompt!r:.200}, completion {completion!r:.200}"
        except TimeoutError:
            pass
        return f"a batch of {_rows(given)} rows, though at none of them alone"


class Reward(Stage):
    """The stage: claims finished responses one by one or many at once, as they come, and scores them."""

    name = "reward"

    def __init__(self, rewards: RewardSet, tokenizer: Tokenizer, fetches: tuple[str, ...] = FETCHES) -> None:
        self.rewards, self.tokenizer, self.fetches = rewards, tokenizer, fetches

    def room(self, held: int) -> int:
        return ROWS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        reads = [name for name in self.fetches if name not in FETCHES]
        scores = await score_rows(self.rewards, self.tokenizer, rows, reads)
        yield Output(
            range(len(claim)),
            {"reward": scores.total, "scores": scores.scores},
            tokens=int(claim.tokens.sum()),
        )


async def score_rows(
    rewards: RewardSet, tokenizer: Tokenizer, rows: TensorDict, reads: Sequence[str] = ()
) -> RewardScores:
    """Scores of rows with the columns ``given`` and ``fields`` (JSON texts) and ``response_ids`` int64 jagged. The
    columns ``reads`` are arguments of the functions by their names."""
    ids = [row.tolist() for row in rows["response_ids"].unbind()]
    return await rewards.score(
        [json.loads(text) for text in rows["given"]],
        [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ids],
        ids,
        [json.loads(text) for text in rows["fields"]],
        {name: _values(rows[name]) for name in reads},
    )


def _values(column: Any) -> list[Any]:
    """The values of a column, one for each row, as plain Python values."""
    if isinstance(column, torch.Tensor):
        return [row.tolist() for row in column.unbind()] if column.is_nested else column.tolist()
    return list(column)


async def _call(function: Callable[..., Any], given: dict[str, list[Any]]) -> Any:
    parameters = inspect.signature(function).parameters
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return await call(function, **(given if everything else {n: given[n] for n in parameters if n in given}))


def _checked(name: str, result: Any, rows: int) -> torch.Tensor:
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        raise RewardError(f"reward {name!r} returned a {type(result).__name__}; a list of {rows} numbers is wanted")
    if len(result) != rows:
        raise RewardError(f"reward {name!r} returned {len(result)} scores for {rows} rows; one for each is wanted")
    values = []
    for row, score in enumerate(result):
        if isinstance(score, torch.Tensor) and score.ndim == 0:
            score = score.item()
        if score is None:
            values.append(math.nan)
        elif not isinstance(score, numbers.Real):
            raise RewardError(f"reward {name!r} gave row {row} {score!r:.100}; a number, or None, is wanted")
        elif not math.isfinite(score):
            raise RewardError(f"reward {name!r} gave row {row} {score}; a finite number, or None, is wanted")
        else:
            values.append(float(score))
    return torch.tensor(values, dtype=torch.float32)


def _rows(given: dict[str, list[Any]]) -> int:
    return len(given["prompts"])
