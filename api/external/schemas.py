"""Requests and answers of the interface to external stages (docs/external.md)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from api.schemas.runs import RunPath, Strict
from orchestration.recipe.sections import ExternalStage
from pipeline.data.events import RunState

LARGEST = 2**53
MOST_ROWS = 4096


def _whole(value: object) -> object:
    """Return 3 for 3.0: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)  # after Field(…): the JSON schema cannot express what follows it
Worker = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="The worker's name, which no other worker of the stage has.",
    ),
]
Version = Annotated[int, Field(ge=0, le=LARGEST), Whole]
LeaseToken = Annotated[
    str,
    Field(
        pattern=r"^[0-9a-f]{32}$",
        description="The token of a lease: 128 random bits, which only the bearer that claimed may "
        "use.",
    ),
]
Wait = Annotated[float, Field(ge=0, le=60, description="Seconds.")]
Lease = Annotated[
    float, Field(ge=0.1, le=3600, description="Seconds; by default pipeline.lease_seconds.")
]


class PutPrompts(Strict):
    """``first``: the position of the first prompt, from 0; null: behind those that the run has.
    ``last``: no more will come; from now on the prompts are repeated."""

    prompts: list[dict[str, Any]] = Field(
        max_length=MOST_ROWS,
        description="Rows with the prompt (a text or messages) and what the rewards need.",
    )
    first: Version | None = None
    last: bool = False
    wait: Wait = 30.0


class FedView(BaseModel):
    next: int = Field(description="The next free position.")


class GetExperience(Strict):
    """``count``: rows for reward, groups for rollout and reference; a trainer gets one batch.
    ``version``: the one that a rollout has loaded; by default that of its last weights/notify.
    ``replay``: a trainer that lost its state gets the rows of this step again, without a lease."""

    stage: ExternalStage
    worker: Worker
    count: Annotated[int, Field(ge=1, le=MOST_ROWS), Whole] = 1
    columns: list[Annotated[str, Field(max_length=64)]] = Field(
        [], max_length=31, description="By default those that the stage needs."
    )
    version: Version | None = None
    wait: Wait = 0.0
    lease: Lease | None = None
    tokenizer: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None,
        description="Fingerprint of the worker's vocabulary: the sha256, in hex, of the JSON list "
        "of its [id, token] pairs by id, in ASCII and without spaces. One that is not "
        "the run's is refused.",
    )
    replay: Version | None = None


Metric = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}$")]


class PutExperience(Strict):
    """The JSON beside the columns.

    ``rows``: ids that the lease holds. A trainer gives ``step`` (1 more than the ``trained`` of its claim) and
    ``metrics`` instead.
    """

    token: LeaseToken
    rows: list[Version] = Field([], max_length=MOST_ROWS)
    park: bool = False
    step: Version | None = None
    metrics: dict[Metric, float] = Field({}, max_length=256)


class PutView(BaseModel):
    left: int = Field(description="Rows that the lease still holds.")
    version: int | None = Field(description="After a step: the version to publish.")


class LeasePath(RunPath):
    token: LeaseToken


class LeaseQuery(Strict):
    lease: Lease | None = None


class LeaseView(BaseModel):
    token: str
    lease: float = Field(description="Seconds from now.")


class WeightsPath(RunPath):
    version: Version


class WeightsQuery(Strict):
    after: int = Field(-1, ge=-1, le=LARGEST, description="The version that the caller has.")
    wait: Wait = 0.0


class TensorView(BaseModel):
    name: str
    dtype: str
    shape: list[int]
    offset: int = Field(description="Its first byte at the local path.")


class LocalWeights(BaseModel):
    """Where a program on the same machine can map the bytes.

    They are overwritten when two newer versions are published: check each bucket after copying it.
    """

    node: str
    path: str
    buckets: list[tuple[int, int, str]] = Field(description="Offset, bytes and xxh3-64 of each.")


class WeightsView(BaseModel):
    """The published version; null when it is not newer."""

    version: int | None
    state: RunState
    bytes: int
    tensors: list[TensorView]
    local: LocalWeights | None


class PublishQuery(Strict):
    covered: Version = Field(0, description="Steps that the trainer's own checkpoint has.")


class Notify(Strict):
    worker: Worker
    version: Version
    exposed: float = Field(
        0.0, ge=0, le=LARGEST, description="Seconds in which it generated no token."
    )
    hidden: float = Field(0.0, ge=0, le=LARGEST, description="Seconds beside generation.")
