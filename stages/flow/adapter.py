"""The adapter of a user's stage, as a stage that a controller runs.

A user's stage is called in a process of its own, or with the inline launcher in this one. A call
has a bounded time: the worker fails after it, and is started again. When one of the same rows takes
as long in the next call, the run fails.

rows of a claim ─▶ process(rows) ─▶ columns ─────────▶ committed
its groups      ─▶ process(group) ─▶ columns or Drop ─▶ committed together, or dropped with the reason
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from pipeline.index.client import Claim, Index
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output
from stages.flow.bounded_call import TimeLimit
from stages.flow.declarations import Result, StageDeclaration
from stages.flow.groups import groups_of, outputs_of, plain_columns, rows_at
from stages.flow.stage_calls import StageCaller, StageError
from stages.weights.documents import TIMED_OUT

ROWS_AT_ONCE = 64
USER_GROUPS_AT_ONCE = 8  # of a user's stage, which may take long over each
MOST_NOTED = 4096  # rows whose calls took too long that a run remembers


class StageTimedOut(RuntimeError):
    """A call of a user's stage took too long, for the first time with its rows."""


class StageAdapter(Stage):
    """The stage that ``declared`` is, called by ``caller``, as a stage of the pipeline: it holds no
    policy version and takes what is ready. ``timeout``: of a call of it, in seconds; ``index``
    remembers the rows of one that took longer."""

    def __init__(
        self,
        caller: StageCaller,
        declared: StageDeclaration,
        *,
        index: Index | None = None,
        timeout: float | None = None,
    ) -> None:
        self.declared = declared
        self.name = declared.name
        self.fetches = tuple(declared.needs)
        self._caller = caller
        self._index = index
        self._timeout = timeout
        self._noting = asyncio.Lock()

    def room(self, held: int) -> int:
        if self.declared.takes == "rows":
            return max(0, ROWS_AT_ONCE - held)
        return 0 if held else USER_GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        columns = plain_columns(rows, self.fetches)
        tokens = claim.tokens.tolist()
        numbers = claim.row.tolist()
        if self.declared.takes == "rows":
            members = [[*range(len(claim))]]
            calls = [self._call(columns, numbers)]
        else:
            members = groups_of(claim.group.tolist())
            calls = [
                self._call(
                    {n: rows_at(c, at) for n, c in columns.items()}, [numbers[row] for row in at]
                )
                for at in members
            ]
        for output in outputs_of(members, await asyncio.gather(*calls), tokens):
            yield output

    async def _call(self, columns: Mapping[str, Any], numbers: Sequence[int]) -> Result:
        """Return the columns that the stage makes of the rows with these ``numbers``.

        Raises StageError, StageTimedOut.
        """
        try:
            return await self._caller.call(columns, len(numbers))
        except TimeLimit as late:
            raise await self._late(numbers, late.place) from None

    async def _late(self, numbers: Sequence[int], place: str) -> Exception:
        """Return the error of a call that took too long: the run's, when one of its rows was in
        such a call before."""
        key = self.declared.place.removesuffix("use") + "timeout"
        took = (
            f"stage {self.name!r} took more than {key} = {self._timeout:g} s for {len(numbers)} "
            f"rows in process ({place})"
        )
        if self._index is None:
            return StageError(took)
        async with self._noting:
            before = await TIMED_OUT.get(self._index, stage=self.name) or []
            is_again = bool({*before} & {*numbers})
            noted = [] if is_again else [*before, *numbers][-MOST_NOTED:]
            await TIMED_OUT.put(self._index, noted, stage=self.name)
        if is_again:
            return StageError(f"{took}, and so did the call before it; correct it, or raise {key}")
        return StageTimedOut(f"{took}; it is called again")
