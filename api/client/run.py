"""Runs in a notebook: started, followed, stopped and read, of a service and in folders alike.

    start("tiny", out="runs/a") ──▶ a process of `asyncdock run` ┐
    start("tiny", server=URL) ────▶ the queue of that service    ├─▶ Run ─▶ follow, metrics, samples, stop
    open_run("runs/a"), open_run("ID") ──────────────────────────┘    └ SyncClient: an event loop in its own thread

An interrupt of the kernel ends a call here. The run goes on.
"""

from __future__ import annotations

import contextlib
import copy
import html
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from api.client.client import RunEvent, SyncClient
from api.client.credentials import DEFAULT_SERVER
from api.client.errors import ServiceError
from api.client.folder import SyncFolderClient
from api.schemas.runs import RunView
from orchestration.processes.environment import importable
from orchestration.recipe.loading.load import read_recipe
from orchestration.recipe.loading.paths import resolve_paths
from orchestration.recipe.problems import RecipeError
from orchestration.state.paths import RECIPE, WHERE
from orchestration.streams import TIED
from pipeline.data.events import StepEvent

OPENING_SECONDS = 5.0  # for which a service that does not answer is asked again
LOOK_SECONDS = 0.05  # between two looks at whether a command has begun its run
WHOLE_NUMBERS = ("step", "version")  # a history has every number as a float


class Run:
    """A run: what it is, what it measures, and requests to it.

    ``client`` has every other call, with ``id`` as its ``run``. ``process`` is the command that
    executes the run, where :func:`start` has started one. Calls raise :class:`ServiceError`.
    """

    def __init__(
        self, client: SyncClient, id: str, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.client = client
        self.id = id
        self.process = process

    @property
    def view(self) -> RunView:
        """The run as it is now: its state and its reason, times, steps, folder, …"""
        return self.client.run(self.id)

    @property
    def state(self) -> str:
        """``created``, ``starting``, ``running``, ``paused``, ``stopping``, ``stopped``,
        ``finished`` or ``failed``."""
        return self.view.state

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as nested tables, with every default."""
        return self.view.recipe

    def metrics(self, series: str = "step", every: float = 0.0) -> list[dict[str, float | None]]:
        """Return what is recorded so far as rows of equal keys, the oldest first: ``time`` in Unix
        seconds and the numbers of ``series``, one of ``step``, ``evaluation``, ``ledger``,
        ``stage/WORKER`` and ``sync/WORKER``. A number that a row lacks is None.

        ``every``: seconds of each row; 0: a row for each event, at most 50,000.
        """
        columns = self.client.metrics(self.id, every=every, names=(series,)).series.get(series, {})
        rows = [
            dict(zip(columns, numbers, strict=True))
            for numbers in zip(*columns.values(), strict=True)
        ]
        for row in rows:
            row |= {name: int(row[name] or 0) for name in WHOLE_NUMBERS if name in row}
        return rows

    def samples(self, **filters: Any) -> list[dict[str, Any]]:
        """Return trained samples as rows, the newest step first. ``filters``: those of
        :meth:`Client.samples`, ``limit`` among them."""
        return [sample.model_dump() for sample in self.client.samples(self.id, **filters)]

    def events(self, **options: Any) -> Iterator[RunEvent]:
        """Yield events as they come, until the run ends. ``options``: those of
        :meth:`Client.events`."""
        return self.client.events(self.id, **options)

    def follow(self) -> Self:
        """Show a progress bar until the run ends."""
        from tqdm.auto import tqdm

        view = self.view
        with tqdm(total=view.steps, desc=view.name, unit="step") as bar:
            for event in self.events(kinds=("state", "step")):
                if event.kind == "state":
                    bar.set_description(f"{view.name} {event.data['state']}")
                    continue
                step = StepEvent.of(event.data)
                numbers = {"reward": step.reward_mean, "loss": step.loss}
                bar.set_postfix(numbers, refresh=False)
                bar.update(step.version - bar.n)
        return self.wait()

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the run ends. Raises TimeoutError after ``timeout`` seconds."""
        if self.process is not None:
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired as error:
                raise TimeoutError(str(error)) from None
        self.client.wait_until_ended(self.id, timeout)
        return self

    def stop(self) -> Self:
        """Ask for a clean end, with a checkpoint. Raises :class:`WrongState` where it has ended."""
        self.client.stop(self.id)
        return self

    def close(self) -> None:
        """Close the client. The run goes on."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {fact}" for name, fact in self._facts().items())
        return f"<Run {self.id}: {facts}>"

    def _repr_html_(self) -> str:
        facts = {"run": self.id, **self._facts()}
        rows = [f"<tr><th>{name}</th><td>{html.escape(fact)}</td>" for name, fact in facts.items()]
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> dict[str, str]:
        try:
            view = self.view
        except (ServiceError, RuntimeError) as error:  # the server is gone, the client is closed
            return {"state": f"not known ({error})"}
        facts = {"state": view.state, "steps": f"{view.steps_done} of {view.steps}"}
        if view.reward is not None:
            facts["reward"] = f"{view.reward:.3f}"
        if view.reason:
            facts["reason"] = view.reason
        return facts


def open_run(run: str | Path, server: str = DEFAULT_SERVER) -> Run:
    """Return the run ``run``: a folder of `asyncdock run`, live or ended, or an id of ``server``.

    A folder is read by a server in this process, as by `asyncdock view`, until the run is closed or
    has no reference any more. Raises ValueError for a path that is no run's folder, and
    ServiceError.
    """
    folder = Path(run)
    if (folder / RECIPE).is_file():
        return Run(SyncFolderClient(str(run)), str(run))
    if folder.exists() or len(folder.parts) > 1:  # an id is one part
        lacks = "has no recipe.json" if folder.exists() else "does not exist"
        raise ValueError(f"run: {folder} {lacks}; give the folder of a run, or a run's id")
    with SyncClient(server, patience=OPENING_SECONDS) as client:
        client.run(str(run))
    return Run(SyncClient(server), str(run))


def start(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    server: str = "",
    outlives: bool = False,
) -> Run:
    """Start a run of ``recipe``, a file, a name or tables, with ``overrides`` by dotted key.

    With ``server`` it is queued there. Else it is a process here, with its files in ``out``
    (default: runs/TIME). Unless it ``outlives`` this process, the run stops with a checkpoint
    when this process ends. Returns once the run has begun. Raises ValueError with what the command
    says when it ends before.
    """
    if server:
        is_file = not isinstance(recipe, Mapping) and Path(recipe).is_file()
        submitted = read_recipe(Path(recipe))[0] if is_file else recipe  # type: ignore[arg-type]
        client = SyncClient(server)
        return Run(client, client.submit(submitted, overrides).id)  # type: ignore[arg-type]
    sets = [
        f"--set={key}={json.dumps(value, default=str)}" for key, value in (overrides or {}).items()
    ]
    folder = Path(out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if (folder / RECIPE).exists():
        raise ValueError(f"out: {folder} holds a run; give a new folder, or open_run this one")
    with tempfile.TemporaryDirectory() as scratch:
        if isinstance(recipe, Mapping):
            recipe = _written(recipe, Path(scratch))
        process = _begun([str(recipe), "--out", str(folder), *sets], folder, outlives)
    return Run(SyncFolderClient(str(folder)), str(folder), process)


def _written(recipe: Mapping[str, Any], folder: Path) -> Path:
    """Write ``recipe``, whose relative paths are relative to the working directory, in ``folder``.

    Raises RecipeError.
    """
    tables = copy.deepcopy(dict(recipe))
    if problems := resolve_paths(tables, Path.cwd()):
        raise RecipeError("recipe", problems)
    path = folder / RECIPE
    path.write_text(json.dumps(tables))
    return path


def _begun(arguments: list[str], folder: Path, outlives: bool) -> subprocess.Popen[bytes]:
    """Start `asyncdock run` with ``arguments``; return its process once the run has begun in
    ``folder``. Raises ValueError."""
    command = [sys.executable, "-P", "-m", "asyncdock_command", "run", *arguments]
    environment = importable(os.environ)
    stdin = subprocess.DEVNULL
    if not outlives:
        environment[TIED] = "1"
        stdin, _ = os.pipe()  # whose other end closes with this process, however that ends
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,  # an interrupt of the kernel goes to its whole process group
        )
        if not outlives:
            os.close(stdin)
        try:
            while process.poll() is None and not (folder / WHERE).exists():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
        except BaseException:  # such as an interrupt: nobody would know of the run
            process.terminate()
            raise
        if not (folder / RECIPE).exists():
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            raise ValueError(said.strip().removeprefix("error: "))
        return process
