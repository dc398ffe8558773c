"""Whether the command of a run goes on in its folder, and where its index is."""

from __future__ import annotations

import json
from pathlib import Path

from orchestration.state.lock import is_executed
from orchestration.state.paths import WHERE


def live_index(folder: Path) -> dict[str, str] | None:
    """Return the index and the id of the run whose command goes on in ``folder``; else None."""
    try:
        where: dict[str, str] = json.loads((folder / WHERE).read_text())
        return where if is_executed(folder) else None
    except (OSError, ValueError):
        return None
