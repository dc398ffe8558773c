"""Paths of a run's files. Workers, and programs outside that join the run, read them from the
index."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.arena import shared_memory_directory
from pipeline.node import folder_id

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe

LOCAL = "local"  # the warehouse of the head's machine
STEP = re.compile(r"step-\d{8,18}")  # the folder of a checkpoint
RECIPE = "recipe.json"  # in the run's folder; private, because its index's URL may hold a password
INDEX = "index"  # in the run's folder: the folder of the embedded index
WHERE = "index.json"  # there while the run is alive: the index's URL and the run's id
# there, too: the id of the run that began in it, by which checkpoint.url has a folder for it
FIRST_ID = "first-id"
# in a worker's environment: its warehouse and its folders on its host
HOST_VARIABLE = "ASYNCDOCK_HOST"


@dataclass(frozen=True)
class RunPaths:
    """Paths of a run's files: ``out`` on disk, ``shared`` in memory; ``start`` is the checkpoint it
    resumed from; ``url``: where its checkpoints are copied to, "" without ``checkpoint.url``."""

    out: Path
    shared: Path
    start: Path | None
    url: str = ""

    def to_json(self) -> str:
        out = str(self.out)
        shared = str(self.shared)
        start = str(self.start or "")
        return json.dumps({"out": out, "shared": shared, "start": start, "url": self.url})

    @classmethod
    def from_json(cls, text: str) -> RunPaths:
        data = json.loads(text)
        start = Path(data["start"]) if data["start"] else None
        return cls(Path(data["out"]), Path(data["shared"]), start, data.get("url", ""))

    def at_host(self) -> tuple[RunPaths, str]:
        """Return the folders as a worker in this process finds them, and the warehouse that it
        writes to: those of its host, where one has started it
        (:mod:`orchestration.launch.hosts`)."""
        if not (host_json := os.environ.get(HOST_VARIABLE)):
            return self, LOCAL
        host = json.loads(host_json)
        return replace(self, out=Path(host["out"]), shared=Path(host["shared"])), host["warehouse"]

    @staticmethod
    def host_name() -> str:
        """Return the name of the host that has started this process; "" on the head."""
        return str(json.loads(os.environ.get(HOST_VARIABLE) or "{}").get("name", ""))

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


def shared_of(folder: Path) -> Path:
    """Return the shared-memory folder of the run in ``folder``, the same for every runner of it."""
    return shared_memory_directory() / f"{shared_prefix(folder.parent)}{folder.name}"


def shared_prefix(folders: Path) -> str:
    """Return the prefix of the shared-memory folders of all runs below ``folders``.

    Containers that share this memory may each have folders at the same path. Raises
    FileNotFoundError where there is no such folder.
    """
    return f"asyncdock-run-{folder_id(folders)}-"


def store_url(recipe: Recipe, out: Path, run: str = "") -> str:
    """Return where the checkpoints of the run in the folder ``out`` are copied to; "" when they are
    not. The folder there has the id of the first run in ``out``: that is ``run`` where none is
    known yet, and "" is returned without both."""
    if not recipe.checkpoint.url:
        return ""
    with contextlib.suppress(FileNotFoundError):
        run = (out / FIRST_ID).read_text()
    return f"{recipe.checkpoint.url.rstrip('/')}/{run}" if run else ""
