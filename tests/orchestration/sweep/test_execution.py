"""Which runs a sweep begins, which it stops, and how it goes on: with an executor whose runs are a
formula of their settings."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestration.comparison.results import RunResult
from orchestration.state.lock import RunError
from orchestration.sweep.checks import begin
from orchestration.sweep.execution import SweepExecution
from orchestration.sweep.record import Request, Sweep, SweepRun
from orchestration.sweep.room import Room, Share
from orchestration.sweep.search import JOURNAL
from pipeline.data.events import Event
from tests.orchestration.sweep.test_settings import request

STEPS = 10


class Formula:
    """Runs of ten steps, whose reward rises to a height that the learning rate decides: the best
    one is 1e-3."""

    def __init__(self, *, waits: bool = False, fails: Collection[str] = ()) -> None:
        self.steps: dict[str, int] = {}
        self.begun: list[str] = []
        self.at_once = 0
        self.most_at_once = 0
        self._waits = waits
        self._fails = fails

    def has_room(self, running: Collection[SweepRun], run: SweepRun) -> bool:
        return True

    def height(self, run: SweepRun) -> float:
        return 1.0 - abs(math.log10(run.settings["train.learning_rate"]) + 3)

    async def execute(
        self, run: SweepRun, report: Callable[[Event], None], stop: asyncio.Event
    ) -> tuple[str, str]:
        self.begun.append(run.name)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            for step in range(1, STEPS + 1):
                await asyncio.sleep(0)
                data = {"version": step, "reward_mean": self.height(run) * step / STEPS}
                report(Event(f"{step}-0", 0.0, "step", data))
                self.steps[run.name] = step
                if self._waits:
                    await stop.wait()
                if stop.is_set():
                    return "stopped", ""
            return ("failed", "it is so") if run.name[:3] in self._fails else ("finished", "")
        finally:
            self.at_once -= 1

    async def result(self, run: SweepRun) -> RunResult:
        versions = np.arange(1.0, self.steps[run.name] + 1)
        rewards = self.height(run) * versions / STEPS
        steps = {"version": versions, "reward_mean": rewards}
        return RunResult(run.name, "", "", "", {}, steps, {})


async def execute(sweep: Sweep, executor: Formula, stop: asyncio.Event | None = None) -> None:
    try:
        await SweepExecution(sweep, executor).execute(stop or asyncio.Event())
    finally:
        sweep.close()


RATES = "train.learning_rate=1e-4,1e-3,1e-2"
RANGE = "train.learning_rate=1e-5..1e-1:log"


async def test_every_run_is_executed_once_and_its_end_value_noted(tmp_path: Path) -> None:
    asked = request(RATES, "seed=0,1", at_once=4)
    executor = Formula(fails=("002",))
    await execute(begin(asked, tmp_path / "sweep"), executor)
    assert executor.most_at_once == 4
    again = Sweep.open(tmp_path / "sweep")
    assert [run.state for run in again.runs] == [*["finished"] * 2, "failed", *["finished"] * 3]
    assert again.runs[2].reason == "it is so"
    assert [run.value for run in again.runs] == pytest.approx([0, 0, 1, 1, 0, 0])
    await execute(again, executor)
    assert len(executor.begun) == 6, "none is run again"


async def test_an_interrupt_stops_the_runs_and_the_next_sweep_goes_on_with_them(
    tmp_path: Path,
) -> None:
    stop = asyncio.Event()
    waiting = Formula(waits=True)
    executing = asyncio.create_task(
        execute(begin(request(RATES, at_once=2), tmp_path / "sweep"), waiting, stop)
    )
    while len(waiting.steps) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    stop.set()
    await executing
    sweep = Sweep.open(tmp_path / "sweep")
    assert [run.state for run in sweep.runs] == ["stopped", "stopped", "waiting"]
    await execute(sweep, Formula())
    assert [run.state for run in sweep.runs] == ["finished"] * 3


async def test_runs_below_a_bound_are_pruned(tmp_path: Path) -> None:
    sweep = begin(request(RATES, stop_below=["0.3@5"]), tmp_path / "sweep")
    executor = Formula()
    await execute(sweep, executor)
    assert [run.state for run in sweep.runs] == ["pruned", "finished", "pruned"]
    assert sweep.runs[0].reason.endswith("is below 0.3 at step 5")
    assert [*executor.steps.values()] == [5, 10, 5]


@pytest.mark.parametrize("search", ["random", "tpe"])
async def test_a_search_proposes_runs_within_its_range(tmp_path: Path, search: str) -> None:
    sweep = begin(request(RANGE, search=search, trials=12), tmp_path / "sweep")
    await execute(sweep, Formula())
    rates = [run.settings["train.learning_rate"] for run in sweep.runs]
    assert len(set(rates)) == 12
    assert 1e-5 <= min(rates) < 1e-3 < max(rates) <= 1e-1


async def test_a_search_goes_on_after_a_kill_with_other_settings(tmp_path: Path) -> None:
    """What a kill leaves: a run that is over and a trial that is not, a trial without a run, a lock
    file, and a torn line."""
    asked = request(RANGE, search="random", trials=3, prune="none")
    sweep = begin(asked, tmp_path / "sweep")
    await execute(sweep, Formula())
    journal = tmp_path / "sweep" / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + b'{"op_code":')  # the last run's end is missing
    journal.with_name(f"{JOURNAL}.lock").symlink_to(journal)
    again = begin(Request(**{**vars(asked), "trials": 6}), tmp_path / "sweep")
    await execute(again, Formula())
    assert [run.state for run in again.runs] == ["finished"] * 6
    assert len({run.settings["train.learning_rate"] for run in again.runs}) == 6


async def test_a_search_ends_where_all_settings_are_tried(tmp_path: Path) -> None:
    sweep = begin(request(RATES, search="tpe", trials=9), tmp_path / "sweep")
    await execute(sweep, Formula())
    assert sorted(run.settings["train.learning_rate"] for run in sweep.runs) == [1e-4, 1e-3, 1e-2]


async def test_the_median_prunes_runs_of_a_grid_too(tmp_path: Path) -> None:
    rates = "train.learning_rate=1e-3,1.1e-3,1.2e-3,1.3e-3,1e-5,0.9e-3"
    sweep = begin(request(rates, prune="median"), tmp_path / "sweep")
    await execute(sweep, Formula())
    states = [run.state for run in sweep.runs]
    assert states[:4] == ["finished"] * 4
    assert states[4] == "pruned"
    assert sweep.runs[4].reason == "--prune median, at step 1"


def test_runs_share_the_memory_of_the_machine() -> None:
    room = Room(host=10)
    assert room.has([], Share(20)), "its own check says whether it fits alone"
    assert room.has([Share(4)], Share(6))
    assert not room.has([Share(4), Share(1)], Share(6))
    unknown = Share(1, math.inf)
    assert not room.has([unknown], unknown), "of unknown size: they share no device"
    assert room.has([unknown], Share(1)), "one on the CPU beside it"


async def test_a_run_begins_once_there_is_room(tmp_path: Path) -> None:
    class OneAtATime(Formula):
        def has_room(self, running: Collection[SweepRun], run: SweepRun) -> bool:
            return not running

    executor = OneAtATime()
    sweep = begin(request(RATES, at_once=3), tmp_path / "sweep")
    await execute(sweep, executor)
    assert executor.most_at_once == 1
    assert [run.state for run in sweep.runs] == ["finished"] * 3


async def test_a_metric_that_no_run_has_ends_a_search_after_its_first_run(tmp_path: Path) -> None:
    asked = request(RANGE, search="random", trials=3, metric="rewards")
    sweep = begin(asked, tmp_path / "sweep")
    executor = Formula()
    with pytest.raises(RunError, match="finished without a value of 'rewards'; did you mean"):
        await execute(sweep, executor)
    assert len(executor.begun) == 1


async def test_an_executor_that_fails_ends_the_others_cleanly(tmp_path: Path) -> None:
    class Breaks(Formula):
        async def execute(self, run: SweepRun, *arguments: Any) -> tuple[str, str]:
            if run.name.startswith("001"):
                raise OSError("no room")
            return await super().execute(run, *arguments)

    sweep = begin(request(RATES, at_once=2), tmp_path / "sweep")
    with pytest.raises(OSError, match="no room"):
        await execute(sweep, Breaks(waits=True))
    assert [run.state for run in sweep.runs] == ["stopped", "running", "waiting"]
