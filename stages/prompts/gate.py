"""The gate: where prompts enter.

It holds the staleness bound by pacing, so that no sample has ever to be dropped.

    published version v ──▶ admit groups below (v + S + 1)·P ──▶ sleep until a version is published, or more are due
                              ├ at once, or as late as the trainer allows (pipeline/schedule/pacing.py)
                              └ as far as there are prompts, when they come from outside

Which prompt a group gets is a pure function of its number, so a lost group, or a resumed run, asks
for the same again. With ``difficulty`` it is chosen by pass rates instead, and the choice is kept
in the index.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from pipeline.data.events import PromptEvent
from pipeline.documents.flow import VERSION
from pipeline.index.client import Index, RunStatus
from pipeline.schedule.pacing import Pacer
from pipeline.warehouse.dock import Dock
from stages.flow.catalogue import GIVEN
from stages.prompts.formatter import Prompt
from stages.prompts.sources import PromptSource

if TYPE_CHECKING:
    from stages.prompts.difficulty import IndexedDifficulty
    from stages.prompts.external import ExternalPrompts

log = structlog.get_logger()

WAIT_SECONDS = 10.0


class Gate:
    """Admits the groups of ``steps`` optimizer steps of P groups each, ``group_size`` samples a
    group, as the index's gate allows and no earlier than ``pacer`` says; a group that was filtered
    out is replaced by one more. ``fed``: ``source``, where its prompts come from outside."""

    def __init__(
        self,
        dock: Dock,
        source: PromptSource,
        *,
        group_size: int,
        steps: int,
        groups_per_step: int,
        fed: ExternalPrompts | None = None,
        difficulty: IndexedDifficulty | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.dock = dock
        self.source = source
        self._pacer = pacer
        self._fed = fed
        self._chosen = difficulty
        self.group_size = group_size
        self.steps = steps
        self.groups = steps * groups_per_step
        self.stopping = self.paused = False
        self._reported = {"skipped": 0, "cut": 0}  # prompts
        self._epochs: dict[str, int] = {}  # that were reported

    async def run(self) -> None:
        """Return when all steps are trained, or after :meth:`stop`."""
        index: Index = self.dock.index
        await self._report_too_long()
        while not self.stopping:
            status = await index.status()
            limit = min(status.gate, self.groups + status.filtered, await self._due(status))
            numbers = [*sorted(status.remake), *range(status.admitted, limit)]
            if self._fed is not None and (available := self._fed.available) is not None:
                numbers = [number for number in numbers if number < available]
            if numbers and not self.paused:
                await self._admit(numbers, status.admitted)
            elif status.trained >= self.steps:
                return
            else:
                await index.wait(
                    VERSION, status.wait, self._pacer.look() if self._pacer else WAIT_SECONDS
                )

    async def _due(self, status: RunStatus) -> int:
        """Return the number below which groups are due."""
        if self._pacer is None:
            return status.gate
        now, (admitted, done) = time.monotonic(), await self.dock.index.progress()
        self._pacer.see(now, status.published, admitted, done)
        return self._pacer.limit(now) + status.filtered

    async def _admit(self, numbers: Sequence[int], admitted: int) -> None:
        if self._chosen is None:
            by_number = {number: (number, self.source.prompt(number)) for number in numbers}
        else:
            by_number = dict(await self._chosen.prompts(numbers, admitted))
        prompts = [prompt for _, prompt in by_number.values()]
        await self.dock.admit([(number, self.group_size) for number in numbers], columns(prompts))
        await self._report_too_long()
        newest = self.source.epochs(max(position for position, _ in by_number.values()))
        begun = {key: epoch for key, epoch in newest.items() if epoch > self._epochs.get(key, 0)}
        if begun:
            self._epochs |= begun
            reason = ", ".join(f"epoch {epoch} of {key}" for key, epoch in begun.items())
            await self.dock.index.emit(
                PromptEvent(change="epoch", reason=reason, epochs=self._epochs)
            )

    async def _report_too_long(self) -> None:
        """Emit a ``prompt`` event with how many prompts were too long so far, if that has
        changed."""
        too_long = self.source.too_long
        counts = {"skipped": too_long.skipped, "cut": too_long.cut}
        if counts != self._reported:
            self._reported = counts
            done = " and ".join(f"{n} {what}" for what, n in counts.items() if n)
            reason = (f"prompts that are too long: {done}") + (
                f"; listed in {too_long.path}" if too_long.path else ""
            )
            log.warning(reason)
            await self.dock.index.emit(
                PromptEvent(
                    change="too long", reason=reason, skipped=too_long.skipped, cut=too_long.cut
                )
            )

    async def stop(self) -> None:
        self.stopping = True
        await self.dock.index.wake(VERSION)


def columns(prompts: Sequence[Prompt]) -> dict[str, object]:
    """Return the columns that a prompt brings: its ids, and as JSON what its row gave, its other
    fields and its responses."""
    prompt_columns: dict[str, object] = {
        "prompt_ids": [prompt.ids[: prompt.context] for prompt in prompts],
        "given": [prompt.given_json for prompt in prompts],
        "fields": [prompt.fields_json for prompt in prompts],
    }
    return prompt_columns | (
        {GIVEN: [prompt.responses_json for prompt in prompts]} if prompts[0].responses else {}
    )
