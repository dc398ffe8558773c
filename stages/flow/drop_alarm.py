"""The alarm of a stage that drops every group: nothing is trained, while tokens are generated."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.data.events import AlarmEvent
from pipeline.index.client import Index
from stages.flow.declarations import Drop
from stages.flow.stage_calls import Result

METRIC = "dropped_groups"  # of the alarm when no group teaches
LOOK = (
    "Nothing is learned, and tokens are generated for it. Look at the newest samples and what the "
    "reward functions return: a reward that is the same for all responses, or fails; prompts that "
    "are all too easy or too hard."
)


class DropAlarm:
    """Raises an alarm when ``most`` groups in a row were to be dropped; the next one after a group
    that was not."""

    def __init__(self, index: Index, most: int, worker: str) -> None:
        self._index = index
        self._most = most
        self._worker = worker
        self._in_a_row = 0

    async def add(self, results: Iterable[Result]) -> None:
        for result in results:
            self._in_a_row = self._in_a_row + 1 if isinstance(result, Drop) else 0
            if isinstance(result, Drop) and self._in_a_row == self._most:
                step = (await self._index.status()).trained + 1
                count = float(self._most)
                reason = (
                    f"{METRIC}: {self._most} groups in a row taught nothing, the last one because "
                    f"of: {result.reason}"
                )
                await self._index.emit(
                    AlarmEvent(
                        metric=METRIC,
                        step=step,
                        version=step,
                        value=count,
                        limit=count,
                        reason=reason,
                        look=LOOK,
                        worker=self._worker,
                    )
                )
                # a step would report it, and there is none
                await self._index.emit(await self._index.ledger_event())
