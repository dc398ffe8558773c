"""The folder of a run, which the process that executes the run holds locked.

    RunFolder.create(recipe, path)             a new run
    RunFolder.resume(path)                     a run that has ended, from a checkpoint
    RunFolder.of_service(recipe, path, id)     a run of a service, begun or taken over

path/  recipe.json  checkpoints/step-*/  logs/*.log  index/ (the embedded index's append-only file)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import stamina

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.checkpoint import Checkpoint
from orchestration.private_files import MASKS, write_private
from orchestration.recipe.loading.load import change_recipe, overridden, recorded_recipe
from orchestration.recipe.schema import Recipe
from orchestration.state.lock import LOCK, RunError, RunLocked, lock_run
from orchestration.state.paths import FIRST_ID, RECIPE, WHERE, RunPaths, shared_of, store_url
from pipeline.data.arena import shared_memory_directory
from pipeline.node import owned_prefix

# in the run's folder: the working directory of its command, for modules that the recipe names
BEGUN_IN = "begun-in"
FORMER_SECONDS = 30.0  # how long a runner waits for the lock of a former one
LOOK_SECONDS = 0.1  # until the lock is tried again, at first


class RunFolder:
    """The folder ``path`` of the run ``run_id``, its samples in ``shared``, and where it starts.

    ``start``: the checkpoint that the run begins with; None: its first step. ``outlives_process``:
    another process may go on with the run when this one has ended, so that its samples, and the
    record of its index, stay until the service removes them.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: Path,
        start: Checkpoint | None = None,
        lock: BinaryIO | None = None,
        service_run: str = "",
    ) -> None:
        self.recipe = recipe
        self.path = path.resolve()
        self.start = start
        self.outlives_process = bool(service_run)
        self._lock = lock
        if service_run:  # a runner that takes the run over must find its memory
            self.run_id = service_run
            self.shared = shared_of(self.path)
        else:
            now = time.strftime("%Y%m%d-%H%M%S")
            self.run_id = f"{recipe.name}-{now}-{uuid.uuid4().hex[:4]}"
            self.shared = shared_memory_directory() / f"{owned_prefix(os.getpid())}{self.run_id}"

    @classmethod
    def create(cls, recipe: Recipe, path: Path) -> RunFolder:
        """Make the folder of a new run; ``path`` must be new or empty.

        A new one has the mode of ``launch.readers``. Raises RunError.
        """
        if path.exists():
            _refuse_used(path)
        else:
            path.mkdir(parents=True)
            path.chmod(0o777 & ~MASKS[recipe.launch.readers])
        recipe = recipe.with_absolute_paths()
        lock = lock_run(path)
        try:
            _refuse_used(path, lock)
            write_private(path / RECIPE, recipe.to_json())
            (path / BEGUN_IN).write_text(str(Path.cwd()))
            return cls(recipe, path, lock=lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def resume(
        cls, path: Path, overrides: Sequence[str] = (), start_version: int | None = None
    ) -> RunFolder:
        """Return the folder of a run that has ended, to go on from its newest checkpoint (from the
        start when it has made none), or from that of ``start_version`` (0: from the start); newer
        ones are then set aside.

        ``overrides``, ``section.key=value`` each, change the recipe for good, from that checkpoint
        on. Raises RunError, and RecipeError for what does not fit the recipe and for keys that may
        not change (:func:`orchestration.recipe.loading.load.fixed_keys`).
        """
        from orchestration.checkpoints import base_models
        from orchestration.checkpoints.recorded import set_newer_aside, start_of

        try:
            recipe = recorded_recipe(path / RECIPE)
        except OSError as error:
            raise RunError(
                f"run: {path} holds no recipe.json ({error}); give the folder of a run"
            ) from None
        lock = lock_run(path)
        try:
            _refuse_of_service(path)
            free = base_models.moved(recipe, overridden(overrides), path)
            base_models.refuse_missing(recipe, path, free)
            if overrides:
                recipe = change_recipe(recipe, overrides, free=free).with_absolute_paths()
            url = store_url(recipe, path)
            start = start_of(path, url, recipe.train.steps, start_version)
            if start_version is not None:
                set_newer_aside(path, url, start_version)
            if overrides:
                _record(recipe, path, start)
            return cls(recipe, path, start, lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def of_service(cls, recipe: Recipe, path: Path, run_id: str) -> RunFolder:
        """Return the folder of the run ``run_id`` of a service, which another runner may have
        begun.

        It is locked by :meth:`lock`.
        """
        path.mkdir(parents=True, exist_ok=True)
        start = checkpoint.newest(path / "checkpoints", store_url(recipe, path, run_id))
        _record(recipe, path, start)
        return cls(recipe, path, start, service_run=run_id)

    @property
    def begins(self) -> int:
        """Optimizer steps that were made before the run starts."""
        return self.start.version if self.start else 0

    @property
    def store_url(self) -> str:
        """URL where its checkpoints are copied to; "" without ``checkpoint.url``."""
        return store_url(self.recipe, self.path, self.run_id)

    @property
    def paths(self) -> RunPaths:
        """Paths that workers must know of it."""
        start = self.start.path if self.start else None
        return RunPaths(self.path, self.shared, start, self.store_url)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint on this disk."""
        return checkpoint.latest(self.path / "checkpoints")

    async def lock(self) -> None:
        """Hold the lock, after waiting for a former runner that has lost its lease and is about to
        end.

        Raises RunLocked when that does not let go of the folder.
        """
        attempts = stamina.retry_context(
            RunLocked,
            attempts=None,
            timeout=FORMER_SECONDS,
            wait_initial=LOOK_SECONDS,
            wait_max=1.0,
            wait_jitter=0,
        )
        async for attempt in attempts:
            with attempt:
                self._lock = self._lock or lock_run(self.path, wait=0.0)

    def prepare_store(self) -> None:
        """Check that checkpoints can be copied to ``checkpoint.url``, and copy there the one that
        the run begins with."""
        url = self.store_url
        if not url:
            return
        from orchestration.checkpoints.store import CheckpointStore

        (self.path / FIRST_ID).write_text(url.rpartition("/")[2])
        store = CheckpointStore(url)
        store.probe()
        if self.start is not None and self.start.path.name not in store.names():
            self.start.verify()
            store.push(self.start.path, self.recipe.checkpoint.keep)

    def remove_shared(self) -> None:
        """Remove the run's samples from shared memory."""
        shutil.rmtree(self.shared, ignore_errors=True)

    def empty_shared(self) -> None:
        """Make the folder of the run's samples anew."""
        self.remove_shared()
        self.shared.mkdir(parents=True, mode=0o700)

    def record_index(self, where: Mapping[str, Any]) -> None:
        """Record where the run's index is, for programs that watch the run.

        The URL may hold a password.
        """
        where = {"run": self.run_id, "hosted": self.outlives_process, **where}
        write_private(self.path / WHERE, json.dumps(where))

    def close(self) -> None:
        """Let go of the folder.

        The samples in shared memory are removed, unless another process may go on with the run.
        """
        if not self.outlives_process:
            (self.path / WHERE).unlink(missing_ok=True)
            self.remove_shared()
        if self._lock is not None:
            self._lock.close()


def _record(recipe: Recipe, path: Path, start: Checkpoint | None) -> None:
    """Write ``recipe`` to the folder ``path``, and note what it changes from ``start`` on."""
    if (path / RECIPE).exists():
        from orchestration.run.changes import note_change

        with contextlib.suppress(ValueError):  # a damaged recipe.json is written again below
            note_change(path, recipe, start.version if start else 0)
    write_private(path / RECIPE, recipe.to_json())


def _refuse_used(path: Path, lock: BinaryIO | None = None) -> None:
    """Raise RunError when ``path`` holds anything but a lock file: RunLocked when a run in it is
    being executed."""
    if any(entry.name != LOCK for entry in path.iterdir()):
        if lock is None and (path / LOCK).exists():
            lock_run(path).close()
        raise RunError(
            f"out: {path} is not empty; give a new folder, or continue with "
            f"`asyncdock resume {path}`"
        )


def _refuse_of_service(path: Path) -> None:
    """Raise RunError when the run in ``path`` is a service's that has not ended."""
    try:
        where = json.loads((path / WHERE).read_text())
    except (OSError, ValueError):
        return
    if where.get("hosted"):
        raise RunLocked(
            f"run: {path} is run {where['run']} of a service, which executes it; end it with "
            f"`asyncdock runs stop {where['run']}` first (or remove {path / WHERE}, if that "
            f"service is gone for good)"
        )
