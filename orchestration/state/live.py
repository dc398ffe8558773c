"""Whether the command of a run goes on in its folder, and where its index is."""

from __future__ import annotations

import json
from pathlib import Path

from orchestration.state.lock import LOCK
from orchestration.state.paths import WHERE
from pipeline.locks import is_held


def live_index(folder: Path) -> dict[str, str] | None:
    """Return the index and the id of the run whose command goes on in ``folder``; else None."""
    try:
        where: dict[str, str] = json.loads((folder / WHERE).read_text())
        return where if is_held(folder / LOCK) else None
    except (OSError, ValueError):
        return None
