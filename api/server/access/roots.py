"""Paths below the roots of a service: what they are once every link is followed, also of files
inside of a folder.

a path ─▶ its real path ─▶ below a root? ─▶ a folder: each file and link in it, at any depth ─▶ below a root, and a file?
                                                                                                 not the service's own?

It is looked at when a recipe is submitted, and again when its run is resumed. Whoever may write
below a root can change a file between this and the run's reading of it: a root should be writable
for those alone that may see the files of the service's user.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from orchestration.private_files import SERVICE_NAMES
from orchestration.service.own_services import services_folder
from orchestration.state.paths import WHERE

RUNS = "runs"  # in the service's folder: the folders of its runs
MOST_ENTRIES = 20_000  # of a folder, with its subfolders


def below_root(roots: Sequence[Path], value: str) -> Path | None:
    """Return the real path of ``value``, every link followed, if it is below a root.

    A relative path is looked for in each root.
    """
    for root in roots:
        below = Path(os.path.realpath(root))
        real = Path(os.path.realpath(below / value))
        if real.is_relative_to(below) and (
            real.exists() or Path(value).is_absolute() or root == roots[-1]
        ):
            return real
    return None


class PrivatePlaces:
    """Real paths that only the service in ``data`` may read: its tokens and its index.

    A root may contain them.
    """

    def __init__(self, data: Path) -> None:
        folder = os.path.realpath(data)
        self._runs = os.path.join(folder, RUNS, "")
        names = [os.path.join(folder, name) for name in SERVICE_NAMES - {RUNS}]
        self._places = (*names, os.path.realpath(services_folder()))
        self._folders = tuple(f"{place}/" for place in self._places)

    def __contains__(self, path: str) -> bool:
        """Return whether the real ``path`` is one of them, or is in one."""
        if path in self._places or path.startswith(self._folders):
            return True
        run, _, name = path.removeprefix(self._runs).partition("/")
        # the password of the run's index
        return path.startswith(self._runs) and bool(run) and name == WHERE


def leads_out(roots: Sequence[Path], path: Path, data: Path) -> str:
    """Return a sentence about an entry of the real ``path`` that is no file below a root, or that
    only the service in ``data`` may read; "" where there is none. Folders that links lead to are
    looked at, too."""
    private = PrivatePlaces(data)
    if str(path) in private:
        return "it is the service's own"
    real_roots = [os.path.realpath(root) for root in roots]
    entries = 0
    seen = {os.path.realpath(path)}
    waiting = [str(path)] if path.is_dir() else []
    while waiting:
        current = waiting.pop()
        try:
            names = os.listdir(current)
        except OSError as error:
            return f"{_shown(current, path)} cannot be read ({error.strerror})"
        entries += len(names)
        if entries > MOST_ENTRIES:
            return f"it has more than {MOST_ENTRIES} files"
        for name in names:
            entry = os.path.join(current, name)
            real = os.path.realpath(entry)
            if real in private:
                return f"{_shown(entry, path)} is the service's own"
            if not any(
                real == root or real.startswith(os.path.join(root, "")) for root in real_roots
            ):
                return f"{_shown(entry, path)} is a link to a place outside"
            try:
                mode = os.lstat(real).st_mode
            except OSError:
                continue  # a link to nothing
            if stat.S_ISLNK(mode):
                continue  # to itself
            if stat.S_ISDIR(mode):
                if real not in seen:
                    seen.add(real)
                    waiting.append(entry)
            elif not stat.S_ISREG(mode):
                return f"{_shown(entry, path)} is no file"
    return ""


def _shown(entry: str, folder: Path) -> str:
    return repr(os.path.relpath(entry, folder))[:200]
