"""Counts the prompts of a source that were too long, and lists them in a file of the run's
folder."""

from __future__ import annotations

import json
from pathlib import Path

import structlog

MOST_LISTED = 10_000  # prompts in the file
TOO_LONG_FILE = "too-long.jsonl"  # in the run's folder

log = structlog.get_logger()


class LongPrompts:
    """Prompts that were too long, each counted once as ``skipped`` or ``cut``.

    The first :data:`MOST_LISTED` are listed in ``path``, a JSON object a line; a file that cannot
    be written is a warning.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.skipped = self.cut = 0
        self._known: set[str] = set()
        self._append = False

    def resume(self) -> None:
        """Continue the file of an earlier process, for a source without an end, which is never read
        as a whole."""
        self._append = True
        if self.path is None or not self.path.is_file():
            return
        for line in self.path.read_bytes().splitlines():
            try:
                listed = json.loads(line)
                self._count(listed["where"], listed["done"])
            except (ValueError, LookupError, TypeError):  # a line that a kill cut short
                continue

    def add(self, where: str, length: str, action: str) -> None:
        """Count the prompt at ``where``.

        ``length`` describes how long it is; ``action`` is "skipped" or "cut".
        """
        if (
            not self._count(where, action)
            or self.path is None
            or self.skipped + self.cut > MOST_LISTED
        ):
            return
        try:
            with self.path.open("a" if self._append else "w", encoding="utf-8") as file:
                file.write(json.dumps({"where": where, "length": length, "done": action}) + "\n")
            self._append = True
        except OSError as error:
            log.warning(
                "prompts that are too long cannot be listed", path=str(self.path), reason=str(error)
            )
            self.path = None

    def _count(self, where: str, action: str) -> bool:
        if where in self._known:
            return False
        if len(self._known) < MOST_LISTED:
            self._known.add(where)
        self.skipped += action == "skipped"
        self.cut += action == "cut"
        return True
