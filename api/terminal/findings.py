"""What the events of an ended run tell of its rewards: why they did not rise."""

from __future__ import annotations

from pathlib import Path

from api.terminal.report import MOST_ALARMS, notes_of, progress_of, summarize
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.recipe.schema import Recipe

READ_BYTES = 32 << 20  # of the newest events; a run of weeks has more


def findings_of(folder: Path, recipe: Recipe) -> list[str]:
    """Return the remarks on rewards of the report of the run in ``folder``, and its newest alarms;
    none where it has no events."""
    if not (folder / METRICS).is_file():
        return []
    progress = progress_of(recipe, read_metrics(folder / METRICS, READ_BYTES))
    notes = notes_of(progress, summarize(progress, checkpoint=None))
    alarms = [alarm for _, alarm in progress.alarms]
    return [*notes, *(f"step {alarm.step}: {alarm.reason}" for alarm in alarms[-MOST_ALARMS:])]
