"""Records of a run's folder, and the checkpoint that a resumed run begins with.

    metrics.jsonl, the index's append-only file, summary.json ──▶ the newest version that has a checkpoint ─┐
    checkpoints/, checkpoint.url ──▶ the newest checkpoint that is there ───────────────────────────────────┴▶ compared

Nothing is removed because a checkpoint could not be found: it may be on a disk that is not mounted.
"""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any

import structlog

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.checkpoint import Checkpoint, CheckpointUnusable
from orchestration.checkpoints.store import CheckpointStore
from orchestration.history.events_file import METRICS, newest_checkpoint
from orchestration.state.documents import CHECKPOINT_REPORTED
from orchestration.state.lock import RunError
from orchestration.state.paths import INDEX, WHERE

SUMMARY = "summary.json"
# As the append-only file has the document.
_REPORTED = re.compile(CHECKPOINT_REPORTED.key.encode() + rb"\r\n\$\d+\r\n(\d+)\r\n")

log = structlog.get_logger()


def recorded_version(out: Path) -> int:
    """Return the newest version of which the run in ``out`` has recorded a checkpoint; 0: none."""
    metrics = out / METRICS
    versions = [newest_checkpoint(metrics), *_in_index(out / INDEX)]
    # otherwise it is newer than the summary, which is written when a run ends
    if not metrics.is_file():
        versions += _in_summary(out / SUMMARY)
    return max(versions, default=0)


def _in_index(folder: Path) -> list[int]:
    versions: list[int] = []
    for path in folder.rglob("*.aof"):
        if path.stat().st_size:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                versions += [int(match[1]) for match in _REPORTED.finditer(content)]
    return versions


def _in_summary(path: Path) -> list[int]:
    saved = Path(_summary(path).get("checkpoint") or "").parent.name
    return [checkpoint.version_of(saved)] if saved.startswith("step-") else []


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return summary


def _has_finished(out: Path, version: int) -> bool:
    """Return whether the run in ``out`` has finished with ``version`` steps; one whose command was
    killed after its last step has not: it has no summary."""
    is_of_command = (out / METRICS).is_file()
    if not is_of_command:  # it was executed by a program of the user
        return not (out / WHERE).exists()
    summary = _summary(out / SUMMARY)
    return summary.get("state") == "finished" and summary.get("steps") == version


def start_of(out: Path, url: str, steps: int, wanted: int | None = None) -> Checkpoint | None:
    """Return the checkpoint from which the run in ``out`` goes on to ``steps``: the newest one, or
    that of version ``wanted`` (0: none, from the beginning). All of its files are verified. Changes
    nothing, but copies one from ``url``. Raises RunError."""
    folder = out / "checkpoints"
    if folder.is_symlink() and not folder.exists():
        raise RunError(
            f"run: {folder} is a link to {folder.readlink()}, which is not there; mount its disk, "
            f"or put the folder back"
        )
    try:
        start = (
            checkpoint.newest(folder, url) if wanted is None else of_version(folder, url, wanted)
        )
        if wanted is None:
            _refuse_missing(out, start)
        if start is not None:
            start.verify()
    except CheckpointUnusable as unusable:
        raise RunError(str(unusable)) from None
    if start is not None and (
        done := start.nothing_left(steps, finished=_has_finished(out, start.version))
    ):
        raise RunError(f"run: {out} {done}; for more, --set train.steps=…")
    return start


def _refuse_missing(out: Path, start: Checkpoint | None) -> None:
    version = start.version if start else 0
    recorded = recorded_version(out)
    if recorded <= version:
        return
    here = f"none newer than that of version {version}" if start else "none"
    raise RunError(
        f"run: {out} has recorded a checkpoint of version {recorded}, and {out / 'checkpoints'} "
        f"has {here}; mount the disk that it is on, or put it back; or go on from "
        f"{f'version {version}' if start else 'the beginning'} with `asyncdock resume {out} --from "
        f"{version}`, which makes the steps since again"
    )


def of_version(folder: Path, url: str, version: int) -> Checkpoint | None:
    """Return the checkpoint of ``version`` in ``folder``, copied from ``url`` where only that has
    it; None for version 0. Raises RunError, and CheckpointUnusable."""
    if not version:
        return None
    names = {path.name: path for path in checkpoint.whole(folder)}
    store = CheckpointStore(url) if url else None
    remote = store.names() if store else []
    name = checkpoint.name_of(version)
    if name not in names and store and name in remote:
        names[name] = store.pull(name, folder)
    if name not in names:
        known = (
            ", ".join(str(checkpoint.version_of(each)) for each in sorted({*names, *remote}))
            or "none"
        )
        raise RunError(
            f"version {version}: {folder} has no checkpoint of it; it has: {known} (0: "
            f"none of them)"
        )
    return checkpoint.open_checkpoint(names[name])


def set_newer_aside(out: Path, url: str, version: int) -> None:
    """Rename the checkpoints of the run in ``out`` that are newer than ``version``, here and at
    ``url``: a run that goes on from ``version`` makes others of these versions."""
    name = checkpoint.name_of(version)
    for path in checkpoint.whole(out / "checkpoints"):
        if path.name > name:
            log.warning(
                "set aside a checkpoint, which stays on the disk",
                path=str(checkpoint.set_aside(path)),
            )
    store = CheckpointStore(url) if url else None
    for newer in store.names() if store else []:
        if store and newer > name:
            store.set_aside(newer, f"{checkpoint.ASIDE}{newer}")
            log.warning(
                "set aside a checkpoint, which stays at its URL",
                name=f"{url}/{checkpoint.ASIDE}{newer}",
            )
