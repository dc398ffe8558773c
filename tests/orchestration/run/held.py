"""An environment that answers when a file is there."""

from __future__ import annotations

import time
from pathlib import Path

from stages.tasks.guess import Guess


class Held(Guess):
    """Answers once ``file`` exists."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        while not self._file.exists():
            time.sleep(0.01)
        return super().step(text)
