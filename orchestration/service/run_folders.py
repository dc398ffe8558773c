"""The runs' folders below some folders, listed again only where something has changed.

root ─▶ folder with recipe.json ─▶ a run, by the name of its folder
  └──▶ any other, and in it once more ─▶ the same
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestration.recipe.loading.paths import name_of
from orchestration.state.paths import RECIPE

SETTLED_NS = 2_000_000_000  # a folder that changed later may change again at the same time stamp


class RunFolders:
    """The runs in ``roots``: each is a run's folder, or one with such folders in it, or in
    those."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        # of each folder that is no run: when it had changed, and the folders in it
        self._listings = dict[str, tuple[int, list[str]]]()
        self._runs = set[str]()

    def by_id(self) -> dict[str, Path]:
        """Return the runs' folders by their ids, which are their names."""
        folders = [folder for root in self._roots for folder in self._runs_in(str(root.resolve()))]
        ids = dict[str, Path]()
        for folder in dict.fromkeys(folders):
            run = name_of(os.path.basename(folder))
            if run in ids:  # two folders of one name
                run = f"{run}-{uuid.uuid5(uuid.NAMESPACE_URL, folder).hex[:4]}"
            ids[run] = Path(folder)
        self._runs &= {*folders}
        return ids

    def _runs_in(self, folder: str, depth: int = 2) -> Iterator[str]:
        if folder in self._runs or os.path.isfile(os.path.join(folder, RECIPE)):
            self._runs.add(folder)
            yield folder
        elif depth:
            for child in self._listing(folder):
                yield from self._runs_in(child, depth - 1)

    def _listing(self, folder: str) -> list[str]:
        try:
            changed = os.stat(folder).st_mtime_ns
            stamp, children = self._listings.get(folder, (0, []))
            if changed != stamp:
                with os.scandir(folder) as entries:
                    children = sorted(os.path.realpath(e.path) for e in entries if e.is_dir())
                if has_settled(changed):
                    self._listings[folder] = changed, children
            return children
        except OSError:  # removed meanwhile, or of another user
            return []


def has_settled(changed: int) -> bool:
    """Return whether what ``changed`` then (ns since the epoch) shows each later change by another
    time."""
    return time.time_ns() - changed > SETTLED_NS
