"""What a run leaves in its folder can be read by people and by programs."""

from __future__ import annotations

import io
import json
import math
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from api.cli.service.runs import ran
from api.telemetry.progress import Progress
from api.terminal.report import smooth, summary_table, write_plot, write_report
from orchestration.history.events_file import METRICS, MetricsFile, read_metrics
from orchestration.service.folder_runs import FolderRuns
from orchestration.state.paths import RECIPE
from pipeline.data.events import Event
from tests.api import scripted


def record(folder: Path, events: list[Event]) -> None:
    with MetricsFile(folder / METRICS) as file:
        for event in events:
            file.event(event)


def test_metrics_hold_every_event_as_it_was_and_of_those_by_the_clock_the_totals(
    tmp_path: Path,
) -> None:
    everything = scripted.events()
    record(tmp_path, everything)
    kept = list(read_metrics(tmp_path / METRICS))
    by_clock = ("stage", "sync")
    assert [event for event in kept if event.kind not in by_clock] == [
        event for event in everything if event.kind not in by_clock
    ]
    for worker in ("rollout-0", "update-0"):
        told, last = (
            [e.data for e in events if e.data.get("worker") == worker]
            for events in (everything, kept)
        )
        for total in ("wall", "busy", "waiting_input", "rows", "tokens"):
            assert [e[total] for e in last if "wall" in e][-1] == [
                e[total] for e in told if "wall" in e
            ][-1]
        for sums in ("bytes", "publish_seconds", "exposed_seconds", "hidden_seconds"):
            assert sum(e.get(sums, 0) for e in last) == pytest.approx(
                sum(e.get(sums, 0) for e in told)
            )
    of_detail = [
        event for event in read_metrics(tmp_path / METRICS, detail=True) if event.kind == "stage"
    ]
    ids = {event.id for event in everything if event.kind == "stage"}
    assert [event for event in of_detail if event.id in ids] == [
        e for e in everything if e.kind == "stage"
    ]


def test_metrics_are_strict_json_whatever_was_measured(tmp_path: Path) -> None:
    record(tmp_path, [scripted.step(0, loss=math.nan, grad_norm=math.inf)])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = json.loads((tmp_path / METRICS).read_text(), parse_constant=refuse)
    assert line["data"]["loss"] is None
    assert line["data"]["grad_norm"] is None
    assert line["data"]["reward_mean"] == 0.0


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    record(tmp_path, scripted.events()[:4])
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"id": "9-0", "ti')
    assert len(list(read_metrics(tmp_path / METRICS))) == 4


def test_a_resumed_run_is_reported_as_one(tmp_path: Path) -> None:
    everything = scripted.events()
    at = next(
        i for i, event in enumerate(everything) if event.kind == "step" and event.data["step"] == 6
    )
    record(tmp_path, everything[:at])  # killed after step 5
    record(
        tmp_path, [event for event in everything if event.kind != "step" or event.data["step"] > 3]
    )  # from a checkpoint
    report = write_report(tmp_path, scripted.recipe(), checkpoint=None)
    assert report.summary["steps"] == scripted.STEPS
    assert report.summary["reward_last_steps"] == pytest.approx(0.55)


async def test_a_resumed_run_has_one_duration_everywhere(tmp_path: Path) -> None:
    """It ran for 28 s, and for 28 s again an hour later."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / RECIPE).write_text(scripted.recipe().to_json())
    first = scripted.events("stopped")
    record(
        folder,
        [*first, *(replace(each, id=f"9{each.id}", time=each.time + 3600) for each in first)],
    )
    runs = FolderRuns("redis://127.0.0.1:1", [tmp_path], tmp_path / "copies")
    (unreported,) = (await runs.list())[0]  # as where the command was killed
    report = write_report(folder, scripted.recipe(), checkpoint=None)
    runs.look_again()
    (reported,) = (await runs.list())[0]
    await runs.close()
    assert report.summary["seconds"] == pytest.approx(56)
    for shown in (unreported, reported):
        assert shown.started == scripted.BEGIN + 3600
        assert shown.ended == report.summary["ended"] == scripted.BEGIN + 3628
        assert shown.former_seconds == pytest.approx(28)
        assert ran(shown, time.time()) == "0:56"


@pytest.mark.parametrize("rate", [0.0, 1e-5])
def test_equal_rewards_are_noted_with_the_rate_that_they_scale_to_0(
    rate: float, tmp_path: Path
) -> None:
    same = {"reward_mean": 0.5, "reward_std": 0.0, "learning_rate": rate}
    record(tmp_path, [scripted.step(number, **same) for number in range(3)])
    (note,) = write_report(tmp_path, scripted.recipe(), checkpoint=None).notes
    assert note.startswith("Every reward was 0.5, in all 3 steps: there was nothing to learn from")
    assert ("learning rate was 0 (algorithm.options.scale_learning_rate)." in note) == (rate == 0)


def test_the_report_of_a_run(tmp_path: Path) -> None:
    record(tmp_path, scripted.events())
    report = write_report(tmp_path, scripted.recipe(), checkpoint=tmp_path / "model")
    assert {path.name for path in report.files} == {
        "summary.json",
        "metrics.jsonl",
        "reward.png",
        "samples.md",
    }
    assert report.missing == []

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["state"] == "finished"
    assert summary["reward_first_steps"] == pytest.approx(0.15)
    assert summary["reward_last_steps"] == pytest.approx(0.55)
    assert summary["reward_gain"] == pytest.approx(0.4)
    assert summary["held_out_first"] == 0.1
    assert summary["held_out_last"] == 0.9
    assert summary["tokens_per_second"] == pytest.approx(250)
    assert summary["seconds_per_step"] == pytest.approx(2.0)
    assert summary["staleness_max"] == scripted.BOUND == summary["staleness_bound"]
    assert summary["restarts"] == 1
    assert summary["stages"]["rollout-0"]["busy"] == pytest.approx(0.7)
    assert summary["dropped"] == {
        "equal rewards": {"groups": 3, "tokens": 1200},
        "reward x failed": {"groups": 1, "tokens": 0},
    }
    assert (summary["skipped_steps"], summary["epochs"]) == (
        2,
        {"prompts.sources.0": 2, "prompts.sources.1": 5},
    )
    assert summary["checkpoint"] == str(tmp_path / "model")

    png = (tmp_path / "reward.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 800
    assert height >= 600

    shown = io.StringIO()
    Console(file=shown, width=100).print(summary_table(report.summary))
    for text in (
        "8 of 8 in 0:28",
        "0.150 → 0.550  (+0.400, mean of the first and last 4 steps)",
        "0.100 → 0.900",
        "2 max, bound 2",
        "2 with 32 answers, 200 tokens; 25% of an engine for 0:04 (all of one for 1.0 s)",
        "3 groups (1,200 tokens): equal rewards; 1 group (0 tokens): reward x failed",
        "2 steps, as a loss or gradient was not finite",
        "2 of prompts.sources.0, 5 of prompts.sources.1",
    ):
        assert text in shown.getvalue()


def test_samples_stand_side_by_side_and_cannot_break_the_table(tmp_path: Path) -> None:
    record(tmp_path, scripted.events())
    write_report(tmp_path, scripted.recipe(), checkpoint=None)
    lines = (tmp_path / "samples.md").read_text().splitlines()
    assert "| before (version 0) | after (version 8) |" in lines
    assert "> What is 2 | 3?" in lines
    answers = next(line for line in lines if "maybe" in line)
    assert answers == "| I think &lt;b>6&lt;/b> \\| maybe | *(nothing)* |"
    assert "| reward 0.10 | reward 0.90 |" in lines


def test_without_matplotlib_the_rest_is_there_and_the_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record(tmp_path, scripted.events())
    report = write_report(tmp_path, scripted.recipe(), checkpoint=None)
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "reward.png").exists()
    assert report.missing == [
        "reward.png: matplotlib is not installed; pip install 'asyncdock[quickstart]'"
    ]


def test_a_run_that_never_stepped_has_a_summary(tmp_path: Path) -> None:
    failed = [scripted.event(0, "state", state="failed", reason="rollout-0: no memory")]
    record(tmp_path, failed)
    report = write_report(tmp_path, scripted.recipe(), checkpoint=None)
    assert {path.name for path in report.files} == {"summary.json", "metrics.jsonl"}
    shown = io.StringIO()
    Console(file=shown, width=100).print(summary_table(report.summary))
    assert "rollout-0: no memory" in shown.getvalue()


def test_smoothing_keeps_length_and_level() -> None:
    assert smooth([2.0] * 7, 3) == [2.0] * 7
    assert smooth([0.0, 3.0, 6.0], 3) == [1.5, 3.0, 4.5]


def test_smoothing_takes_as_many_operations_as_values() -> None:
    operations = 0

    class Value(float):
        def __add__(self, other: float) -> Value:
            nonlocal operations
            operations += 1
            return Value(float(self) + other)

        __radd__ = __add__

    counts = []
    for length in (1000, 4000):
        operations = 0
        smooth([Value(1.0)] * length, length // 12)
        counts.append(operations)
    assert counts == [1998, 7998]


@given(values=st.lists(st.floats(-5, 5) | st.just(math.nan), max_size=60), span=st.integers(3, 20))
def test_smoothing_is_a_mean_of_the_values_around(values: list[float], span: int) -> None:
    half = span // 2
    for i, average in enumerate(smooth(values, span)):
        window = values[max(0, i - half) : i + half + 1]
        around = [value for value in window if math.isfinite(value)]
        expected = sum(around) / len(around) if around else math.nan
        assert average == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_the_plot_of_a_long_run_shows_all_of_its_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = list[Any]()
    savefig = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(savefig, lambda figure, path: figures.append(figure))
    progress = Progress("long", 30_000, 2)
    for number in range(30_000):
        reward = 9.0 if number == 12_345 else number / 30_000
        stale = 7.0 if number == 20_000 else 1.0
        progress.apply(scripted.step(number, reward_mean=reward, staleness_max=stale))
    write_plot(tmp_path / "reward.png", progress)
    reward, staleness = figures[0].axes
    (band,) = reward.collections
    assert band.get_paths()[0].vertices[:, 1].max() == 9.0
    (average,) = reward.lines
    assert 200 < len(average.get_xdata()) <= 1024
    assert average.get_ydata()[-1] == pytest.approx(1, abs=0.05)
    assert average.get_xdata()[-1] == pytest.approx(30_000, abs=100)
    assert max(staleness.lines[0].get_ydata()) == 7.0
