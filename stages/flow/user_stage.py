"""Stages of a user: a small class, named by a recipe as ``[[stages]] use = "module:Class"``.

Importing this needs no torch.

class Judge(UserStage):                      needs ─▶ process(rows) ─▶ makes
    strictness: float = 0.5                  an option of the recipe's table
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from pipeline.problems import Problem
from stages.flow.declarations import (
    Columns,
    FlowError,
    RunsOn,
    StageDeclaration,
    columns_of,
    type_problems,
)
from stages.user_code import CodeUnusable, find

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

ENTRY_POINTS = "asyncdock.stages"
# Names of product stages and of worker kinds.
RESERVED = (
    "source",
    "gate",
    "flow",
    "environment",
    "rollout",
    "reward",
    "reference",
    "critic",
    "advantage",
    "teacher_prompt",
    "update",
    "colocated",
    "stage",
)


class StageRows(dict[str, Any]):
    """The columns that a stage needs, of B rows: a tensor [B, …] of a column with one value in each
    row, a list of B tensors of a ragged one, a list of B strings of a text."""

    def __init__(self, columns: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> None:
        super().__init__(columns)
        self._tokenizer = tokenizer

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"{name!r} is not a column that the stage needs; its columns are {sorted(self)}"
        )

    @cached_property
    def completions(self) -> list[str]:
        """The responses as texts, of a stage that needs ``response_ids``."""
        assert self._tokenizer is not None
        return [
            str(self._tokenizer.decode(row.tolist(), skip_special_tokens=True))
            for row in self["response_ids"]
        ]

    @cached_property
    def prompts(self) -> list[Any]:
        """The prompts as their source gave them, texts or conversations, of a stage that needs
        ``given``."""
        return [json.loads(text) for text in self["given"]]

    @cached_property
    def fields(self) -> list[dict[str, Any]]:
        """The other columns of the prompts' rows, of a stage that needs ``fields``."""
        return [json.loads(text) for text in self["fields"]]


class UserStage(BaseModel, ABC):
    """The base of a user's stage. Its fields are its options; each worker makes one instance of it.

    ``takes``: ``"rows"``, any that are ready together, or ``"groups"``, one whole group at a time.
    ``needs``: names of columns, or their types by name. ``makes``: types by name; a stage that
    makes nothing can still drop groups."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: ClassVar[str] = ""  # of the stage in the flow; default: the class's name in lower case
    takes: ClassVar[Literal["rows", "groups"]] = "rows"
    needs: ClassVar[Sequence[str] | Columns] = ()
    makes: ClassVar[Columns] = {}
    runs_on: ClassVar[RunsOn] = "cpu"

    @abstractmethod
    def process(self, rows: StageRows) -> Any:
        """Return the columns that :attr:`makes` names, or a :class:`~stages.flow.Drop` from a stage
        that takes groups. It may be ``async``; a plain method runs in a thread."""


def stage_class(name: str) -> type[UserStage]:
    """Return the class that ``name`` stands for: ``module:Class``, or an entry point of the group
    ``asyncdock.stages``. Raises CodeUnusable."""
    key = "stages.use"
    candidate = find(key, name, {}, lambda: importlib.metadata.entry_points(group=ENTRY_POINTS))
    if isinstance(candidate, type) and issubclass(candidate, UserStage):
        return candidate
    fix = "derive its class from stages.flow.UserStage"
    raise CodeUnusable(Problem(key, name, "is not a stage", fix))


def declaration_of(
    stage: UserStage, *, workers: int = 1, place: str = "stages"
) -> StageDeclaration:
    """Return the declaration of ``stage``. Raises FlowError with all that is wrong with it."""
    name = stage.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(stage).__name__).lower()
    problems = []
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
        reason = "is not the name of a stage"
        problems.append(
            Problem(place, name, reason, "write lower-case letters, digits and _, 32 at most")
        )
    if name in RESERVED:
        problems.append(
            Problem(
                place,
                name,
                "is the name of a stage of the product",
                "give its class another `name`",
            )
        )
    if stage.takes not in ("rows", "groups"):
        fix = "write takes = 'rows' or takes = 'groups'"
        problems.append(
            Problem(place, stage.takes, f"is nothing that stage {name!r} can take", fix)
        )
    try:
        needs = columns_of(stage.needs)
        makes = columns_of(stage.makes)
    except (TypeError, ValueError) as error:
        reason = f"declares columns that cannot be read ({error})"
        raise FlowError(
            Problem(place, name, reason, "write names, or a dict of types by name")
        ) from error
    problems += [*type_problems(place, needs), *type_problems(place, makes)]
    problems += [
        Problem(place, n, "is made without a type", "write its type")
        for n, kind in makes.items()
        if not kind
    ]
    if not needs:
        problems.append(
            Problem(
                place, name, "needs no column", "name one at least, as needs = ('response_ids',)"
            )
        )
    if problems:
        raise FlowError(*problems)
    return StageDeclaration(name, stage.takes, needs, makes, stage.runs_on, workers, place=place)
