"""The declarations of stages and algorithms: the columns that they read and write.

Importing this needs no torch.

{"reward": "float32", "scores": "float32 [3]", "advantage": "float32 ragged", "given": "text"}
   name      dtype, and how much of it a sample has: one value, a fixed shape, a length of its own, a text

``"float32 ragged [32]"``: 32 values for each token, stored one token after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pipeline.problems import Problem, ProblemError

if TYPE_CHECKING:
    from pipeline.data.columns import Column

Takes = Literal["rows", "groups", "batch"]
RunsOn = Literal["cpu", "frozen model", "policy", "value head", "policy entropy", "base", "critic"]
BASE: RunsOn = "base"  # the policy without its adapters
ENTROPY: RunsOn = "policy entropy"  # of the policy's distribution at each token, in nats
# What the trainer computes with, before the first optimizer step of a train batch.
IN_TRAINING: tuple[RunsOn, ...] = ("policy", "value head", ENTROPY, BASE)
Columns = Mapping[str, str]  # type of each column, by name; "": any type

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bfloat16",
    "float16",
    "float32",
    "float64",
]
TYPE = re.compile(rf"text|({'|'.join(DTYPES)})( ragged( \[\d+\])?| \[\d+(, ?\d+)*\])?( finite)?")
TYPE_HELP = (
    "write a dtype, alone or with a shape, as 'float32', 'float32 [3]', 'float32 ragged', "
    "'float32 ragged [3]'; or 'text'"
)


class FlowError(ProblemError, ValueError):
    """Stages that do not fit together."""


@dataclass(frozen=True)
class Drop:
    """Returned in the place of columns: the group leaves the run untrained, and the gate admits
    another one. ``reason`` is a short text under which the ledger counts the group. ``instead``: of
    an algorithm's credit, the columns with which the group is trained when its step has dropped as
    many as ``algorithm.max_refill`` allows; without, it is dropped even then."""

    reason: str
    instead: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)


Result = Mapping[str, Any] | Drop  # of a call of a stage, or of an algorithm's credit


@dataclass(frozen=True)
class StageDeclaration:
    """A stage: what it takes, the columns that it needs and makes, and what computes it.

    ``workers``: how many processes run it; 0 where it shares the process of the light stages.
    ``optional``: columns that it reads where another stage makes them. ``place`` names the recipe's
    key that asks for the stage, in error messages. ``takes_turns_with``: another stage, whose rows
    and columns it makes together with that one; it declares none itself."""

    name: str
    takes: Takes
    needs: Columns
    makes: Columns
    runs_on: RunsOn = "cpu"
    workers: int = 1
    optional: Columns = field(default_factory=dict)
    place: str = ""
    takes_turns_with: str = ""


class AlgorithmDeclaration(Protocol):
    """What a flow is resolved from: the columns of an algorithm, which
    :class:`stages.algorithms.interface.Algorithm` describes."""

    @property
    def scores(self) -> Mapping[str, RunsOn]: ...

    @property
    def credit_reads(self) -> Columns: ...

    @property
    def credit_optional(self) -> Columns: ...

    @property
    def credit_makes(self) -> Columns: ...

    @property
    def teacher_reads(self) -> Columns: ...

    @property
    def prepare_makes(self) -> Columns: ...

    @property
    def loss_reads(self) -> Columns: ...


@dataclass(frozen=True)
class Declared:
    """The declarations of a recipe's own stages, and their columns that its reward functions
    read."""

    stages: tuple[StageDeclaration, ...]
    reads: Columns

    def to_json(self) -> str:
        stages = [asdict(stage) for stage in self.stages]
        return json.dumps({"stages": stages, "reads": dict(self.reads)})

    @classmethod
    def from_json(cls, text: str) -> Declared:
        known = json.loads(text)
        stages = tuple(StageDeclaration(**stage) for stage in known["stages"])
        return cls(stages, known["reads"])


def type_problems(key: str, columns: Columns) -> list[Problem]:
    """Return a problem for each name and type in ``columns`` that is none."""
    faults = [
        (name, "is not the name of a column", "write an identifier")
        for name in columns
        if not name.isidentifier()
    ]
    faults += [
        (n, f"has the type {t!r}", TYPE_HELP)
        for n, t in columns.items()
        if t and not TYPE.fullmatch(t)
    ]
    return [Problem(key, *problem) for problem in faults]


def columns_of(declared: Any) -> Columns:
    """Return a declaration as a mapping: names alone (a tuple or a list) mean that any type will
    do."""
    return dict(declared) if isinstance(declared, Mapping) else dict.fromkeys(declared, "")


def column(name: str, kind: str) -> Column:
    """Return the pipeline's column of a declaration such as ``"float32 [3]"``. Imports torch."""
    import torch

    from pipeline.data.columns import Column

    if kind == "text":
        return Column.text(name)
    kind, finite = kind.removesuffix(" finite"), kind.endswith(" finite")
    dtype, _, shape = kind.partition(" ")
    sizes = (
        None
        if shape.startswith("ragged")
        else tuple(int(size) for size in shape.strip("[]").split(",") if size)
    )
    return Column(name, getattr(torch, dtype), sizes, finite)


def itemsize(kind: str) -> int:
    """Return the number of bytes of one element of a column that is no text."""
    bits = re.match(r"[a-z]+(\d*)", kind)
    return int(bits[1] or 8) // 8 if bits else 1


def token_shape(kind: str) -> tuple[int, ...]:
    """Return the shape of what a ragged column has for each token.

    >>> token_shape("float32 ragged"), token_shape("int32 ragged [32] finite")
    ((), (32,))
    """
    values = re.search(r" ragged \[(\d+)\]", kind)
    return (int(values[1]),) if values else ()


def same_type(wanted: str, made: str) -> bool:
    """Return whether a column declared as ``made`` is what a reader declares as ``wanted``."""
    return not wanted or wanted.replace(" finite", "") == made.replace(" finite", "")
