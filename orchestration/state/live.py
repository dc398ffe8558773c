"""Whether the command of a run goes on in its folder, and where its index is."""

from __future__ import annotations

import json
from pathlib import Path

from orchestration.state.lock import RunLocked, lock_run
from orchestration.state.paths import WHERE


def live_index(folder: Path) -> dict[str, str] | None:
    """Return the index and the id of the run whose command goes on in ``folder``; else None."""
    try:
        where: dict[str, str] = json.loads((folder / WHERE).read_text())
        lock_run(folder).close()
    except RunLocked:
        return where
    except (OSError, ValueError):
        return None
    return None
