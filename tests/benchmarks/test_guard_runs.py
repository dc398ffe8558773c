"""The guard's benchmark counts the alarms of recorded runs by what became of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.robustness.guard import Judged, summary
from orchestration.history.events_file import METRICS
from orchestration.state.paths import RECIPE
from tests.orchestration.guard.test_guard import step
from tests.orchestration.guard.test_watch import recorded
from tests.orchestration.runs import TINY, recipe


def run_of(folder: Path, rewards: Sequence[float]) -> Path:
    folder.mkdir()
    groups = 4 if folder.name == "fell shortly" else 8  # of a step
    (folder / RECIPE).write_text(recipe(TINY, train__groups_per_step=groups).to_json())
    steps = (step(number, reward_mean=reward) for number, reward in enumerate(rewards))
    recorded(folder / METRICS, steps)
    return folder


def test_runs_are_counted_by_what_became_of_their_reward(tmp_path: Path) -> None:
    rise = [0.1 + 0.7 * min(1, number / 40) for number in range(60)]
    kinds = {
        "lost": [*rise, *[0.2] * 20],
        "fell": [*rise, *[0.6] * 20],
        "fell shortly": [*rise, *[0.6] * 10, *[0.8] * 10],
        "learned": [*rise, *[0.8] * 20],
    }
    runs = [Judged.of(run_of(tmp_path / name, rewards), 8.0) for name, rewards in kinds.items()]
    assert [run.name for run in runs] == list(kinds)
    assert [len(run.rewards) for run in runs] == [80] * 4
    assert runs[0].until(60) == []
    assert list(summary(runs))[2:] == [
        "| collapsed: until then | 1 | 1 | reward_mean 1 |",
        "| fell by a quarter | 1 | 0 |  |",
        "| fell by a quarter in ten steps alone | 1 | 0 |  |",
        "| others | 1 | 0 |  |",
    ]
