"""A table of rows by their numbers."""

from __future__ import annotations

from typing import Any

from stages.prompts.rows.files import PromptError, Row


class Table:
    """A table of rows by their numbers. ``rows``: anything with ``len`` that returns mappings by
    number. ``about`` says for people which files they are of."""

    about = ""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        try:
            row: Row = self._rows[number]
        except PromptError:
            raise
        except Exception as error:
            raise PromptError(
                f"{self.where(number)} cannot be read ({error!r})", "correct it"
            ) from error
        return row

    def where(self, number: int) -> str:
        """Return a name of the row for people, counted from 1."""
        return f"{self._name}, row {number + 1}"

    def is_unread(self, number: int) -> bool:
        """Return whether the row was too large to be read."""
        return False
