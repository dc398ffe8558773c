"""Trackers show every step once, at its own step and time, also after failures."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner

from api.cli.local_run import watch_run
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
from orchestration.history.events_file import METRICS, MetricsFile
from orchestration.recipe.loading.load import load_recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from pipeline.data.events import Event, order
from tests.orchestration.runs import MOCK, recipe

START = 1_700_000_000


def step(number: int, **changes: Any) -> Event:
    data = {
        "step": number + 1,
        "version": number + 1,
        "reward_mean": number / 4,
        "loss": 0.5,
        "groups": [1],
        **changes,
    }
    return Event(f"{START + number}000-0", float(START + number), "step", data)


def stage(number: int, busy: float) -> Event:
    data = {
        "worker": "reward-0",
        "stage": "reward",
        "busy": busy,
        "waiting_input": 1.0,
        "waiting_room": 0.0,
    }
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

    def close(self, state: str) -> None: ...


def test_shares_of_a_worker_are_those_between_two_steps() -> None:
    points = Points()
    found = [
        point
        for event in (stage(0, 1.0), step(1), stage(1, 3.0), step(2))
        for point in points.of(event)
    ]
    shares = [
        point.numbers["stage/reward-0/busy_share"]
        for point in found
        if "stage/reward-0/busy_share" in point.numbers
    ]
    assert shares == [0.5, 1.0]
    assert [point.step for point in found] == [2, 2, 3, 3]
    assert "train/step" not in found[0].numbers
    found = list(points.of(step(3, loss=float("nan"))))
    assert found[0].numbers == {"train/reward_mean": 0.75, "train/reward": 0.75}


async def shown(folder: Path, into: Path) -> list[Point]:
    """The points of the run in ``folder`` that are shown now."""
    kept = Kept()
    await track(
        lambda after: events_of_folder(folder, after), folder.name, into, lambda *_: kept, {}
    )
    return kept.points


async def test_tracking_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "tracked", 3)
    kept = Kept()
    events = lambda after: events_of_folder(folder, after)  # noqa: E731
    await track(events, "tracked", tmp_path / "into", lambda *_: kept, {})
    before = len(kept.points)
    assert [p.step for p in kept.points if "train/loss" in p.numbers] == [1, 2, 3]
    with MetricsFile(folder / METRICS) as file:
        file.event(step(7))
    keys: list[str] = []
    await track(
        events, "tracked", tmp_path / "into", lambda *given: keys.append(given[-1]) or kept, {}
    )  # type: ignore[func-returns-value]
    assert [point.step for point in kept.points[before:]] == [8]
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
    assert [point.step for point in kept.points] == [1, 2, 3, 4, 5]


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
    assert [(one.step, one.value) for one in rewards] == [(1, 0.0), (2, 0.25), (3, 0.5), (4, 0.75)]
    assert [one.wall_time for one in rewards] == [START + number for number in range(4)]
    assert "stage/reward-0/busy_share" in found.Tags()["scalars"]


# Runs `asyncdock track` where only what the core and one extra need is found, as after `pip install
# asyncdock[EXTRA]`.
AS_INSTALLED = """
import sys
from importlib import metadata
from packaging.requirements import Requirement

def closure(name, extras, found):
    try:
        requires = metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return
    for each in map(Requirement, requires):
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            key = each.name.lower().replace("_", "-").replace(".", "-")
            if key not in found or each.extras - found[key]:
                found[key] = found.get(key, set()) | each.extras
                closure(each.name, each.extras, found)

extra, *arguments = sys.argv[1:]
needed = {"setuptools": set()}
closure("asyncdock", (extra,), needed)
modules = metadata.packages_distributions()
kept = {name.lower().replace("_", "-").replace(".", "-") for name in needed}

class Installed:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        owners = {owner.lower().replace("_", "-").replace(".", "-") for owner in modules.get(name, ())}
        return None if owners and not owners & {*kept, "asyncdock"} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Installed, sys.meta_path)
from api.cli.main import main
sys.argv = ["asyncdock", "track", *arguments]
main()
"""


def tracked(folder: Path, to: str, **environment: str) -> str:
    """Run the command in an empty working directory, which must stay so. Returns what it
    printed."""
    empty = folder.parent / f"working-{to}"
    empty.mkdir(exist_ok=True)
    names = ("PATH", "HOME", "LANG", "PYTHONPATH")
    clean = {name: os.environ[name] for name in names if name in os.environ} | {
        "TMPDIR": str(folder.parent)
    }
    command = [sys.executable, "-c", AS_INSTALLED, to, str(folder.resolve()), "--to", to]
    done = subprocess.run(
        command, cwd=empty, env=clean | environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(empty.iterdir()), "files in the working directory"
    return done.stdout


def full_run(folder: Path) -> dict[str, Any]:
    """A run of the recipe `tiny` with a key that MLflow does not allow, and a value that is too
    long for it."""
    run_folder(folder, 4)
    recipe: dict[str, Any] = load_recipe("recipes/tiny.toml", []).model_dump(mode="json")
    recipe["prompts"]["config"] = {"größe [m]": 10**30, "long": "x" * 9000, "nothing": None}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return recipe


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {
        key: item
        for part, inner in value.items()
        for key, item in flat(inner, f"{name}.{part}".strip(".")).items()
    }


def test_mlflow_as_a_user_installs_it_has_every_parameter_and_point(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    folder = tmp_path / "tracked 100%"
    expected = flat(full_run(folder))
    tracked(folder, "mlflow")
    with MetricsFile(folder / METRICS) as file:
        file.event(step(7))
    tracked(folder, "mlflow")  # goes on with the same run
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.resolve()}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("asyncdock").experiment_id])
    params = run.data.params
    assert len(params) == len(expected) > 150
    assert params["pipeline.staleness"] == str(expected["pipeline.staleness"])
    assert params["prompts.config.größe _m_"] == str(10**30)
    assert params["prompts.config.long"].endswith("x … (9,000 characters)")
    assert len(params["prompts.config.long"]) == 6000
    history = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert [(one.step, one.value, one.timestamp) for one in history] == [
        (number + 1, number / 4, (START + number) * 1000) for number in (0, 1, 2, 3, 7)
    ]
    assert run.info.artifact_uri.startswith((folder.resolve() / "mlflow").as_uri())


def test_what_mlflow_refuses_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at/all")
    with pytest.raises(
        TrackError,
        match=r"--to mlflow: nowhere://at/all refused: .*; set "
        r"MLFLOW_TRACKING_URI",
    ):
        Mlflow(tmp_path, "tracked", {}, "")


def test_wandb_as_a_user_installs_it_writes_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = tmp_path / "tracked"
    expected = full_run(folder)
    tracked(folder, "wandb", WANDB_SILENT="true")
    key = json.loads((folder / "wandb" / "tracked.json").read_text())["key"]
    (written,) = (folder / "wandb" / "wandb").glob(f"offline-run-*-{key}/run-{key}.wandb")
    history, config = wandb_records(written)
    rewards = [
        (row["step"], row["train/reward_mean"]) for row in history if "train/reward_mean" in row
    ]
    assert rewards == [(number + 1, number / 4) for number in range(4)]
    assert config["pipeline"]["staleness"] == expected["pipeline"]["staleness"]
    assert config.keys() >= expected.keys()


def wandb_records(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows that were logged, and the configuration: records in LevelDB's log format, after a
    head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = 7
    whole = b""
    history = list[dict[str, Any]]()
    config = dict[str, Any]()
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind not in (1, 4):  # neither whole nor its last part
            continue
        record = Record()
        record.ParseFromString(whole)
        whole = b""
        if record.HasField("history"):
            row = {
                ".".join(item.nested_key) or item.key: item.value_json
                for item in record.history.item
            }
            history.append({name: json.loads(value) for name, value in row.items()})
        if record.HasField("run"):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return history, config


def test_tensorboard_as_a_user_installs_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tracked"
    full_run(folder)
    assert "7 points" in tracked(folder, "tensorboard")
    assert list((folder / "tensorboard").glob("events.*"))


def test_only_numbers_that_a_float_holds_are_shown() -> None:
    odd = {
        "a": None,
        "b": "text",
        "c": float("inf"),
        "d": 10**400,
        "e": True,
        "f": 10**30,
        "g": [1],
        "h": float("nan"),
    }
    (point,) = (
        point
        for point in Points().of(step(3, reward_mean=None, **odd))
        if "train/loss" in point.numbers
    )
    assert point.numbers == {"train/loss": 0.5, "train/f": 1e30}


@pytest.mark.parametrize(
    ("tracker", "package"), [(Mlflow, "mlflow"), (WandB, "wandb"), (TensorBoard, "tensorboard")]
)
def test_a_tracker_that_is_not_installed_says_what_to_install(
    tracker: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TrackError, match=rf"pip install 'asyncdock\[{package}\]'"):
        tracker(tmp_path, "tracked", {}, "")


def test_what_cannot_be_tracked_is_refused(tmp_path: Path) -> None:
    unknown = CliRunner().invoke(
        app, ["track", str(run_folder(tmp_path / "tracked", 1)), "--to", "paper"]
    )
    assert unknown.exit_code == 2
    assert "use one of: 'mlflow', 'tensorboard', 'wandb'" in unknown.output
    nowhere = CliRunner().invoke(app, ["track", str(tmp_path / "nowhere")])
    assert nowhere.exit_code == 2
    assert "nowhere does not exist; give an id" in nowhere.output


async def test_a_tracker_that_is_ahead_of_all_events_says_so_instead_of_showing_none_for_ever(
    tmp_path: Path,
) -> None:
    """As it is once a clock was set back under an older version."""
    folder = run_folder(tmp_path / "run", 2)
    await shown(folder, tmp_path / "into")
    known = json.loads((tmp_path / "into" / "tracked.json").read_text())
    (tmp_path / "into" / "tracked.json").write_text(
        json.dumps({**known, "after": f"{START + 60}000-0"})
    )
    with pytest.raises(
        TrackError,
        match=rf"events up to id {START + 60}000-0, and .*metrics.jsonl "
        rf"ends with",
    ):
        await shown(folder, tmp_path / "into")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "x"}'])
async def test_a_damaged_record_of_what_was_shown_is_named(content: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 2)
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "tracked.json").write_text(content)
    with pytest.raises(TrackError, match=f"{tmp_path / 'into' / 'tracked.json'} is damaged"):
        await shown(folder, tmp_path / "into")
    assert (tmp_path / "into" / "tracked.json").read_text() == content


async def test_ids_of_a_resumed_run_do_not_fall_and_its_steps_are_shown(tmp_path: Path) -> None:
    """With a clock that is 60 s behind: to the run, ids that were given by one 60 s ahead are the
    same."""
    folder = tmp_path / "run"
    screen = Console(file=io.StringIO())
    await watch_run(
        Execution(RunFolder.create(recipe(MOCK, train__steps=2), folder)),
        screen,
        json=False,
        plain=True,
    )
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    for line in lines:
        milliseconds, number = order(line["id"])
        line["id"] = f"{milliseconds + 60_000}-{number}"
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = await shown(folder, tmp_path / "into")
    assert [point.step for point in before if "train/loss" in point.numbers] == [1, 2]
    await watch_run(
        Execution(RunFolder.resume(folder, ["train.steps=4"])), screen, json=False, plain=True
    )
    ids = [order(json.loads(line)["id"]) for line in (folder / METRICS).read_text().splitlines()]
    assert ids == sorted(set(ids))
    after = await shown(folder, tmp_path / "into")
    assert [point.step for point in after if "train/loss" in point.numbers] == [3, 4]


# ── how a run ended ──


class Closed:
    """A tracker that remembers the state with which it was closed."""

    key = "k"
    states: ClassVar[list[str]] = []

    def __init__(self, *_: Any) -> None:
        pass

    def show(self, point: Point) -> None: ...
    def flush(self) -> None: ...

    def close(self, state: str) -> None:
        self.states.append(state)


async def test_a_tracker_learns_how_the_run_ended_also_when_it_goes_on_later(
    tmp_path: Path,
) -> None:
    states = {"running": "1-0", "failed": "2-0"}
    past = [Event(at, 1.0, "state", {"state": state, "reason": ""}) for state, at in states.items()]

    async def events(after: str) -> AsyncIterator[Event]:
        for event in past[:1] if not Closed.states else past:
            if order(event.id) > order(after):
                yield event

    Closed.states.clear()
    for _ in range(3):  # while it runs, at its end, and once more
        await track(events, "run", tmp_path / "into", Closed, {})
    assert Closed.states == ["running", "failed", "failed"]


def test_mlflow_says_how_the_run_ended(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    tracker = Mlflow(tmp_path, "run", {}, "")
    status = []
    for state in ("running", "failed", "stopped", "finished"):
        tracker.close(state)
        status.append(tracker._client.get_run(tracker.key).info.status)
    assert status == ["RUNNING", "FAILED", "KILLED", "FINISHED"]
