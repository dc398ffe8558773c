"""What a run of weeks leaves, by slopes of short ones: counts and bytes, no times."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from api.telemetry.progress import Progress
from api.telemetry.series import Wanted, width
from benchmarks.robustness.endurance import BEGIN, by_clock, bytes_of, main, sent, size_of
from benchmarks.robustness.growth import BOUNDS, Growth, Trend, grown, growth_table
from orchestration.history.events_file import METRICS, MetricsFile
from orchestration.history.past import past_of
from pipeline.data.events import Event
from tests.forked import ADDRESS

OPTIONS = argparse.Namespace(step_seconds=2.4, rollouts=4)
# the most that a run's file of events may grow by
STEP_BYTES = 1_500
HOUR_BYTES = 1_000_000


def events_of_steps(first: int, last: int) -> list[Event]:
    draw = random.Random(first)
    return [
        event
        for step in range(first, last)
        for event in sent(step, BEGIN + 2.4 * (step + 1), OPTIONS, draw)
    ]


def test_a_slope_and_its_error_are_those_of_least_squares() -> None:
    steps = [0, 1, 2, 3, 4]
    trend = Trend.of(steps, [1.0, 3.1, 4.9, 7.2, 8.8])
    assert trend.slope == pytest.approx(1.97)
    assert trend.error == pytest.approx(math.sqrt(0.091 / (5 - 2) / 10)), (
        "of residuals -.06, .07, -.1, .23, -.14"
    )
    assert trend.grows
    assert not Trend.of(steps, [7.0] * 5).grows
    assert not Trend.of(steps, [9.0, 7.0, 9.0, 7.0, 9.1]).grows, "within two errors"


def test_a_table_names_what_grows_without_a_bound() -> None:
    growth = Growth()
    for step in range(0, 100, 10):
        growth.add(
            step,
            step / 5,
            {"threads: flow": 4, "descriptors: flow": 12 + step, "files: events": 900 * step},
        )
    lines = growth_table(growth).splitlines()
    assert (
        "| files: events | 0.08 MiB | 900 B | 0 B | yes | none: the history of the run |" in lines
    )
    assert lines[-1] == "grows beyond 2 errors, with no bound named: descriptors: flow"
    assert "90 steps, 5.0 a second" in lines


def test_a_view_and_an_answer_are_as_large_for_a_long_run_as_for_a_short_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "clock").mkdir()
    progress = Progress("long", 5_000, bound=1)
    path = tmp_path / METRICS
    sizes = []
    points = []
    for first, last in pairwise([0, 1_000, 2_000, 5_000]):
        with MetricsFile(path) as file:
            for event in events_of_steps(first, last):
                progress.apply(event)
                file.event(event)
        sizes.append(size_of(progress) - size_of(progress.evaluated))
        past = past_of(path, BEGIN, math.inf, width(2.4 * last), Wanted(["step.loss"]))
        points += [len(columns["time"]) for _, columns in past.columns()]
    assert max(sizes) <= 1.05 * sizes[0], (
        "an evaluation each hundred steps has points of its own, as many at most"
    )
    assert max(points) <= 1_000
    assert bytes_of(path) <= STEP_BYTES * 5_000
    assert by_clock(tmp_path / "clock", seconds=900)["bytes_per_hour"] <= HOUR_BYTES


def test_the_command_prints_each_figure_at_each_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(
        [
            "--steps",
            "90",
            "--run-steps",
            "0",
            "--out",
            str(tmp_path / "run"),
            "--json",
            str(tmp_path / "figures.json"),
        ]
    )
    marks = json.loads((tmp_path / "figures.json").read_text())["marks"]
    assert [mark["steps"] for mark in marks] == [9, 90]
    assert marks[-1]["line_bytes_per_step"] <= STEP_BYTES
    table = [
        line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")
    ]
    assert {len(row) for row in table} == {3}
    names = {row[0].removeprefix("| ") for row in table}
    assert {
        "resume, s",
        "all of step.loss",
        "redraw, ms",
        "report, µs a step",
        "write, µs a step",
    } <= names
    assert (tmp_path / "run" / "summary.json").exists(), "a report was made"


def test_a_real_run_grows_only_by_what_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is not judged: heaps fill in the first thousand steps."""
    # its workers are to be processes of the command, not of the tests' own fork server
    monkeypatch.delenv(ADDRESS, raising=False)
    growth = grown(tmp_path, steps=600, samples=12, command=(sys.executable, "-m", "tests.command"))
    trends = growth.trends()
    counted = {
        name for name in trends if name.startswith(("threads", "descriptors", "index: keys"))
    }
    wanted = {
        "threads: worker flow",
        "descriptors: worker update",
        "descriptors: index",
        "index: keys",
    }
    assert wanted <= counted, sorted(counted)
    # the least of a third of the samples: what is in flight at a sample comes on top, and goes
    third = len(growth.steps) // 3
    for name in counted:
        values = growth.values[name]
        assert min(values[-third:]) <= min(values[third:-third]) + 3, (name, values)
    assert trends["files: events"].slope <= STEP_BYTES
    assert trends["files: logs"].slope <= 1
    files = {name for name, trend in trends.items() if name.startswith("files") and trend.slope > 1}
    assert files <= BOUNDS.keys()
