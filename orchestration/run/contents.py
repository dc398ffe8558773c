"""What the folder of a run that has ended takes, and what of it is kept elsewhere.

RUN_DIR ─▶ sizes: bytes by part        ─▶ spare: checkpoints that a resume does not need
        ─▶ archive: a copy without these, and without the index; unpacked it is a run's folder again
        ─▶ remove
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestration.disk import replacing
from orchestration.state.lock import LOCK, RunError, lock_run
from orchestration.state.paths import INDEX, STEP, WHERE

CHECKPOINTS = "checkpoints"
PARTS = (CHECKPOINTS, INDEX, "samples", "logs", "metrics")
FORMS = {".tar": "", ".tar.gz": "gz", ".tgz": "gz", ".tar.xz": "xz"}  # of archives, by their names


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes below ``folder`` in `total`, in each of PARTS and in `other`, and those of
    :func:`spare` as `can go`."""
    taken = Counter(dict.fromkeys(("total", *PARTS, "other"), 0))
    for path in folder.iterdir():
        part = path.name.removesuffix(".jsonl")
        taken[part if part in PARTS else "other"] += _bytes(path)
    taken["total"] = taken.total()
    return {**taken, "can go": sum(map(_bytes, spare(folder)))}


def spare(folder: Path) -> list[Path]:
    """Return what is in the folder of checkpoints beside the newest one: older ones, those that
    were set aside, and what kills have left."""
    saved = folder / CHECKPOINTS
    paths = sorted(saved.iterdir()) if saved.is_dir() else []
    newest = max((path for path in paths if STEP.fullmatch(path.name)), default=None)
    return [path for path in paths if path != newest]


def archive(folder: Path, target: Path) -> None:
    """Copy the run in ``folder`` to ``target``, a new folder or a file named as one of FORMS.

    Raises RunError, also where the run goes on, and OSError.
    """
    left_out = {folder / INDEX, folder / LOCK, folder / WHERE, *spare(folder)}
    form = next((form for end, form in FORMS.items() if target.name.endswith(end)), None)
    if target.exists() or (form is None and ".tar" in target.name):
        raise RunError(
            f"to: {target} is there already, or has no known form; give a new folder, or a new "
            f"file whose name ends with {', '.join(FORMS)}"
        )

    def ignore(where: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if Path(where, name) in left_out]

    def member(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if folder.parent / info.name in left_out else info

    with lock_run(folder):
        if form is None:
            partial = target.with_name(f".{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(folder, partial, symlinks=True, ignore=ignore)
            partial.rename(target)
            return
        need = sum(map(_bytes, set(folder.iterdir()) - left_out))
        mode: Any = f"w:{form}"
        with replacing(target, need) as partial, tarfile.open(partial, mode) as file:
            partial.chmod(0o600)  # as the recipe in it
            file.add(folder, folder.name, filter=member)


def remove(folder: Path, parts: Sequence[Path]) -> None:
    """Remove ``parts`` of the run in ``folder``, which may be ``folder`` itself. A kill leaves none
    half removed under its name. Raises RunError where the run goes on, and OSError."""
    with lock_run(folder):
        for path in parts:
            removed = path.with_name(f".{path.name.removeprefix('.')}.removed")
            path.rename(removed)
            shutil.rmtree(removed)


def _bytes(path: Path) -> int:
    """Return the bytes of the file ``path``, or of all files below it."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    files = (Path(where, name) for where, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_size for file in files)
