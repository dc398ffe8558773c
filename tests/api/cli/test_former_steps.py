"""Runs that a version before 0.2 has recorded, which counted steps from 0, in files and streams."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from api.cli.local_run import watch_run
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.history.totals import RunTotals
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from pipeline.data.events import AlarmEvent, Event, StepEvent
from stages.samples.reading import newest
from stages.samples.sample_log import FOLDER
from tests.orchestration.runs import MOCK, recipe

ALARM = {"metric": "ess", "value": 0.04, "reason": "ess: 0.04", "look": "There."}
FORECAST = {"step_seconds": 1.0, "bound": 1, "before": 1}


async def watched(run: Execution) -> None:
    await watch_run(run, Console(file=io.StringIO()), json=False, plain=True)


def counted_from_0(run: Path) -> None:
    """Have the files of ``run`` be as a former version writes them, with an alarm at each step."""
    lines = list[dict[str, Any]]()
    for line in map(json.loads, (run / METRICS).read_text().splitlines()):
        lines.append(line)
        if line["kind"] == "step":
            step = line["data"]["step"] = line["data"]["step"] - 1
            milliseconds, _, number = line["id"].partition("-")
            at = {**line, "id": f"{milliseconds}-{int(number) + 1}"}
            lines.append({**at, "kind": "alarm", "data": {**ALARM, "step": step}})
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (run / FOLDER).glob("*.jsonl"):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        former = [{**sample, "step": sample["step"] - 1} for sample in samples]
        path.write_text("".join(json.dumps(sample) + "\n" for sample in former))
    shutil.rmtree(run / "index")


async def test_a_run_of_a_former_version_goes_on_and_all_its_steps_count_from_1(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    of = recipe(MOCK, train__steps=4, checkpoint__every=2)
    await watched(Execution(RunFolder.create(of, run)))
    counted_from_0(run)
    assert [each.data["step"] for each in read_metrics(run / METRICS) if each.kind == "step"] == [
        *range(1, 5)
    ]
    await watched(Execution(RunFolder.resume(run, ["train.steps=6"], start_version=2)))
    events = list(read_metrics(run / METRICS))
    assert [each.data["step"] for each in events if each.kind == "step"] == [*range(1, 7)]
    assert [each.data["step"] for each in events if each.kind == "alarm"] == [1, 2], (
        "those of steps 3 and 4 are gone with them"
    )
    samples = [*newest(run / FOLDER)]
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(1, 7), 16)
    for sample in samples:
        oldest = min(version for version, _ in sample["versions"])
        assert sample["step"] == oldest + sample["staleness"] + 1


def test_events_and_totals_that_count_from_0_are_read_from_1() -> None:
    made = {"rows": 1, "groups": [0], "tokens_generated": 1}
    event = Event("1-0", 1.0, "step", {"step": 6, "version": 7, **made})
    assert event.data["step"] == 7
    assert Event("1-0", 1.0, "step", event.data).data == event.data, "which is as it was"
    alarm = Event("2-0", 2.0, "alarm", {**ALARM, "step": -1})
    assert (alarm.data["step"], alarm.data["version"]) == (0, 0), "before the first one"
    forecast = Event("3-0", 3.0, "forecast", {**FORECAST, "step": 7})
    assert (forecast.data["step"], forecast.data["version"]) == (8, 7)
    later = Event("4-0", 4.0, "alarm", {**ALARM, "step": 8, "version": 8})
    assert later.data["step"] == 8

    wire = {**RunTotals().wire(), "step": {"step": 6, "version": 7, **made}}
    totals = RunTotals.of({**wire, "alarms": [(2.0, {**ALARM, "step": 6})]})
    assert isinstance(totals.step, StepEvent)
    assert totals.step.step == 7
    ((_, alarm_of_totals),) = totals.alarms
    assert isinstance(alarm_of_totals, AlarmEvent)
    assert alarm_of_totals.step == 7
