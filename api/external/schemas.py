"""What the service interface's requests and answers are made of (docs/external.md)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from api.schemas.runs import RunPath, State
from api.server.operations import Strict
from orchestration.recipe.sections import ExternalStage

LARGEST = 2**53
MOST_ROWS = 4096


def _whole(value: object) -> object:
    """JSON has one kind of number: 3.0 is a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)  # stands after Field(…): what stands after it the JSON schema does not know how to say
Worker = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="The name that the worker goes by, its own and the same as long as it lives.",
    ),
]
Version = Annotated[int, Field(ge=0, le=LARGEST), Whole]
LeaseToken = Annotated[
    str,
    Field(
        pattern=r"^[0-9a-f]{32}$",
        description="A lease's token, as the claim answered it: 128 random bits, good for the bearer that claimed alone.",
    ),
]
Wait = Annotated[float, Field(ge=0, le=60, description="Seconds.")]
Lease = Annotated[float, Field(ge=0.1, le=3600, description="Seconds; by default pipeline.lease_seconds.")]


class PutPrompts(Strict):
    """``first``: the position of the first of them, from 0; null: after those that are there. ``last``: no more will come,
    and from now on they are asked again and again."""

    prompts: list[dict[str, Any]] = Field(
        max_length=MOST_ROWS, description="Rows with the prompt (a text or messages) and what the rewards need."
    )
    first: Version | None = None
    last: bool = False
    wait: Wait = 30.0


class FedView(BaseModel):
    next: int = Field(description="The next free position.")


class GetExperience(Strict):
    """``count``: rows for reward, groups for rollout and reference; a trainer gets one batch. ``version``: what a rollout
    has loaded; by default what it last said to weights/notify. ``replay``: a trainer that lost its state asks for a step's
    rows again, without a lease."""

    stage: ExternalStage
    worker: Worker
    count: Annotated[int, Field(ge=1, le=MOST_ROWS), Whole] = 1
    columns: list[Annotated[str, Field(max_length=64)]] = Field(
        [], max_length=31, description="By default those that the stage needs."
    )
    version: Version | None = None
    wait: Wait = 0.0
    lease: Lease | None = None
    replay: Version | None = None


class ExperienceRow(BaseModel):
    id: int = Field(description="What it is put by. No other row ever gets it.")
    group: int
    place: int = Field(description="In its group.")
    samples: int = Field(description="Rows of its group.")
    oldest_version: int = Field(description="Among its tokens; -1 before it is generated.")
    tokens: int
    seed: int = Field(description="Of its group: for who draws tokens by seed, place and position.")


class Begun(BaseModel):
    """Rows that were parked, and what they have so far; they go on from there."""

    rows: list[int]
    columns: dict[str, list[Any]] = {}


class ExperienceView(BaseModel):
    """``token`` is null when nothing came. As ``application/octet-stream`` it is a safetensors file, with this JSON under
    ``asyncdock`` in its metadata, and the columns as tensors."""

    token: str | None
    stage: ExternalStage
    lease: float
    state: State
    reason: str
    over: bool = Field(description="Nothing will come any more.")
    published: int
    trained: int
    sampling: dict[str, Any] | None = Field(default=None, description="How a rollout draws tokens.")
    rows: list[ExperienceRow] = []
    columns: dict[str, list[Any]] = {}
    begun: Begun | None = None


Metric = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}$")]


class PutExperience(Strict):
    """``rows`` are ids that the lease holds, ``columns`` what its stage makes of them. A trainer gives ``step`` (what
    ``trained`` was when it got the batch) and ``metrics`` instead."""

    token: LeaseToken
    rows: list[Version] = Field([], max_length=MOST_ROWS)
    columns: dict[str, list[Any]] = Field({}, max_length=31)
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
    after: int = Field(-1, ge=-1, le=LARGEST, description="The version that the asker has.")
    wait: Wait = 0.0


class TensorView(BaseModel):
    name: str
    dtype: str
    shape: list[int]
    offset: int = Field(description="Its first byte at the local path.")


class LocalWeights(BaseModel):
    """Where a worker on the same machine can map the bytes. A version's are overwritten when two newer ones are published:
    check each bucket after copying it."""

    node: str
    path: str
    buckets: list[tuple[int, int, str]] = Field(description="Offset, bytes and xxh3-64 of each.")


class WeightsView(BaseModel):
    """``version`` is null when none is newer."""

    version: int | None
    state: State
    bytes: int
    tensors: list[TensorView]
    local: LocalWeights | None


class PublishQuery(Strict):
    covered: Version = Field(0, description="The trainer's own checkpoint covers the steps below.")


class Notify(Strict):
    worker: Worker
    version: Version
    exposed: float = Field(0.0, ge=0, le=LARGEST, description="Seconds in which it could make no token.")
    hidden: float = Field(0.0, ge=0, le=LARGEST, description="Seconds that it took beside generation.")
