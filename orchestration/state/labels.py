"""Notes and tags that people give to a run: in its folder, or in the list of a service's runs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestration.private_files import write_private

LABELS = "labels.json"  # in the run's folder
TAG = re.compile(r"[^\s,+-][^\s,]{0,39}")
MOST_TAGS = 20
MOST_NOTES = 4000  # characters


class NotLabels(ValueError):
    """Tags or notes, which ``field`` says, that are not in form."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True)
class Labels:
    """``tags``: sorted words; ``notes``: a text. Raises NotLabels."""

    tags: tuple[str, ...] = ()
    notes: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", tuple(sorted(set(self.tags))))
        for tag in self.tags:
            if not TAG.fullmatch(tag):
                raise NotLabels(
                    "tags",
                    f"{tag!r} is no tag; use up to 40 characters without blanks and commas, the "
                    f"first of them no + or -",
                )
        if len(self.tags) > MOST_TAGS:
            raise NotLabels("tags", f"{len(self.tags)} are too many; use at most {MOST_TAGS}")
        if len(self.notes) > MOST_NOTES:
            raise NotLabels(
                "notes", f"{len(self.notes)} characters are too many; use at most {MOST_NOTES}"
            )

    def tagged(self, more: Collection[str], fewer: Collection[str]) -> Labels:
        """Return the labels with the tags ``more`` and without ``fewer``."""
        return Labels(tuple(({*self.tags} - {*fewer}) | {*more}), self.notes)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Labels:
        data = json.loads(text)
        return cls(tuple(data.get("tags", ())), str(data.get("notes", "")))


def read_labels(folder: Path) -> Labels:
    """Return the labels of the run in ``folder``."""
    with contextlib.suppress(OSError, ValueError):
        return Labels.from_json((folder / LABELS).read_bytes())
    return Labels()


def write_labels(folder: Path, labels: Labels) -> None:
    """Keep ``labels`` in ``folder``. Raises OSError."""
    write_private(folder / LABELS, labels.to_json())
