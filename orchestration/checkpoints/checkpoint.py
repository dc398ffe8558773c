"""Checkpoints: files from which a run continues at step k as if it had never stopped.

    step k ─▶ copy the state to host memory ─▶ step k + 1 ─▶ step k + 2 ─▶ …
                └─▶ a thread: write ─▶ fsync ─▶ rename: it exists ─▶ remove the oldest ─▶ the rows up to k are released

    checkpoints/step-00000020/   model/     a Hugging Face checkpoint
                                 adapter/   where adapters are trained: they alone, in peft's format; model/ has them merged
                                 train/     optimizer's state and weights, bit for bit: a shard of each rank
                                 critic/    the same two of a critic of its own, where the run trains one
                                 run.json   version, prompt position, ledger, groups still to be made, pass rates
                                 digests.json   all of these files, verified by what reads them (stages.model.manifest)

With ``checkpoint.url``, a thread then copies it there (:mod:`orchestration.checkpoints.store`), and
rows are released after.

``train/`` is a distributed checkpoint of torch: ranks of any number and layout read what any others
have written. A checkpoint is written under another name and renamed at the end, so one with its
final name is complete. Prompts are a pure function of the group's number, so the prompt position is
a number, and groups in flight are generated again.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from orchestration.disk import sync
from orchestration.state.paths import STEP
from pipeline.problems import Fatal
from stages.model import manifest
from stages.model.manifest import STATE, FilesDamaged
from stages.threads import run_in_thread

# a service lists checkpoints without torch; functions that read or write one import it
if TYPE_CHECKING:
    import torch

    from orchestration.checkpoints.store import CheckpointStore
    from stages.engines.protocols import TrainEngine
    from stages.model.load import Tokenizer

log = structlog.get_logger()

TRAIN = "train"
MODEL = "model"
CRITIC = "critic"
# a file in a checkpoint that is being written; ranks that do not see it are on other disks
BEGUN = ".begun"
PULLS = 3  # attempts to copy a checkpoint from its URL that is removed meanwhile
LEAST_FREE = 1 << 20  # bytes; a disk with less is full
ASIDE = "aside-"  # before the name of a checkpoint that no run goes on from
# What is wrong with a disk for longer than a restart takes.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}

log = structlog.get_logger()


class CheckpointUnusable(Fatal, RuntimeError):
    """A checkpoint cannot be loaded: it is damaged, not finite, or of another model."""


class DiskRefused(Fatal, RuntimeError):
    """The disk, or checkpoint.url, takes no checkpoint, and will not take one from a restarted
    worker either."""


class CheckpointMissing(RuntimeError):
    """This node does not have the run's newest checkpoint, and would begin with other weights than
    the run has."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    ``counters``, ``remake``, ``rates``: what :meth:`pipeline.index.Index.init` starts from.
    """

    path: Path
    version: int
    counters: dict[str, int]
    remake: list[int]
    rates: str = ""

    @property
    def model(self) -> Path:
        return self.path / MODEL

    def nothing_left(self, steps: int, *, finished: bool) -> str:
        """Return why a run of ``steps`` steps cannot be resumed from here; "" when it can.

        One that has not ``finished`` goes on from its last step to its end.
        """
        done = f"has made {self.version} of {steps} steps: there is nothing to resume"
        has_more = self.version < steps or (self.version == steps and not finished)
        return "" if has_more else done

    def load_into(self, engine: TrainEngine, part: str = "") -> None:
        """Load the saved state into ``engine``, which may have other ranks than the saved one.

        All ranks call this, and each verifies the files that it reads. ``part``: :data:`CRITIC` for
        that of the critic. Raises CheckpointUnusable.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        from orchestration.checkpoints import shards

        state = engine.state_dict()
        counts = {"version": self.version} if "version" in state else {}
        # older checkpoints lack it
        state = {name: value for name, value in state.items() if name not in counts}
        reader = _verifying_reader(self.path, Path(part) / TRAIN)
        try:
            with _no_warning():
                shards.load(state, reader, no_dist=not _sharded(state))
        except (Exception, CheckpointException) as error:
            causes = list(_causes(error))
            damaged = next((cause for cause in causes if isinstance(cause, FilesDamaged)), None)
            why = damaged or (
                f"{self.path} cannot be loaded into the model of this run "
                f"({type(causes[-1]).__name__}: {causes[-1]}); if "
                "model.source is not the model that the run began with, put that back"
            )
            raise CheckpointUnusable(f"checkpoint: {why}; {way_back(self.path)}") from error
        if (name := not_finite(state)) is not None:
            where = f"{self.path / part / TRAIN} has values of {name!r} that are not finite"
            raise CheckpointUnusable(f"checkpoint: {where}; {way_back(self.path)}")
        engine.load_state_dict(state | counts)

    def verify(self) -> None:
        """Read all files, and compare them with the digests of when they were written.

        Raises CheckpointUnusable.
        """
        try:
            manifest.verify_part(self.path)
        except FilesDamaged as damaged:
            raise CheckpointUnusable(f"checkpoint: {damaged}; {way_back(self.path)}") from None


def way_back(path: Path, names: Iterable[str] = ()) -> str:
    """Return the words by which a run goes on without the checkpoint in the folder ``path``;
    ``names``: of checkpoints that its URL has."""
    older = sorted(
        name for name in {*names, *(each.name for each in whole(path.parent))} if name < path.name
    )
    version = version_of(older[-1]) if older else 0
    where = (
        f"the checkpoint before it, of version {version},"
        if older
        else "the beginning, as there is none before it,"
    )
    return (
        f"`asyncdock resume {path.parent.parent} --from {version}` goes on from {where} and keeps "
        f"this one aside (of a service's run: `asyncdock runs resume RUN --from {version}`)"
    )


def not_finite(state: Any, name: str = "") -> str | None:
    """Return the name of a tensor in ``state``, nested tables, with values that are not finite on
    this rank; None: all are."""
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(state, Mapping):
        names = (
            not_finite(value, f"{name}.{key}" if name else str(key)) for key, value in state.items()
        )
        return next((tensor_name for tensor_name in names if tensor_name is not None), None)
    if not isinstance(state, torch.Tensor) or not state.is_floating_point():
        return None
    local: torch.Tensor = state.to_local() if isinstance(state, DTensor) else state
    if not local.numel():
        return None
    least, most = local.detach().aminmax()
    return None if bool(least.isfinite()) and bool(most.isfinite()) else name


def _verifying_reader(folder: Path, part: Path) -> Any:
    """Return torch's reader of the distributed checkpoint in ``part`` of the checkpoint ``folder``.
    Files are hashed beside the reading; a damaged one is reported in any case, as FilesDamaged."""
    from orchestration.checkpoints import shards

    def verify(names: Iterable[str]) -> None:
        manifest.verify(folder, sorted((part / name).as_posix() for name in names))

    class Reader(shards.Reader):
        def read_metadata(self, *arguments: Any, **options: Any) -> Any:
            verify([".metadata"])
            return super().read_metadata(*arguments, **options)

        def read_data(self, plan: Any, planner: Any) -> Any:
            names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
            with ThreadPoolExecutor(1) as beside:
                verifying = beside.submit(verify, names)
                try:
                    return super().read_data(plan, planner)
                finally:
                    verifying.result()

    return Reader(folder / part)


def begin(directory: Path, version: int) -> Path:
    """Make and return an empty folder to write the checkpoint of ``version`` into.

    What killed processes have left of others is removed: one checkpoint is written at a time.
    """
    clean(directory)
    partial = directory / f".{name_of(version)}.partial"
    partial.mkdir(parents=True)
    (partial / BEGUN).touch()
    sync(directory.parent)
    return partial


def clean(directory: Path) -> None:
    """Remove what is neither a checkpoint nor being written."""
    for leftover in directory.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def lasting_refusal(error: BaseException, directory: Path, version: int) -> DiskRefused | None:
    """Return ``error``, with which writing the checkpoint of ``version`` has failed, as one that a
    restart does not mend; None when a restart may. Writers wrap what the disk has said, so a disk
    without room is looked at."""
    disk_error = next(
        (
            cause
            for cause in _causes(error)
            if isinstance(cause, OSError) and cause.errno in _LASTING
        ),
        None,
    )
    try:
        full = shutil.disk_usage(directory).free < LEAST_FREE
    except OSError as refused:
        disk_error = disk_error or refused
        full = False
    if disk_error is None and not full:
        return None
    reason = disk_error or f"its disk is full: {error}"
    newest = latest(directory)
    goes_on = f"from the checkpoint of version {newest.version}" if newest else "from the beginning"
    return DiskRefused(
        f"checkpoint: version {version} cannot be written below {directory} ({reason}); free room "
        f"there, or make it writable; `asyncdock resume` then goes on {goes_on}"
    )


def unusable_state(error: BaseException) -> CheckpointUnusable | None:
    """Return the CheckpointUnusable that ``error`` was raised from; None where it was not."""
    return next((cause for cause in _causes(error) if isinstance(cause, CheckpointUnusable)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and what it was raised from, also inside of torch's CheckpointException."""
    while error is not None:
        yield error
        wrapped = [failure[0] for failure in getattr(error, "failures", {}).values()]
        error = error.__cause__ or next(iter(wrapped), None)


class Writer:
    """The writer of checkpoints of one rank's ``engine`` beside its training, one at a time, from a
    copy in host memory that it keeps: the size of the engine's state on this rank. All ranks make
    the same calls. A rank on another disk than the folder of the checkpoint copies what it writes
    to ``url``, where rank 0 fetches it."""

    def __init__(self, engine: TrainEngine, rank: int = 0, url: str = "") -> None:
        self._engine = engine
        self._rank = rank
        self._url = url
        self._copy: dict[str, Any] = {}
        self._writing: asyncio.Future[None] | None = None

    async def begin(self, partial: Path, part: str = "") -> asyncio.Future[None]:
        """Copy the engine's state as it is now, and write it into ``part`` of ``partial`` in a
        thread. On rank 0 the future is done when the files of all ranks are written. Waits for the
        writing before, and raises its error."""
        if self._writing is not None:
            await self._writing
        await asyncio.to_thread(self.copy)
        self._writing = run_in_thread(lambda: self.write(partial, part), "checkpoint")
        return asyncio.shield(self._writing)

    async def close(self) -> None:
        """Wait until nothing is being written. The engine may be closed then."""
        if self._writing is not None:
            with suppress(Exception):
                await asyncio.shield(self._writing)

    def copy(self) -> None:
        """Copy the engine's state to host memory: page-locked where it comes from an
        accelerator."""
        import torch
        from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

        state = self._engine.state_dict()
        pinned = torch.accelerator.is_available()
        if not self._copy:
            self._copy = _create_cpu_state_dict(state, pin_memory=pinned)
        self._copy = _copy_state_dict(state, self._copy, non_blocking=pinned, type_check=False)
        if pinned:
            torch.accelerator.synchronize()

    def write(self, partial: Path, part: str = "") -> None:
        """Write the copy into ``part`` of ``partial``: each rank its shard, in a process group of
        the engine's for this alone."""
        import torch.distributed.checkpoint as dcp

        state = self._copy
        is_sharded = _sharded(self._copy)
        store = _store(self._url) if self._url else None
        elsewhere = None if (partial / BEGUN).exists() else store
        train, model = (str(Path(part) / name) for name in (TRAIN, MODEL))

        class Files(dcp.FileSystemWriter):
            def write_data(self, plan: Any, planner: Any) -> Any:
                if (name := not_finite(state)) is not None:
                    raise CheckpointUnusable(_refused_state(partial, name))
                written = super().write_data(plan, planner)  # it is done
                if elsewhere:
                    elsewhere.stage(partial, train)
                return written

        group = getattr(self._engine, "checkpoint_group", None)
        with _no_warning():
            dcp.save(
                state,
                storage_writer=Files(partial / train),
                process_group=group,
                no_dist=not is_sharded,
            )
        if self._rank == 0:  # by now all shards are written, and staged
            if store:
                store.fetch_staged(partial)
            self._engine.save_pretrained(
                partial / model, _Whole(state, partial / train) if is_sharded else state
            )
            if elsewhere:
                elsewhere.stage(partial, part)
        if elsewhere:
            shutil.rmtree(partial / train, ignore_errors=True)


def _refused_state(partial: Path, name: str) -> str:
    newest = latest(partial.parent)
    name_of_it = partial.name.strip(".").removesuffix(".partial")
    goes_on = f"the checkpoint of version {newest.version}" if newest else "the beginning"
    return (
        f"checkpoint: {name_of_it} is not written: values of {name!r} in the engine are not "
        f"finite, and would take the place of good ones; `asyncdock resume "
        f"{partial.parent.parent}` goes on from {goes_on}"
    )


class _Whole(Mapping[str, Any]):
    """A nested ``state`` with whole tensors in place of a rank's shards, each read from its
    checkpoint when it is asked for."""

    def __init__(self, state: Mapping[str, Any], folder: Path, path: tuple[str, ...] = ()) -> None:
        self._state = state
        self._folder = folder
        self._path = path

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __getitem__(self, name: str) -> Any:
        import torch
        from torch.distributed.tensor import DTensor

        from orchestration.checkpoints import shards

        path = (*self._path, name)
        if (value := self._state.get(name)) is None:  # a pipeline stage of other ranks has it
            stored: Any = shards.read_metadata(self._folder).state_dict_metadata[".".join(path)]
            return self._read(torch.empty(stored.size, dtype=stored.properties.dtype), path)
        if isinstance(value, dict):
            return _Whole(value, self._folder, path)
        if not isinstance(value, DTensor):
            return value
        return self._read(torch.empty(value.shape, dtype=value.dtype), path)

    def _read(self, whole: torch.Tensor, path: Sequence[str]) -> torch.Tensor:
        from orchestration.checkpoints import shards

        wanted: Any = whole
        for key in reversed(path):
            wanted = {key: wanted}
        with _no_warning():
            shards.load(wanted, shards.Reader(self._folder), no_dist=True)
        return whole


def finish(
    directory: Path, tokenizer: Tokenizer, version: int, index_state: Mapping[str, Any], keep: int
) -> Checkpoint:
    """Add the files that are not the engine's, and give the checkpoint its name when all of it is
    on the disk: from now on it exists. Then removes all but the newest ``keep`` and those that
    readers hold."""
    name = name_of(version)
    final = directory / name
    partial = directory / f".{name}.partial"
    for model in (partial / MODEL, partial / CRITIC / MODEL):
        if model.is_dir():
            tokenizer.save_pretrained(model)
    (partial / BEGUN).unlink(missing_ok=True)
    (partial / STATE).write_text(json.dumps({"version": version, **index_state}, indent=1))
    manifest.write(partial)
    # as launch.readers has it; safetensors makes files of 0600
    mode = partial.stat().st_mode & 0o666
    for path in (*partial.rglob("*"), partial):
        if path.is_file():
            path.chmod(mode)
        sync(path)
    _remove(final)
    os.replace(partial, final)
    sync(directory)
    for old in whole(directory)[:-keep]:
        _remove_unless_held(old)
    return open_checkpoint(final)


def _remove_unless_held(checkpoint: Path) -> None:
    """Remove a checkpoint unless a reader holds it (:mod:`orchestration.checkpoints.held`)."""
    try:
        with (checkpoint / STATE).open("r+b") as file:  # flock of NFS wants one to be written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(checkpoint)
    except BlockingIOError:
        return
    except OSError:  # without flock, or it is gone
        _remove(checkpoint)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, which stops to exist at once: a kill in the middle leaves no part of it
    under its name."""
    removed = checkpoint.with_name(f".{checkpoint.name}.removed")
    with suppress(FileNotFoundError):
        os.rename(checkpoint, removed)
    shutil.rmtree(removed, ignore_errors=True)


def _sharded(state: Any) -> bool:
    """Return whether ``state`` is spread over several ranks."""
    from torch.distributed.tensor import DTensor

    if isinstance(state, dict):
        return any(_sharded(value) for value in state.values())
    return isinstance(state, DTensor)


@contextmanager
def _no_warning() -> Iterator[None]:
    """Hide torch's warning about a single process, which ``no_dist`` has declared."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def latest(directory: Path) -> Checkpoint | None:
    """Return the newest checkpoint under ``directory``; None when there is none."""
    folders = whole(directory)
    return open_checkpoint(folders[-1]) if folders else None


def newest(
    directory: Path, url: str, known: int = -1, parts: Sequence[str] = ()
) -> Checkpoint | None:
    """Return the newest checkpoint under ``directory``, or of ``url`` where that has a newer one,
    or where the one here is older than version ``known`` or has not all ``parts`` (default: all);
    from there it is copied to ``directory`` first. -1: the newest is not known. ``url`` may be
    empty."""
    local_checkpoint = latest(directory)
    lacks = (
        local_checkpoint is None
        or local_checkpoint.version < known
        or any(not (local_checkpoint.path / part).exists() for part in parts)
    )
    if not url or (known >= 0 and not lacks):
        return local_checkpoint
    store = _store(url)
    for _ in range(PULLS):
        names = store.names()
        if not names or (local_checkpoint is not None and names[-1] < local_checkpoint.path.name):
            break
        try:
            pulled = store.pull(names[-1], directory, parts)
        except FileNotFoundError:  # removed meanwhile, for a newer one
            continue
        except FilesDamaged as damaged:
            raise CheckpointUnusable(
                f"checkpoint: {damaged}; {way_back(directory / names[-1], names)}"
            ) from None
        for old in whole(directory):
            if old.name < pulled.name and not ((old / MODEL).exists() and (old / TRAIN).exists()):
                _remove(old)  # parts of it were copied here for an engine that had no newer one
        return open_checkpoint(pulled)
    return local_checkpoint


def latest_of_run(
    directory: Path, known: int, url: str = "", parts: Sequence[str] = ()
) -> Checkpoint | None:
    """Return the newest checkpoint under ``directory``, or at ``url``, of a run whose newest one is
    of version ``known`` at least (0: it may have none). ``parts``: see :func:`newest`. Raises
    CheckpointMissing."""
    checkpoint = newest(directory, url, known, parts) if known else latest(directory)
    if known > (checkpoint.version if checkpoint else 0):
        here = f"none newer than that of version {checkpoint.version}" if checkpoint else "none"
        raise CheckpointMissing(
            f"checkpoint: the run's newest is of version {known}, and this node "
            f"({platform.node()}) has {here} below {directory}; set checkpoint.url, mount the "
            f"run's folder here at the same path, or copy the checkpoint there; "
            "or resume the run with --from and the version of an older one (0: from the beginning)"
        )
    return checkpoint


def whole(directory: Path) -> list[Path]:
    """Return the complete checkpoints below ``directory``, oldest first."""
    paths = directory.glob("step-*")
    return sorted(path for path in paths if STEP.fullmatch(path.name) and (path / STATE).is_file())


def name_of(version: int) -> str:
    """Return the name of the folder of the checkpoint of ``version``."""
    return f"step-{version:08d}"


def version_of(name: str) -> int:
    """Return the version of the checkpoint in the folder ``name``."""
    return int(name.removeprefix("step-"))


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``.

    Raises FileNotFoundError where it was removed, and CheckpointUnusable.
    """
    try:
        state = json.loads((path / STATE).read_bytes())
        counters = {str(name): int(count) for name, count in state["counters"].items()}
        remake = [int(group) for group in state["remake"]]
        return Checkpoint(
            path, int(state["version"]), counters, remake, str(state.get("rates", ""))
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"{path / STATE} is damaged: it does not hold the state of a run ({error!r:.200})"
        raise CheckpointUnusable(f"checkpoint: {why}; {way_back(path)}") from None


def usable(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints below ``directory`` that can be opened, oldest first."""
    checkpoints = []
    for path in whole(directory):
        try:
            checkpoints.append(open_checkpoint(path))
        except FileNotFoundError:  # removed meanwhile
            continue
        except (CheckpointUnusable, OSError) as damaged:
            log.warning("a checkpoint cannot be opened", reason=str(damaged))
    return checkpoints


def set_aside(path: Path) -> Path:
    """Rename the checkpoint in the folder ``path``, so that no run goes on from it, and nothing of
    it is removed. Returns the new path."""
    for number in itertools.count(1):
        aside = path.with_name(f"{ASIDE}{path.name}{f'-{number}' if number > 1 else ''}")
        if not aside.exists():
            os.rename(path, aside)
            sync(path.parent)
            return aside
    raise AssertionError("there is always another number")


def _store(url: str) -> CheckpointStore:
    from orchestration.checkpoints.store import CheckpointStore

    return CheckpointStore(url)
