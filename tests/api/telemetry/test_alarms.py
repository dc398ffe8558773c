"""Alarms of the guard in everything that reads a run's events."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from api.telemetry.progress import Progress
from api.telemetry.prometheus import FAMILIES, RunListener
from api.telemetry.trackers import Points
from api.terminal.live import LiveView
from api.terminal.plain import plain_line
from api.terminal.report import summarize, summary_table
from orchestration.history.events_file import MetricsFile, read_metrics
from orchestration.history.totals import ALARMS
from tests.api import scripted

ALARM = {
    "metric": "ess",
    "step": 4,
    "version": 4,
    "value": 0.04,
    "usual": 0.97,
    "limit": 0.1,
    "reason": "ess: 0.04",
    "look": "There.",
}


def test_an_alarm_is_a_line_a_message_and_a_row_of_the_summary() -> None:
    progress = Progress("run", 8, 2)
    event = scripted.event(20, "alarm", **ALARM)
    progress.apply(event)
    assert plain_line(progress, event) == "alarm at step 4: ess: 0.04. There."
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(LiveView(progress, console).render())
    assert "alarm at step 4: ess: 0.04. There." in console.export_text()
    summary = summarize(progress, checkpoint=None)
    assert summary["alarms"] == [
        {"step": 4, "metric": "ess", "reason": "ess: 0.04", "look": "There."}
    ]
    console.print(summary_table(summary))
    assert "step 4: ess: 0.04" in console.export_text()


def test_alarms_are_counted_by_metric_and_the_newest_are_kept() -> None:
    listener = RunListener.__new__(RunListener)
    listener.run = "r"
    listener.name = "n"
    listener.steps_planned = 8
    listener.bound = 2
    listener.totals = progress = Progress("run", 8, 2)
    for number in range(ALARMS + 5):
        progress.apply(
            scripted.event(number, "alarm", **ALARM | {"metric": "ess" if number else "probe"})
        )
    assert len(progress.alarms) == ALARMS
    family = next(family for family in FAMILIES if family.name == "run_alarms").collect([listener])
    assert {sample.labels["metric"]: sample.value for sample in family.samples} == {
        "probe": 1,
        "ess": ALARMS + 4,
    }


def test_trackers_get_the_value_at_its_step() -> None:
    (point,) = Points().of(scripted.event(20, "alarm", **ALARM))
    assert point.step == 4
    assert point.numbers == {
        "alarm/ess/value": 0.04,
        "alarm/ess/usual": 0.97,
        "alarm/ess/limit": 0.1,
    }


def test_a_resumed_run_forgets_the_alarms_of_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in range(1, 7):
            file.event(scripted.event(step, "alarm", **ALARM | {"step": step, "version": step}))
        file.rewind(4)
    assert [event.data["step"] for event in read_metrics(path)] == [1, 2, 3, 4]
