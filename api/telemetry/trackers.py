"""Experiment trackers that read a run's events, during the run or afterwards.

    RUN_DIR, or a run of a service ──▶ events ──▶ points (step, numbers) ──▶ TensorBoard | MLflow | W&B
                                         ▲                                        │
                                         └── continues after DIR/tracked.json ◀───┘  id of the last event shown

A tracker that is slow or dies does not affect the run. MLflow and W&B are extras, imported when
they are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from api.telemetry.history import BEGINNING, History
from orchestration.disk import replacing
from orchestration.history.events_file import METRICS, newest_id
from orchestration.history.kept import of_one
from orchestration.history.lines import finite_numbers
from orchestration.history.totals import RunTotals, per_second, shares
from pipeline.compat.extras import ExtraMissing, extra
from pipeline.data.events import ENDED, Event, order
from pipeline.index.client import Index, IndexUnreachable

TRACKED = "tracked.json"  # in the tracker's folder: the run's id and that of the last event shown
MLFLOW_FILE = "mlflow.db"  # in the tracker's folder
# MLflow's own limits: of one call, and of characters.
MLFLOW_PARAMS = 100
MLFLOW_METRICS = 1000
MLFLOW_NAME = 250
MLFLOW_VALUE = 6000
# by a run's last state
MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
# numbers of a step that TRL has under another name, which they get beside ours
TRL_NAMES = {
    "reward_mean": "reward",
    "equal_groups": "frac_reward_zero_std",
    "response_length_mean": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "kl_reference": "kl",
    "clip_fraction": "clip_ratio/region_mean",
    "seconds": "step_time",
}
WAIT_SECONDS = 10.0
SHOWN_AT_ONCE = 500  # points
# between two writes of tracked.json; points since the last one are shown again after a kill
SAVE_SECONDS = 2.0


class TrackError(RuntimeError):
    """A run cannot be tracked, such as when a tracker's package is missing; the message says why
    and what to do."""


@dataclass(frozen=True)
class Point:
    """Numbers by name, at a step of the run and a Unix time."""

    time: float
    step: int
    numbers: Mapping[str, float]


class Tracker(Protocol):
    """Destination of points.

    ``key`` identifies the tracker's run, to continue it later ("": not needed).
    """

    key: str

    def show(self, point: Point) -> None: ...
    def flush(self) -> None:
        """Store what was shown. Does nothing where :meth:`show` returns when its point is
        stored."""

    def close(self, state: str) -> None:
        """Show the run's newest ``state``; one that has not ended may be continued."""


class Points:
    """A converter of events into points.

    The shares and rates of workers are those between two steps, and stand at the second one.
    """

    def __init__(self) -> None:
        self._totals = RunTotals()
        self._before: dict[str, dict[str, float]] = {}  # each worker's totals at the last step

    def of(self, event: Event) -> Iterator[Point]:
        self._totals.apply(event)
        data = event.data
        match event.kind:
            case "step":
                rewards = data.get("rewards", {})
                short = {name.rpartition(":")[2]: of_name for name, of_name in rewards.items()}
                own = {"rewards": short} if len(short) == len(rewards) else {}
                as_trl = {name: data[ours] for ours, name in TRL_NAMES.items() if ours in data}
                yield from self._point(event, "train", {**data, **own, **as_trl})
                yield from self._shares(event)
            case "evaluation":
                yield from self._point(event, "evaluation", data)
            case "sync":
                yield from self._point(
                    event, f"sync/{data['worker']}", of_one(data), step=int(data["version"])
                )
            case "alarm":
                yield from self._point(event, f"alarm/{data['metric']}", data)

    def _shares(self, event: Event) -> Iterator[Point]:
        for name, worker in self._totals.workers.items():
            counts = worker.clock.since(self._before.get(name, {}))
            self._before[name] = worker.totals
            if counts["wall"] > 0:
                parts = shares(counts)
                numbers = {
                    f"{part}_share": parts[part]
                    for part in ("busy", "waiting_input", "waiting_room")
                }
                rate = per_second(counts, "tokens")
                numbers |= {"tokens_per_second": rate, "queue_depth": worker.latest.queue_depth}
                yield from self._point(event, f"stage/{name}", numbers)

    @staticmethod
    def _point(
        event: Event, group: str, data: Mapping[str, Any], step: int | None = None
    ) -> Iterator[Point]:
        measurements = finite_numbers(data).items()
        numbers = {
            f"{group}/{name}": value
            for name, value in measurements
            if name not in ("step", "version")
        }
        if numbers:
            yield Point(event.time, int(event.data["step"]) if step is None else step, numbers)


# --------------------------------------------------------------------------------------------------
# The trackers


class TensorBoard(Tracker):
    """Event files in ``folder``: `tensorboard --logdir FOLDER` shows them."""

    key = ""

    def __init__(self, folder: Path, name: str, recipe: Mapping[str, Any], key: str) -> None:
        _module("tensorboard", "tensorboard")
        self._writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))
        self._summary = _module("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        if not key and recipe:
            self._writer.add_text("recipe", f"```json\n{json.dumps(recipe, indent=1)}\n```", 0)

    def show(self, point: Point) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in point.numbers.items()
        ]
        self._writer.file_writer.add_summary(
            self._summary(value=values), point.step, walltime=point.time
        )

    def flush(self) -> None:
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()


class Mlflow(Tracker):
    """A run in MLflow: at MLFLOW_TRACKING_URI where that is set, else in an SQLite database in
    ``folder``."""

    def __init__(self, folder: Path, name: str, recipe: Mapping[str, Any], key: str) -> None:
        mlflow = _module("mlflow", "mlflow")
        for needed in ("sqlalchemy", "alembic"):
            _module(needed, "mlflow")
        self._entities = _module("mlflow.entities", "mlflow")
        folder = folder.resolve()
        local_uri = f"sqlite:///{folder / MLFLOW_FILE}"
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or local_uri
        self._folder = folder if self._uri == local_uri else None
        self._metrics: list[Any] = []
        with self._errors():
            self._client = mlflow.MlflowClient(tracking_uri=self._uri)
            self.key = key or self._create(name, recipe)
            self._client.get_run(self.key)

    def _create(self, name: str, recipe: Mapping[str, Any]) -> str:
        known = self._client.get_experiment_by_name("asyncdock")
        # Without a place of its own, artifacts are put into the working directory.
        place = (self._folder / "artifacts").as_uri() if self._folder else None
        experiment = (
            known.experiment_id if known else self._client.create_experiment("asyncdock", place)
        )
        run = str(self._client.create_run(experiment, run_name=name).info.run_id)
        params = [
            self._entities.Param(mlflow_name(key), shortened(value)) for key, value in _flat(recipe)
        ]
        for at in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(run, params=params[at : at + MLFLOW_PARAMS])
        return run

    def show(self, point: Point) -> None:
        when = int(point.time * 1000)
        self._metrics += [
            self._entities.Metric(mlflow_name(name), value, when, point.step)
            for name, value in point.numbers.items()
        ]
        if len(self._metrics) >= MLFLOW_METRICS:
            self.flush()

    def flush(self) -> None:
        with self._errors():
            while self._metrics:
                self._client.log_batch(self.key, metrics=self._metrics[:MLFLOW_METRICS])
                del self._metrics[:MLFLOW_METRICS]

    def close(self, state: str) -> None:
        if status := MLFLOW_STATUS.get(state):
            with self._errors():
                self._client.set_terminated(self.key, status)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise TrackError for what MLflow refuses."""
        refusal = _module("mlflow.exceptions", "mlflow").MlflowException
        try:
            yield
        except refusal as error:
            fix = (
                "set MLFLOW_TRACKING_URI to a server or database that it accepts, or give "
                "another --into"
            )
            raise TrackError(f"--to mlflow: {self._uri} refused: {error!s:.500}; {fix}") from error


def mlflow_name(name: str) -> str:
    """Return ``name`` with the characters that MLflow allows in it.

    >>> mlflow_name("prompts.config.größe [m]")
    'prompts.config.größe _m_'
    """
    return re.sub(r"[^\w.\-/ :]", "_", name)[:MLFLOW_NAME]


def shortened(value: Any) -> str:
    """Return ``value`` as a text that MLflow accepts as a parameter: one that is too long says so
    at its end."""
    text = str(value)
    if len(text) <= MLFLOW_VALUE:
        return text
    note = f" … ({len(text):,} characters)"
    return text[: MLFLOW_VALUE - len(note)] + note


class WandB(Tracker):
    """A run in Weights & Biases.

    Without WANDB_API_KEY, or with WANDB_MODE=offline, it lies in ``folder`` until `wandb sync`
    takes it there.
    """

    def __init__(self, folder: Path, name: str, recipe: Mapping[str, Any], key: str) -> None:
        wandb = _module("wandb", "wandb")
        mode = os.environ.get("WANDB_MODE") or (
            "online" if os.environ.get("WANDB_API_KEY") else "offline"
        )
        self.key = key or secrets.token_hex(4)
        self._run = wandb.init(
            project="asyncdock",
            name=name,
            id=self.key,
            resume="allow",
            mode=mode,
            dir=str(folder),
            config=dict(recipe),
        )
        # Their own step must only grow; a `sync` of version v comes after step v. So the run's step
        # is an axis of its own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def show(self, point: Point) -> None:
        self._run.log({**point.numbers, "step": point.step, "_timestamp": point.time})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=int(state == "failed"))


# of its folder, the run, the recipe and the key
Make = Callable[[Path, str, Mapping[str, Any], str], Tracker]
TRACKERS: dict[str, Make] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": WandB}


def _module(name: str, name_of_extra: str) -> Any:
    try:
        with extra(name_of_extra):
            return importlib.import_module(name)
    except ExtraMissing as error:
        raise TrackError(f"--to {name_of_extra}: {error}") from error


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested tables: ``{"train": {"steps": 3}}`` becomes ``train.steps``, 3."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


# --------------------------------------------------------------------------------------------------
# Following a run


async def events_of_folder(folder: Path, after: str) -> AsyncIterator[Event]:
    """Yield the events of the run in ``folder`` after the id ``after``; of a run that is alive, up
    to its end."""
    from orchestration.state.paths import WHERE

    address_file = folder / WHERE
    if address_file.exists():
        address = json.loads(address_file.read_text())
        async with Index(address["index"], address["run"]) as index:
            history = History(lambda: index, folder / METRICS, detail=True)
            state = ""
            # the run has ended meanwhile: its file has the rest
            with contextlib.suppress(IndexUnreachable):
                while True:
                    async for page in history.pages(after):
                        for event in page:
                            state = event.data["state"] if event.kind == "state" else state
                            yield event
                        after = page[-1].id
                    if state in ENDED and order(after) >= order(await history.newest()):
                        return
                    await history.wait(after, WAIT_SECONDS)
    _refuse_behind(after, folder / METRICS)
    async for page in History(None, folder / METRICS, detail=True).pages(after):
        for event in page:
            yield event


def _tracked(file: Path) -> dict[str, str] | None:
    """Return the record of what was shown before; None: nothing. Raises TrackError for a damaged
    file."""
    try:
        known: dict[str, str] = json.loads(file.read_text())
        return {
            **{key: known[key] for key in ("run", "after", "key")},
            "state": known.get("state", ""),
        }
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        fix = (
            "it says which events were shown: give another folder, or remove this one to show "
            "all of them again"
        )
        raise TrackError(f"--into: {file} is damaged ({error!r:.100}); {fix}") from None


def _refuse_behind(after: str, metrics: Path) -> None:
    """Raise TrackError when all events of the ended run with ``metrics`` are before ``after``,
    which the tracker has shown: none would ever be shown again."""
    newest = newest_id(metrics)
    if order(after) > order(newest):
        raise TrackError(
            f"--into: it has shown events up to id {after}, and {metrics} ends with {newest}: an "
            f"older version has resumed "
            "the run with a clock that was behind, or the file is another one; give another "
            "folder, which gets all events"
        )


async def track(
    events: Callable[[str], AsyncIterator[Event]],
    run: str,
    into: Path,
    make: Make,
    recipe: Mapping[str, Any],
) -> int:
    """Show the events of ``run`` that earlier calls with ``into`` have not shown.

    Returns the number of points. Raises TrackError when ``into`` holds another run.
    """
    into.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    file = into / TRACKED
    cursor = _tracked(file) or {"run": run, "after": BEGINNING, "key": ""}
    if cursor["run"] != run:
        raise TrackError(
            f"--into: {into} has run {cursor['run']!r}, and {run!r} would be mixed with it; give "
            f"another folder"
        )
    tracker = make(into, run, recipe, cursor["key"])
    points = Points()
    count = 0
    waiting = deque[Point]()
    loop = asyncio.get_running_loop()
    after = cursor["after"]
    state = cursor.get("state", "")
    saved_at = loop.time()

    def show() -> None:
        nonlocal count
        while waiting:
            tracker.show(waiting[0])
            waiting.popleft()
            count += 1

    def save() -> None:
        show()
        tracker.flush()
        text = json.dumps({"run": run, "after": after, "key": tracker.key, "state": state})
        with replacing(file, len(text)) as partial:
            partial.write_text(text)

    try:
        async for event in events(after):
            waiting += points.of(event)
            after = event.id
            state = event.data["state"] if event.kind == "state" else state
            if loop.time() - saved_at > SAVE_SECONDS:
                save()
                saved_at = loop.time()
            elif len(waiting) >= SHOWN_AT_ONCE:
                show()
    finally:
        save()
        tracker.close(state)
    return count
