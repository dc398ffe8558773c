"""Where a run's files lie. Workers, and programs outside that join the run, read it from the index."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """Where a run's files lie: ``out`` on disk, ``shared`` in memory; ``start`` is the checkpoint it resumed from."""

    out: Path
    shared: Path
    start: Path | None

    def to_json(self) -> str:
        return json.dumps({"out": str(self.out), "shared": str(self.shared), "start": str(self.start or "")})

    @classmethod
    def from_json(cls, text: str) -> RunPaths:
        data = json.loads(text)
        return cls(Path(data["out"]), Path(data["shared"]), Path(data["start"]) if data["start"] else None)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"
