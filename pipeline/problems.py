"""A :class:`Problem` for each thing that is wrong, and errors that carry them.

Imports no module of ours.

    raise PromptError(wrong, fix, "prompts.path", path)
        ├─▶ str(error)      prompts.path = "a.jsonl": does not exist; give another path
        └─▶ error.problems  read by whoever reports it: a recipe's check, the REST server

No message is parsed: its words may change. Whether another attempt may succeed, an error of ours
says by its base: :class:`Fatal`, :class:`Passing`, or neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MOST_SHOWN = 400  # characters of a value in a message: a path is shown whole


class Fatal(Exception):
    """Another attempt would fail in the same way: it ends a run at the first one."""


class Passing(Exception):
    """Caused by another process that is about to come back: another attempt may succeed."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the dotted key of a field, its value, what is wrong, and what to do.

    >>> print(Problem("train.steps", 0, "is out of range", "use a value >= 1"))
    train.steps = 0: is out of range; use a value >= 1
    """

    key: str
    value: Any
    wrong: str
    fix: str = ""

    def __str__(self) -> str:
        shown = ""
        if self.value is not None:
            value = json.dumps(self.value, ensure_ascii=False, default=str)
            shown = f" = {value if len(value) <= MOST_SHOWN else value[:MOST_SHOWN] + '...'}"
        return f"{self.key}{shown}: {self.wrong}" + (f"; {self.fix}" if self.fix else "")


class ProblemError(Exception):
    """An error with all of its ``problems``. ``message``: by default the problems, a line each."""

    def __init__(self, *problems: Problem, message: str = "") -> None:
        super().__init__(message or "\n".join(map(str, problems)))
        self.problems = problems
