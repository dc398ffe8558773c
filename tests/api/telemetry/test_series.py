"""What charts rely on from series: as many values as times, nothing made up, and sums that are
those of the events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.telemetry.series import Wanted
from orchestration.history.past import Series
from orchestration.history.reduction import TooMany
from pipeline.data.events import Event

events = st.lists(
    st.tuples(
        st.floats(0, 500, allow_nan=False),
        st.integers(0, 9),
        st.one_of(st.none(), st.floats(-9, 9)),
    ),
    max_size=60,
)


@given(past=events, every=st.sampled_from([0.0, 1.0, 7.0, 60.0]))
def test_points_are_the_events_of_their_time(
    past: list[tuple[float, int, float | None]], every: float
) -> None:
    past = sorted(past, key=lambda one: one[0])
    series = Series(every)
    for number, (time, rows, loss) in enumerate(past):
        data: dict[str, Any] = {
            "step": number,
            "rows": rows,
            "staleness_max": float(rows),
            "text": "x",
            "flag": True,
        }
        series.add(
            Event(f"{number}-0", time, "step", data | ({} if loss is None else {"loss": loss}))
        )
    columns = dict(series.columns()).get("step", {"time": []})
    assert len({len(values) for values in columns.values()}) == 1
    assert "text" not in columns
    assert "flag" not in columns
    times: Any = columns["time"]
    assert times == sorted(times)
    groups = (
        [[one for one in past if time <= one[0] < time + every] for time in times]
        if every
        else [[o] for o in past]
    )
    assert sum(map(len, groups)) == len(past)
    if past:
        assert columns["rows"] == [sum(rows for _, rows, _ in group) for group in groups]
        assert columns["staleness_max"] == [max(rows for _, rows, _ in group) for group in groups]
        assert columns["step"][-1] == len(past) - 1
        losses = [[loss for *_, loss in group if loss is not None] for group in groups]
        if "loss" in columns:
            for found, given_ in zip(columns["loss"], losses, strict=True):
                assert found == (pytest.approx(sum(given_) / len(given_)) if given_ else None)


def test_only_wanted_numbers_are_kept() -> None:
    wanted = Wanted(["stage.queue_depth", "sync/rollout-0"])
    series = Series(0, wanted)
    for worker in ("rollout-0", "rollout-1"):
        series.add(Event("1-0", 1.0, "stage", {"worker": worker, "queue_depth": 3, "rows": 5}))
        series.add(Event("2-0", 1.0, "sync", {"worker": worker, "bytes": 3}))
    series.add(Event("3-0", 1.0, "step", {"loss": 1.0}))
    assert dict(series.columns()) == {
        "stage/rollout-0": {"time": [1.0], "queue_depth": [3.0]},
        "stage/rollout-1": {"time": [1.0], "queue_depth": [3.0]},
        "sync/rollout-0": {"time": [1.0], "bytes": [3.0]},
    }
    assert wanted.kinds == {"stage", "sync"}


def test_more_points_than_an_answer_holds_are_refused() -> None:
    series = Series(0, most=3)
    past = [Event(f"{number}-0", float(number), "step", {"loss": 1.0}) for number in range(4)]
    for event in past:
        series.add(event)
    with pytest.raises(TooMany, match=r"more than 3 points.*larger every"):
        dict(series.columns())
