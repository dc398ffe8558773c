"""The alarm of a run whose groups are all dropped, or trained only because their step may drop no more."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.events import AlarmEvent
from pipeline.index.client import Index
from stages.flow.adapter import Result
from stages.flow.declarations import Drop

METRIC = "dropped_groups"
LOOK = (
    "Nothing is learned, and tokens are generated for it. Look at the newest samples and what the reward functions return: "
    "a reward that is the same for all responses, or fails; prompts that are all too easy or too hard."
)


class DropAlarm:
    """Raises an alarm when ``most`` groups in a row were to be dropped; the next one after a group that was not."""

    def __init__(self, index: Index, most: int, worker: str) -> None:
        self._index, self._most, self._worker, self._in_a_row = index, most, worker, 0

    async def add(self, results: Iterable[Result]) -> None:
        for result in results:
            self._in_a_row = self._in_a_row + 1 if isinstance(result, Drop) else 0
            if isinstance(result, Drop) and self._in_a_row == self._most:
                status, count = await self._index.status(), float(self._most)
                reason = (
                    f"{METRIC}: {self._most} groups in a row taught nothing, the last one because of: {result.reason}"
                )
                await self._index.emit(
                    AlarmEvent(
                        metric=METRIC, step=status.trained, value=count, limit=count, reason=reason, look=LOOK,
                        worker=self._worker,
                    )
                )  # fmt: skip
