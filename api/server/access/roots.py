"""Paths below the roots of a service: what they are once every link is followed, also of files inside of a folder.

a path ─▶ its real path ─▶ below a root? ─▶ a folder: each file and link in it, at any depth ─▶ below a root, and a file?

It is looked at when a recipe is submitted, and again when its run is resumed. Whoever may write below a root can change a
file between this and the run's reading of it: a root should be writable for those alone that may see the files of the
service's user.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

MOST_ENTRIES = 20_000  # of a folder, with its subfolders


def below_root(roots: Sequence[Path], value: str) -> Path | None:
    """Return the real path of ``value``, every link followed, if it is below a root. A relative path is looked for in each
    root."""
    for root in roots:
        below = Path(os.path.realpath(root))
        real = Path(os.path.realpath(below / value))
        if real.is_relative_to(below) and (real.exists() or Path(value).is_absolute() or root == roots[-1]):
            return real
    return None


def leads_out(roots: Sequence[Path], folder: Path) -> str:
    """Return what in the real path ``folder``, by its name in it, is no file below a root, and why; "" where there is
    nothing. Folders that links lead to are looked at, too."""
    real_roots = [os.path.realpath(root) for root in roots]
    entries, seen, waiting = 0, {os.path.realpath(folder)}, [str(folder)] if folder.is_dir() else []
    while waiting:
        current = waiting.pop()
        try:
            names = os.listdir(current)
        except OSError as error:
            return f"{_shown(current, folder)} cannot be read ({error.strerror})"
        entries += len(names)
        if entries > MOST_ENTRIES:
            return f"it has more than {MOST_ENTRIES} files"
        for name in names:
            path = os.path.join(current, name)
            real = os.path.realpath(path)
            if not any(real == root or real.startswith(os.path.join(root, "")) for root in real_roots):
                return f"{_shown(path, folder)} is a link to a place outside"
            try:
                mode = os.lstat(real).st_mode
            except OSError:
                continue  # a link to nothing
            if stat.S_ISLNK(mode):
                continue  # to itself
            if stat.S_ISDIR(mode):
                if real not in seen:
                    seen.add(real)
                    waiting.append(path)
            elif not stat.S_ISREG(mode):
                return f"{_shown(path, folder)} is no file"
    return ""


def _shown(path: str, folder: Path) -> str:
    return repr(os.path.relpath(path, folder))[:200]
