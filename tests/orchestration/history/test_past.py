"""Any series over any time, from a run's files: as from all of its events, in a time that hardly
grows with the run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from api.telemetry.series import Wanted
from orchestration.history.columns import LEVELS, Columns, unpacked
from orchestration.history.events_file import METRICS, MetricsFile, read_metrics
from orchestration.history.past import Series, past_of
from orchestration.history.reduction import TooMany
from orchestration.history.segments import closed
from pipeline.data.events import Event

BEGIN = 1_700_000_000.0
STEPS = 1500
NAMES = [
    [],
    ["step.loss", "step.rows"],
    ["evaluation"],
    ["stage/rollout-0.tokens", "sync"],
    ["step.late"],
]


def event(time: float, kind: str, **data: Any) -> Event:
    return Event(f"{int(1000 * time)}-0", time, kind, data)


def events(steps: int = STEPS) -> Iterator[Event]:
    """Steps of 0.1 to 40 s, a pause of some hours, numbers that some events lack, one that begins
    late."""
    draw = random.Random(7)
    at = BEGIN
    for step in range(steps):
        at += draw.choice([0.1, 1.0, 40.0]) if step % 500 else 10_000.0
        at = round(at, 3)
        numbers: dict[str, Any] = {
            "loss": round(draw.gauss(0, 1), 4),
            "staleness_max": draw.randrange(5),
        }
        if step % 3 == 0:
            del numbers["loss"]
        if step > steps // 2:
            numbers["late"] = step
        yield event(
            at,
            "step",
            step=step + 1,
            version=step + 1,
            rows=draw.randrange(64),
            tokens_generated=10**10 * step,
            **numbers,
        )
        if step % 10 == 0:
            yield event(
                at + 0.01,
                "evaluation",
                version=step,
                step=step,
                reward_mean=draw.random(),
                samples=[],
            )
        yield event(
            at + 0.02,
            "stage",
            stage="rollout",
            worker="rollout-0",
            wall=at - BEGIN,
            busy=1.0,
            tokens=step,
        )
        yield event(
            at + 0.03,
            "sync",
            worker=f"rollout-{step % 2}",
            version=step + 1,
            bytes=8,
            exposed_seconds=0.25,
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / METRICS
    with MetricsFile(path, 30_000) as file:
        for each in events():
            file.event(each)
    assert len(closed(path)) > 5
    return path


def columns(series: Series) -> dict[str, dict[str, list[float | None]]]:
    return dict(series.columns())


def near(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].keys() == right[name].keys()
        for number, column in left[name].items():
            expected = right[name][number]
            assert [value is None for value in column] == [value is None for value in expected], (
                name,
                number,
            )
            pairs = zip(column, expected, strict=True)
            assert all(
                math.isclose(one or 0.0, other or 0.0, rel_tol=1e-9) for one, other in pairs
            ), (name, number)


@settings(max_examples=40, deadline=None, phases=[Phase.generate])  # smaller times say no more
@given(
    every=st.sampled_from([0.0, 1.0, 5.0, 10.0, 30.0, 60.0, 600.0, 3600.0, 7200.0, 86400.0]),
    begin=st.floats(-0.1, 1.0),
    part=st.floats(0.0, 1.2),
    names=st.sampled_from(NAMES),
)
def test_points_are_those_of_all_events(
    run: Path, every: float, begin: float, part: float, names: list[str]
) -> None:
    all_ = [one for one in read_metrics(run) if one.kind != "state"]
    length = all_[-1].time - BEGIN
    first = BEGIN + begin * length
    last = BEGIN + (begin + part) * length
    expected = Series(every, Wanted(names))
    wanted = Wanted(names)
    for each in all_:
        if first <= each.time <= last:
            expected.add(each)
    found = past_of(run, first, last, every, wanted)
    assert found.last == all_[-1].id
    if every < 60:  # stages are then as they were sent
        expected = Series(every, Wanted(names))
        for each in read_metrics(run, detail=True):
            if first <= each.time <= last:
                expected.add(each)
    left = columns(found)
    right = columns(expected)
    if every < 60:
        for one in (left, right):
            one.pop("stage/rollout-0", None)
    near(left, right)


def test_a_width_that_no_level_divides_has_all_that_happened(run: Path) -> None:
    found = columns(past_of(run, 0.0, math.inf, 607.0, Wanted(["step"])))["step"]
    rows = [one.data["rows"] for one in read_metrics(run) if one.kind == "step"]
    assert sum(value or 0 for value in found["rows"]) == sum(rows)
    assert found["step"][-1] == STEPS
    times = [value or 0.0 for value in found["time"]]
    assert all(later - one >= 607 for one, later in itertools.pairwise(times))


def test_what_would_be_too_many_is_refused_without_being_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestration.history.past._pieces", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(Series.__init__, "__defaults__", (None, 100))
    with pytest.raises(TooMany, match="more than 100 points"):
        past_of(run, 0.0, math.inf, 0.0, Wanted(["step.loss"]))


def test_a_rewound_run_has_no_points_of_the_steps_that_were_removed(
    run: Path, tmp_path: Path
) -> None:
    path = tmp_path / METRICS
    with MetricsFile(path, 30_000) as file:
        for each in events(900):
            file.event(each)
        file.rewind(500)
    found = columns(past_of(path, 0.0, math.inf, 60.0, Wanted(["step.step"])))["step"]
    assert found["step"][-1] == 500


def test_a_question_reads_what_it_asks_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()

    def counted(data: bytes, counted: bool = True) -> Any:
        found = unpacked(data, counted)
        read.append(len(found[0]))
        return found

    monkeypatch.setattr("orchestration.history.past.unpacked", counted)
    points = columns(past_of(run, 0.0, math.inf, 7200.0, Wanted(["step.loss"])))["step"]["time"]
    assert sum(read) <= 2 * (len(points) + 2 * len(closed(run))), (
        "points of the widest level, and of no other number"
    )


def test_levels_divide_each_other() -> None:
    assert all(coarse % fine == 0 for fine, coarse in itertools.pairwise(LEVELS))


def test_a_number_is_asked_about_once_for_all_of_its_events_and_one_that_no_float_holds_is_left_out() -> (
    None
):
    asked = list[tuple[str, str, str]]()

    def wanted(kind: str, series: str, number: str) -> bool:
        asked.append((kind, series, number))
        return number != "rows"

    columns = Columns(wanted)
    for step in range(100):
        columns.add(
            event(BEGIN + step, "step", step=step, loss=0.5, rows=8, huge=10**400, is_last=True)
        )
    assert sorted(asked) == [("step", "step", number) for number in ("loss", "rows", "step")]
    ((series, points),) = columns.series()
    assert (series, sorted(points.values)) == ("step", ["loss", "step"])
