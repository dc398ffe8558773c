"""Events of a run's stream, as ``GET /v1/runs/{run}/metrics/stream`` sends them: the payload of each kind.

A number that is not finite is null. An event may hold more keys than are named here: those of a newer version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from api.schemas.runs import State

Number = float | None
Worker = Annotated[str, Field(description="As rollout-0; external ones as external-rollout-NAME.")]
Version = Annotated[int, Field(description="Policy version.")]
Time = Annotated[float, Field(description="Unix seconds.")]
Seconds = Annotated[Number, Field(description="Seconds.")]


class EventData(BaseModel):
    """Base of the payloads."""

    model_config = ConfigDict(extra="allow")

    time: Time


class StateEvent(EventData):
    """The run's state has changed."""

    state: State
    reason: str = Field(description="Why it failed or stopped; empty where there is nothing to say.")


class StepEvent(EventData):
    """An optimizer step was made. Further numbers are the algorithm's and the engine's own metrics."""

    __pydantic_extra__: dict[str, Number] = Field(init=False)

    step: int = Field(description="From 0.")
    version: int = Field(description="Policy version that the step made.")
    rows: int = Field(description="Samples trained.")
    groups: list[int] = Field(description="Numbers of their groups.")
    loss: Number = None
    reward_mean: Number
    reward_std: Number = None
    staleness_mean: Number = Field(default=None, description="Versions.")
    staleness_p95: Number = Field(default=None, description="Versions.")
    staleness_max: Number = Field(default=None, description="Versions.")
    response_length_mean: Number = Field(default=None, description="Tokens.")
    tokens_generated: int = Field(default=0, description="Since the run's beginning.")
    tokens_trained: int = Field(default=0, description="Since the run's beginning.")
    tokens_filtered: int = Field(default=0, description="Since the run's beginning.")
    seconds: Seconds = None
    train_seconds: Seconds = None


class Answer(BaseModel):
    """A held-out prompt and its greedy response."""

    prompt: str
    response: str
    reward: Number


class EvaluationEvent(EventData):
    """Held-out prompts were answered by one version."""

    version: Version
    step: int = Field(description="Steps that had been made.")
    count: int = Field(description="Prompts.")
    reward_mean: Number
    samples: list[Answer] = []


class LedgerEvent(EventData):
    """Samples and tokens since the run's beginning: generated = trained + filtered + remade + in flight."""

    generated: int
    trained: int
    filtered: int
    remade: int
    in_flight: int
    redelivered: int = Field(default=0, description="Rows that came back from a lease that had ended.")
    generated_tokens: int
    trained_tokens: int
    filtered_tokens: int
    remade_tokens: int
    in_flight_tokens: int


class StageEvent(EventData):
    """A worker's share in a stage since its process began. Seconds; the four shares add up to `wall`."""

    stage: str
    worker: Worker
    busy: Seconds
    waiting_input: Seconds
    waiting_room: Seconds
    other: Seconds
    wall: Seconds
    rows: int
    tokens: int
    parked: int = Field(default=0, description="Responses put aside to be continued.")
    queue_depth: int = Field(description="Rows, or groups, that wait for the stage.")
    in_flight: int = Field(description="Rows that the worker holds.")


class Span(BaseModel):
    """Something that a worker did."""

    name: str
    start: Time
    seconds: float
    rows: int = 0
    version: int | None = None


class SpanEvent(EventData):
    """What a worker did since its last event of this kind: the longest of it."""

    stage: str
    worker: Worker
    spans: list[Span]
    left_out: int = Field(description="Shorter ones that are left out.")


class SyncEvent(EventData):
    """Weights were published, loaded by an engine, or moved between ranks."""

    worker: Worker
    version: Version
    bytes: int
    publish_seconds: Seconds = None
    exposed_seconds: Seconds = Field(default=None, description="In which the engine made no token.")
    hidden_seconds: Seconds = Field(default=None, description="Beside generation.")
    to: str = Field(default="", description="In a colocated run: whose turn the weights were moved for.")
    gap_max: Number = Field(default=None, description="Largest difference of a probed logprob.")
    gap_q95: Number = Field(default=None, description="Their 95th percentile.")
    gap_mean: Number = None
    gap_k3: Number = None
    gap_tokens: Number = Field(default=None, description="Tokens probed.")
    gap_max_limit: Number = None
    gap_q95_limit: Number = None
    gap_mean_limit: Number = None
    released_bytes: int = Field(default=0, description="In a colocated run: of training's memory, moved to the host.")
    device_bytes: dict[str, int] = Field(default={}, description="In a colocated run: most on the device, by phase.")


class TurnEvent(EventData):
    """In a colocated run: training and generation have taken turns on a rank's device. Sizes in bytes."""

    worker: Worker
    phase: str
    version: Version
    device_bytes: int | None = Field(description="In use on the device.")
    generating_bytes: int = Field(default=0, description="In use on the device when generation ended.")
    cache_bytes: int = Field(default=0, description="Of them, the KV cache.")


class CheckpointEvent(EventData):
    """A checkpoint is whole."""

    version: Version
    path: str = Field(description="On the machine that runs it.")
    requested: bool = Field(description="Whether it was requested.")


class WorkerEvent(EventData):
    """Something befell a worker process."""

    stage: str
    worker: Worker
    change: str = Field(
        description="started, ready, stopped, died, restarted, kept its weights, taken over, rewound, …"
    )
    pid: int = 0
    reason: str = ""
    name: str = Field(default="", description="Of its present life.")


class PromptEvent(EventData):
    """Prompts that the run does not ask as they were given: one that another program put into it was left out, with its
    `position`; or some are too long, with how many were `skipped` and `cut` so far."""

    change: Literal["left out", "too long"]
    reason: str
    position: int | None = None
    skipped: int = 0
    cut: int = 0


class EndMessage(BaseModel):
    """The last message of a stream: the run has ended."""

    state: Literal["stopped", "finished", "failed"]
    reason: str


class DroppedMessage(BaseModel):
    """The last message of a stream that the server gives up: connect again with the last id as Last-Event-ID."""

    reason: str


EventKind = Literal[
    "state", "step", "evaluation", "ledger", "stage", "span", "sync", "turn", "checkpoint", "worker", "prompt"
]
EVENTS: dict[str, type[EventData]] = {
    "state": StateEvent,
    "step": StepEvent,
    "evaluation": EvaluationEvent,
    "ledger": LedgerEvent,
    "stage": StageEvent,
    "span": SpanEvent,
    "sync": SyncEvent,
    "turn": TurnEvent,
    "checkpoint": CheckpointEvent,
    "worker": WorkerEvent,
    "prompt": PromptEvent,
}
MESSAGES: dict[str, type[BaseModel]] = {**EVENTS, "end": EndMessage, "dropped": DroppedMessage}  # by their `event`


def numbers_of(kind: str) -> list[str]:
    """The numbers that every event of ``kind`` may have, by their names."""
    return [
        name for name, field in EVENTS[kind].model_fields.items() if name != "time" and _is_number(field.annotation)
    ]


def _is_number(annotation: Any) -> bool:
    return get_origin(annotation) is not list and bool({int, float} & {annotation, *get_args(annotation)})
