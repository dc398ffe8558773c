"""Trackers show every step once, at its own step and time, also after failures."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from api.telemetry.trackers import (
    Mlflow,
    Point,
    Points,
    TensorBoard,
    TrackError,
    WandB,
    events_of_folder,
    track,
)
from orchestration.events_file import METRICS, MetricsFile
from pipeline.events import Event

START = 1_700_000_000


def step(number: int, **changes: Any) -> Event:
    data = {"step": number, "version": number + 1, "reward_mean": number / 4, "loss": 0.5, "groups": [1], **changes}
    return Event(f"{START + number}000-0", float(START + number), "step", data)


def stage(number: int, busy: float) -> Event:
    data = {"worker": "reward-0", "stage": "reward", "busy": busy, "waiting_input": 1.0, "waiting_room": 0.0}
    rest = {"other": 0.0, "wall": busy + 1.0, "tokens": 100 * busy, "queue_depth": 3}
    return Event(f"{START + number}500-0", START + number + 0.5, "stage", data | rest)


def run_folder(folder: Path, steps: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.json").write_text(json.dumps({"name": "tracked", "train": {"steps": 9}}))
    with MetricsFile(folder / METRICS) as file:
        for number in range(steps):
            file.event(step(number))
            file.event(stage(number, float(number + 1)))
    return folder


class Kept:
    """A tracker that keeps what it is shown."""

    key = "kept"

    def __init__(self) -> None:
        self.points: list[Point] = []

    def show(self, point: Point) -> None:
        self.points.append(point)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_shares_of_a_worker_are_those_between_two_steps() -> None:
    points = Points()
    found = [point for event in (stage(0, 1.0), step(1), stage(1, 3.0), step(2)) for point in points.of(event)]
    shares = [
        point.numbers["stage/reward-0/busy_share"] for point in found if "stage/reward-0/busy_share" in point.numbers
    ]
    assert shares == [0.5, 1.0]
    assert [point.step for point in found] == [1, 1, 2, 2]
    assert "train/step" not in found[0].numbers
    found = list(points.of(step(3, loss=float("nan"))))
    assert found[0].numbers == {"train/reward_mean": 0.75}


async def test_tracking_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, kept = run_folder(tmp_path / "tracked", 3), Kept()
    events = lambda after: events_of_folder(folder, after)  # noqa: E731
    await track(events, "tracked", tmp_path / "into", lambda *_: kept, {})
    before = len(kept.points)
    assert [p.step for p in kept.points if "train/loss" in p.numbers] == [0, 1, 2]
    with MetricsFile(folder / METRICS) as file:
        file.event(step(7))
    keys: list[str] = []
    await track(events, "tracked", tmp_path / "into", lambda *given: keys.append(given[-1]) or kept, {})  # type: ignore[func-returns-value]
    assert [point.step for point in kept.points[before:]] == [7]
    assert keys == ["kept"]
    with pytest.raises(TrackError, match="has run 'tracked'"):
        await track(events, "another", tmp_path / "into", lambda *_: kept, {})


async def test_what_was_shown_before_a_failure_is_not_shown_again(tmp_path: Path) -> None:
    kept = Kept()

    async def broken(after: str) -> AsyncIterator[Event]:
        for number in range(5):
            if number == 3 and after == "0":
                raise ConnectionError("cut off")
            event = step(number)
            if event.id > after or after == "0":
                yield event

    with pytest.raises(ConnectionError):
        await track(broken, "tracked", tmp_path, lambda *_: kept, {})
    await track(broken, "tracked", tmp_path, lambda *_: kept, {})
    assert [point.step for point in kept.points] == [0, 1, 2, 3, 4]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run_folder(tmp_path / "tracked", 4)
    for _ in range(2):  # the second time there is nothing more
        result = CliRunner().invoke(app, ["track", str(folder), "--to", "tensorboard"])
        assert result.exit_code == 0, result.output
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    rewards = found.Scalars("train/reward_mean")
    assert [(one.step, one.value) for one in rewards] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    assert [one.wall_time for one in rewards] == [START + number for number in range(4)]
    assert "stage/reward-0/busy_share" in found.Tags()["scalars"]


def test_mlflow_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    made = Mlflow(tmp_path, "tracked", {"train": {"steps": 9}}, "")
    made.show(Point(START, 3, {"train/loss": 0.5}))
    again = Mlflow(tmp_path, "tracked", {}, made.key)
    again.show(Point(START + 1, 4, {"train/loss": 0.25}))
    again.close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").resolve().as_uri())
    history = client.get_metric_history(made.key, "train/loss")
    assert [(one.step, one.value, one.timestamp) for one in history] == [
        (3, 0.5, START * 1000),
        (4, 0.25, START * 1000 + 1000),
    ]
    assert client.get_run(made.key).data.params["train.steps"] == "9"


def test_wandb_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    made = WandB(tmp_path, "tracked", {"train": {"steps": 9}}, "")
    for number in range(3):
        made.show(Point(time.time(), number, {"train/loss": 0.5 / (number + 1)}))
    assert made._run.summary["train/loss"] == pytest.approx(0.5 / 3)
    made.close()
    written = list((tmp_path / "wandb").glob(f"offline-run-*-{made.key}/run-{made.key}.wandb"))
    assert written
    assert os.path.getsize(written[0]) > 0


@pytest.mark.parametrize(("tracker", "package"), [(Mlflow, "mlflow"), (WandB, "wandb"), (TensorBoard, "tensorboard")])
def test_a_tracker_that_is_not_installed_says_what_to_install(
    tracker: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TrackError, match=rf"pip install 'asyncdock\[{package}\]'"):
        tracker(tmp_path, "tracked", {}, "")


def test_what_cannot_be_tracked_is_refused(tmp_path: Path) -> None:
    unknown = CliRunner().invoke(app, ["track", str(run_folder(tmp_path / "tracked", 1)), "--to", "paper"])
    assert unknown.exit_code == 2
    assert "tensorboard, mlflow, wandb" in unknown.output
    nowhere = CliRunner().invoke(app, ["track", str(tmp_path / "nowhere")])
    assert nowhere.exit_code == 2
    assert "not the folder of a run" in nowhere.output
