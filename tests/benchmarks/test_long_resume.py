"""The benchmark of a resume after many steps resumes a run that says that it has made so many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.robustness.long_resume import measure, renumber, table
from orchestration.checkpoints import checkpoint
from orchestration.history.events_file import METRICS, read_metrics


def test_the_resumed_run_goes_on_after_the_steps_that_its_file_has(tmp_path: Path) -> None:
    steps = 100
    figures = measure(tmp_path, steps, times=1)
    assert [len(firsts) for firsts in figures.values()] == [1, 1]
    assert all(
        first.seconds > 0 and first.processor_seconds > 0
        for firsts in figures.values()
        for first in firsts
    )
    made = [
        event.data["step"]
        for event in read_metrics(tmp_path / "long" / METRICS)
        if event.kind == "step"
    ]
    assert made[: steps + 1] == list(range(1, steps + 2)), (
        "the steps of the file, and the first one after the resume"
    )
    assert "a run resumed after 100 steps" in table(figures, steps)


def test_a_renumbered_checkpoint_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / checkpoint.name_of(25)
    folder.mkdir()
    state = {"version": 25, "counters": {"trained": 25, "generated": 400}, "remake": []}
    (folder / checkpoint.STATE).write_text(json.dumps(state))
    renumber(folder, 100)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name_of(100)]
    renumbered = checkpoint.open_checkpoint(tmp_path / checkpoint.name_of(100))
    renumbered.verify()
    assert renumbered.version == 100
    assert renumbered.counters == {"trained": 100, "generated": 1600}
    with pytest.raises(ValueError, match="a multiple of 100, not 250"):
        renumber(tmp_path / checkpoint.name_of(100), 250)
