"""Adapters: a user's stage, and an algorithm's credit, as stages that a controller runs.

A call of a user's stage has a bounded time. A plain one runs in a thread of its own and an async one in an event loop of its
own thread, so that a call that blocks does not keep the worker from noticing. Nothing ends such a thread but the end of its
process: the worker fails, and is started again. When one of the same rows takes as long in the next call, the run fails.

rows of a claim ─▶ process(rows) ─▶ columns ─────────▶ committed
its groups      ─▶ process(group) ─▶ columns or Drop ─▶ committed together, or dropped with the reason
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict

from pipeline.blocks import pack
from pipeline.columns import ColumnError, Schema
from pipeline.controller import Output, Stage
from pipeline.index.client import Claim, Index
from stages.flow.bounded_call import BoundedCalls, TimeLimit
from stages.flow.declarations import Drop, StageDeclaration, column
from stages.flow.resolver import passed_column
from stages.flow.user_stage import UserStage
from stages.models import Tokenizer
from stages.user_code import place_of, shown

ROWS_AT_ONCE = 64
GROUPS_AT_ONCE = 256
USER_GROUPS_AT_ONCE = 8  # of a user's stage, which may take long over each
MOST_NOTED = 4096  # rows whose calls took too long that a run remembers

Result = Mapping[str, Any] | Drop


class StageError(RuntimeError):
    """A user's stage raised, or returned something else than it declares. The message names the stage and the line."""


class StageTimedOut(RuntimeError):
    """A call of a user's stage took too long, for the first time with its rows."""


class StageRows(dict[str, Any]):
    """The columns that a stage needs, of B rows: a tensor [B, …] of a column with one value in each row, a list of B tensors
    of a ragged one, a list of B strings of a text."""

    def __init__(self, columns: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> None:
        super().__init__(columns)
        self._tokenizer = tokenizer

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name!r} is not a column that the stage needs; its columns are {sorted(self)}")

    @cached_property
    def completions(self) -> list[str]:
        """The responses as texts, of a stage that needs ``response_ids``."""
        assert self._tokenizer is not None
        return [str(self._tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in self["response_ids"]]

    @cached_property
    def prompts(self) -> list[Any]:
        """The prompts as their source gave them, texts or conversations, of a stage that needs ``given``."""
        return [json.loads(text) for text in self["given"]]

    @cached_property
    def fields(self) -> list[dict[str, Any]]:
        """The other columns of the prompts' rows, of a stage that needs ``fields``."""
        return [json.loads(text) for text in self["fields"]]


def plain_columns(rows: TensorDict, names: Sequence[str]) -> dict[str, Any]:
    """The columns of fetched rows, ragged ones as lists of tensors and texts as lists of strings."""
    return {name: _plain(rows[name]) for name in names}


def _plain(column: Any) -> Any:
    if isinstance(column, torch.Tensor):
        return list(column.unbind()) if column.is_nested else column
    return list(column)


def rows_at(column: Any, positions: Sequence[int]) -> Any:
    return column[positions] if isinstance(column, torch.Tensor) else [column[at] for at in positions]


def groups_of(groups: Sequence[int]) -> list[list[int]]:
    """The positions of each group's rows, where ``groups`` names the group of each row."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return list(members.values())


def outputs_of(members: Sequence[Sequence[int]], results: Sequence[Result], tokens: Sequence[int]) -> Iterator[Output]:
    """What is committed of groups at the positions ``members``: one output of all that stay, one for each reason to drop."""
    kept = [(at, result) for at, result in zip(members, results, strict=True) if not isinstance(result, Drop)]
    if kept:
        positions = [row for at, _ in kept for row in at]
        columns = {name: _joined([result[name] for _, result in kept]) for name in kept[0][1]}
        yield Output(positions, columns, tokens=sum(tokens[row] for row in positions))
    dropped: dict[str, list[int]] = {}
    for at, result in zip(members, results, strict=True):
        if isinstance(result, Drop):
            dropped.setdefault(result.reason, []).extend(at)
    for reason, rows in dropped.items():
        yield Output(rows, dropped=reason, tokens=sum(tokens[row] for row in rows))


def _joined(parts: Sequence[Any]) -> Any:
    """The same column of several groups as one."""
    if isinstance(parts[0], torch.Tensor) and not parts[0].is_nested:
        return torch.cat(list(parts))
    return [value for part in parts for value in part]


class StageAdapter(Stage):
    """``stage`` as a stage of the pipeline: it holds no policy version and takes what is ready. A call may take ``timeout``
    seconds; ``index`` remembers the rows of one that took longer."""

    def __init__(
        self,
        stage: UserStage,
        declared: StageDeclaration,
        tokenizer: Tokenizer | None = None,
        *,
        index: Index | None = None,
        timeout: float | None = None,
    ) -> None:
        self.stage, self.declared, self.tokenizer = stage, declared, tokenizer
        self.name, self.fetches = declared.name, tuple(declared.needs)
        self._index, self._timeout, self._noting = index, timeout, asyncio.Lock()
        self._calls = BoundedCalls(stage.process, timeout, f"stage {self.name}")
        self._schema = Schema([column(name, kind) for name, kind in declared.makes.items()])

    def close(self) -> None:
        self._calls.close()

    def room(self, held: int) -> int:
        if self.declared.takes == "rows":
            return max(0, ROWS_AT_ONCE - held)
        return 0 if held else USER_GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        columns, tokens, numbers = plain_columns(rows, self.fetches), claim.tokens.tolist(), claim.row.tolist()
        if self.declared.takes == "rows":
            made = await self._process(columns, numbers)
            if isinstance(made, Drop):
                raise self._wrong(made, "columns: only a stage with takes = 'groups' can drop a group")
            yield Output(range(len(claim)), made, tokens=sum(tokens))
            return
        members = groups_of(claim.group.tolist())
        calls = [
            self._process({n: rows_at(c, at) for n, c in columns.items()}, [numbers[row] for row in at])
            for at in members
        ]
        for output in outputs_of(members, await asyncio.gather(*calls), tokens):
            yield output

    async def _process(self, columns: Mapping[str, Any], numbers: Sequence[int]) -> Result:
        """What the stage makes of the rows with these ``numbers``. Raises StageError, StageTimedOut."""
        made, rows = await self._call(StageRows(columns, self.tokenizer), numbers), len(numbers)
        if isinstance(made, Drop):
            return made
        if not self.declared.makes or list(self.declared.makes) == [passed_column(self.name)]:
            return {passed_column(self.name): torch.ones(rows, dtype=torch.bool)}
        if not isinstance(made, Mapping) or made.keys() != self.declared.makes.keys():
            raise self._wrong(made, f"a dict with the columns {sorted(self.declared.makes)}")
        for name, values in made.items():
            if not hasattr(values, "__len__") or getattr(values, "ndim", None) == 0 or len(values) != rows:
                raise self._wrong(values, f"{rows} values in {name!r}, one for each row")
        try:
            pack(self._schema, made)
        except ColumnError as error:
            raise self._wrong(made, f"what the stage declares: {error}") from error
        return made

    async def _call(self, rows: StageRows, numbers: Sequence[int]) -> Any:
        try:
            return await self._calls.call(rows)
        except TimeLimit as late:
            raise await self._late(numbers, late.place) from None
        except Exception as error:
            place = place_of(error, self.stage.process)
            raise StageError(f"stage {self.name!r} raised {error!r} in process ({place})") from error

    async def _late(self, numbers: Sequence[int], place: str) -> Exception:
        """The error of a call that took too long: the run's, when one of its rows was in such a call before."""
        key = self.declared.place.removesuffix("use") + "timeout"
        took = f"stage {self.name!r} took more than {key} = {self._timeout:g} s for {len(numbers)} rows in process ({place})"
        if self._index is None:
            return StageError(took)
        document = f"timed-out:{self.name}"
        async with self._noting:
            before = json.loads(await self._index.get(document) or "[]")
            is_again = bool({*before} & {*numbers})
            await self._index.put(document, json.dumps([] if is_again else [*before, *numbers][-MOST_NOTED:]))
        if is_again:
            return StageError(f"{took}, and so did the call before it; correct it, or raise {key}")
        return StageTimedOut(f"{took}; it is called again")

    def _wrong(self, made: Any, wanted: str) -> StageError:
        place = place_of(StageError(), self.stage.process)
        return StageError(f"stage {self.name!r} returned {shown(made)} from process ({place}); wanted is {wanted}")
