"""Skipped steps: batches with a loss or gradient that is not finite, of which no optimizer step was
taken.

    train_batch raises FloatingPointError, on all ranks ──▶ rows to skipped/step-NNNNNNNN.jsonl ──▶ version + 1
                                                            └─ too many in a row ──▶ TooManySkipped: the run fails

The step is recorded like any other, so the gate, the staleness bound and the number of steps need
no exception; its version has the weights of the one before. A replay meets the same batch with the
same weights, and skips it again. It is these weights that may be at fault, so no checkpoint is
removed before a step is taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from pipeline.data.columns import plain_values
from pipeline.index.client import Claim
from pipeline.problems import Fatal
from stages.samples.sample_log import Recorder

log = structlog.get_logger()

FOLDER = "skipped"  # in the run's folder
READ = ("given", "versions", "truncated", "reward", "scores")  # of a flow with rewards
MOST_FILES = 100  # the newest; a file has the rows of one step


class TooManySkipped(Fatal, RuntimeError):
    """Too many steps in a row were skipped.

    The message names the file with the rows of the last one.
    """


class SkippedSteps:
    """Writes the rows of skipped steps into ``folder``: JSON lines with what ``recorder`` reads,
    and the values of ``columns``. ``most``: steps in a row after which :meth:`add` raises."""

    def __init__(self, recorder: Recorder, folder: Path, columns: Sequence[str], most: int) -> None:
        self._recorder = recorder
        self._folder = folder
        self._columns = tuple(columns)
        self._most = most
        self.in_a_row = 0  # up to now

    def end_row(self) -> None:
        """End the row of skipped steps: a step was taken."""
        self.in_a_row = 0

    async def add(self, step: int, claim: Claim, stale: Sequence[int], reason: str) -> None:
        """Count a skipped step and write its rows. A failing disk is logged."""
        self.in_a_row += 1
        path = self._folder / f"step-{step:08d}.jsonl"
        known = all(name in self._recorder.dock.schema for name in READ)
        samples = (
            await self._recorder.read(step, claim, stale)
            if known
            else [{"step": step}] * len(claim)
        )
        columns = await self._recorder.dock.fetch(claim, self._columns)
        values = {name: _rows(columns[name]) for name in self._columns}
        order = sorted(range(len(claim)), key=lambda at: (claim.group[at], claim.place[at]))
        lines = [
            json.dumps(
                {**sample, **{name: value[at] for name, value in values.items()}},
                ensure_ascii=False,
            )
            for sample, at in zip(samples, order, strict=True)
        ]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(line + "\n" for line in lines))
            for old in sorted(self._folder.glob("step-*.jsonl"))[:-MOST_FILES]:
                old.unlink()
        except OSError as refused:
            log.warning(
                "the rows of a skipped step are not written", path=str(path), reason=str(refused)
            )
        log.warning("step skipped", step=step, reason=reason, rows=str(path))
        if self.in_a_row >= self._most:
            raise TooManySkipped(
                f"train.max_skipped_steps = {self._most}: as many steps in a row were skipped, "
                f"step {step} because its {reason}; look for what is wrong with its rows in {path}"
            )


def _rows(column: Any) -> list[Any]:
    """Return the values of each row; a number that is not finite as text, which JSON has no number
    for."""
    return [_plain(value) for value in plain_values(column)]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
