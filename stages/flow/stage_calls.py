"""Calls of a user's stage, and the checks of what it returns.

columns of rows ─▶ StageRows ─▶ process(rows), within a time ─▶ names, number of rows, types ─▶ columns, or Drop
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pipeline.data.blocks import pack
from pipeline.data.columns import ColumnError, Schema
from pipeline.problems import Fatal, Passing
from stages.flow.bounded_call import BoundedCalls, TimeLimit
from stages.flow.declarations import Columns, Drop, Result, StageDeclaration, column
from stages.flow.resolver import passed_column
from stages.flow.user_stage import StageRows, UserStage
from stages.user_code import place_of, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


class StageError(Fatal, RuntimeError):
    """A user's stage raised, or returned something else than it declares.

    The message names the stage and the line.
    """


class StageProcessEnded(Passing, RuntimeError):
    """The process of a user's stage has ended, as by a crash.

    The message names the stage and says how.
    """


class StageCaller(Protocol):
    """Calls a user's stage, in this process or in another one."""

    async def call(self, columns: Mapping[str, Any], rows: int) -> Result:
        """Return the result of the stage for ``rows`` rows with these ``columns``, each as in
        :class:`StageRows`: all columns that it declares, or a Drop. Raises StageError, TimeLimit,
        StageProcessEnded."""


def schema_of(columns: Columns) -> Schema:
    """Return the pipeline's schema of a stage's declared ``columns``."""
    return Schema([column(name, kind) for name, kind in columns.items()])


class StageCalls(StageCaller):
    """Calls ``stage`` in this process. A call may take ``timeout`` seconds (None: any time)."""

    def __init__(
        self,
        stage: UserStage,
        declared: StageDeclaration,
        tokenizer: Tokenizer | None = None,
        timeout: float | None = None,
    ) -> None:
        self.stage = stage
        self.declared = declared
        self.tokenizer = tokenizer
        self._calls = BoundedCalls(stage.process, timeout, f"stage {declared.name}")
        self._schema = schema_of(declared.makes)

    def close(self) -> None:
        """End the event loop of async calls."""
        self._calls.close()

    async def call(self, columns: Mapping[str, Any], rows: int) -> Result:
        result = await self._call(StageRows(columns, self.tokenizer))
        if isinstance(result, Drop):
            if self.declared.takes == "rows":
                raise self._wrong(
                    result, "columns: only a stage with takes = 'groups' can drop a group"
                )
            return result
        passed = passed_column(self.declared.name)
        if not self.declared.makes or list(self.declared.makes) == [passed]:
            return {passed: torch.ones(rows, dtype=torch.bool)}
        if not isinstance(result, Mapping) or result.keys() != self.declared.makes.keys():
            raise self._wrong(result, f"a dict with the columns {sorted(self.declared.makes)}")
        for name, values in result.items():
            if (
                not hasattr(values, "__len__")
                or getattr(values, "ndim", None) == 0
                or len(values) != rows
            ):
                raise self._wrong(values, f"{rows} values in {name!r}, one for each row")
        try:
            pack(self._schema, result)
        except ColumnError as error:
            raise self._wrong(result, f"what the stage declares: {error}") from error
        return result

    async def _call(self, rows: StageRows) -> Any:
        try:
            return await self._calls.call(rows)
        except TimeLimit:
            raise
        except Exception as error:
            place = place_of(error, self.stage.process)
            raise StageError(
                f"stage {self.declared.name!r} raised {error!r} in process ({place})"
            ) from error

    def _wrong(self, made: Any, wanted: str) -> StageError:
        place = place_of(StageError(), self.stage.process)
        name = self.declared.name
        return StageError(
            f"stage {name!r} returned {shown(made)} from process ({place}); wanted is {wanted}"
        )
