"""``sweep.json``: what a sweep is asked for, and what is done of it.

Sweep.begin(folder, request, settings) ─▶ lock ─▶ sweep.json, replaced in one step at every change
                                                    └ there already ─▶ the same request: it goes on; another: refused
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from orchestration.private_files import write_private
from orchestration.recipe.loading.paths import name_of
from orchestration.state.lock import RunError
from orchestration.sweep.settings import (
    MOST_RUNS,
    Range,
    Settings,
    Values,
    parse_over,
    value_text,
)
from pipeline.locks import Locked, take

SWEEP = "sweep.json"
LOCK = "sweep.lock"
RECIPES = "recipes"  # in the sweep's folder: the recipe of each run
LOGS = "logs"  # there, too: what the runs' commands print
LONGEST_NAME = 60
SAMPLERS = ("random", "tpe")  # of a search
PRUNERS = ("none", "median", "halving", "hyperband")
FREE = ("at_once", "trials", "metric")  # of a request: may change when a sweep goes on

State = Literal["waiting", "running", "stopped", "finished", "pruned", "failed"]
OVER: tuple[State, ...] = ("finished", "pruned", "failed")  # such a run is not run again


@dataclass(frozen=True)
class Request:
    """What a sweep is asked for. ``recipe``: its tables; ``begun_in``: the working directory, in
    which modules of the recipe are found; the others are as the options of ``asyncdock sweep``."""

    recipe: Mapping[str, Any]
    begun_in: str
    over: Sequence[str] = ()
    metric: str = "reward_mean"
    stop_below: Sequence[str] = ()
    search: str = ""
    trials: int = 0
    prune: str = ""
    seed: int = 0
    server: str = ""
    at_once: int = 0

    def parsed_over(self) -> list[Values | Range]:
        """Return what ``over`` says. Raises RecipeError."""
        return parse_over(self.over, search=bool(self.search))

    @property
    def has_study(self) -> bool:
        """Whether Optuna proposes or prunes runs."""
        return bool(self.search) or self.prune not in ("", "none")

    @property
    def most_at_once(self) -> int:
        """The most runs that are executed at the same time."""
        return self.at_once or (MOST_RUNS if self.server and self.search != "tpe" else 1)


@dataclass
class SweepRun:
    """One run of a sweep. ``id``: that of a service; ``value``: the metric at its end; ``trial``:
    its number in the search."""

    name: str
    settings: Settings
    state: State = "waiting"
    reason: str = ""
    id: str = ""
    value: float | None = None
    trial: int | None = None

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass
class Sweep:
    """The sweep in ``folder``, which this process holds locked until :meth:`close`."""

    folder: Path
    id: str
    request: Request
    runs: list[SweepRun] = field(default_factory=list)
    _lock: BinaryIO | None = field(default=None, repr=False)

    @classmethod
    def open(
        cls, folder: Path, request: Request | None = None, settings: Sequence[Settings] = ()
    ) -> Sweep:
        """Return the sweep in ``folder``, to go on with it: by the ``request`` that it was begun
        with. Where there is none, it is begun with ``settings``. Raises RunError."""
        path = folder / SWEEP
        if request is None and not path.is_file():
            raise RunError(f"sweep: {folder} holds no {SWEEP}; give the folder of a sweep")
        folder.mkdir(parents=True, exist_ok=True)
        others = {entry.name for entry in folder.iterdir()} - {LOCK, f".{SWEEP}"}
        if others and not path.exists():
            raise RunError(
                f"out: {folder} holds {min(others)!r}, and no {SWEEP}; give a new folder"
            )
        try:
            lock = take(folder / LOCK)
        except Locked as held:
            raise RunError(
                f"sweep: {held.holder} executes the sweep in {folder}; stop it first"
            ) from None
        try:
            if path.exists():
                document = json.loads(path.read_bytes())
                before = Request(**document["request"])
                runs = [SweepRun(**run) for run in document["runs"]]
                asked = before if request is None else _same(folder, before, request)
                return cls(folder.resolve(), document["id"], asked, runs, lock)
            assert request is not None
            sweep = cls(folder.resolve(), uuid.uuid4().hex[:12], request, _lock=lock)
            for one in settings:
                sweep.add(one)
            sweep.save()
            return sweep
        except BaseException:
            lock.close()
            raise

    def add(self, settings: Settings, trial: int | None = None) -> SweepRun:
        """Add a run, which is not saved yet."""
        run = SweepRun(_name(len(self.runs), settings), settings, trial=trial)
        self.runs.append(run)
        return run

    def change(self, run: SweepRun, state: State, reason: str = "", **values: Any) -> None:
        """Record what has become of ``run``; it is on the disk when this returns."""
        for name, value in {"state": state, "reason": reason, **values}.items():
            setattr(run, name, value)
        self.save()

    def save(self) -> None:
        document = {
            "id": self.id,
            "request": asdict(self.request),
            "runs": [asdict(run) for run in self.runs],
        }
        write_private(
            self.folder / SWEEP, json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        )

    def folder_of(self, run: SweepRun) -> Path:
        return self.folder / run.name

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _same(folder: Path, before: Request, request: Request) -> Request:
    """Return ``request``, with which the sweep in ``folder`` goes on. Raises RunError unless it
    differs from the one ``before`` in what may change alone."""
    pairs = zip(
        *(json.loads(json.dumps(asdict(one))).items() for one in (before, request)), strict=True
    )
    for (name, begun_with), (_, value) in pairs:
        if begun_with != value and name not in FREE:
            raise RunError(
                f"sweep: {folder} was begun with another {name.replace('_', ' ')}; `asyncdock "
                f"sweep {folder}` goes on with it, --out gives another folder"
            )
    return request


def _name(number: int, settings: Settings) -> str:
    """Return the name of a run, and of its folder.

    >>> _name(3, {"train.learning_rate": 1e-06, "seed": 0})
    '003-learning_rate-1e-06-seed-0'
    """
    words = (f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in settings.items())
    text = name_of(f"{number:03d} {' '.join(words)}")
    return text[:LONGEST_NAME].rstrip("._-")
