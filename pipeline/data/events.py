"""Events of a run: one frozen dataclass for each kind, and their form on the wire.

    StageEvent(…) ── Index.emit ──▶ the run's stream ──▶ Event(id, time, kind, data) ── decode ──▶ StageEvent(…)
                     (wire, time)                          └──▶ metrics.jsonl, server-sent events: ``data`` as it is

A field that has its default value is not sent, and a kind or a field that this version does not
know is ignored on decoding. A number that is not finite is null in JSON, so a decoded measurement
may be None.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, dataclass_transform

Kind = Literal[
    "state",
    "step",
    "evaluation",
    "ledger",
    "stage",
    "span",
    "sync",
    "turn",
    "checkpoint",
    "worker",
    "prompt",
    "alarm",
    "forecast",
]
RunState = Literal[
    "created", "starting", "running", "paused", "stopping", "stopped", "finished", "failed"
]
LIVE: tuple[RunState, ...] = ("starting", "running", "paused")
ENDED: tuple[RunState, ...] = ("finished", "stopped", "failed")


class Doc:
    """Description of a field, inside ``Annotated``; the OpenAPI document shows it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "description": self.text}


Number = float | None
Worker = Annotated[str, Doc("As rollout-0; external ones as external-rollout-NAME.")]
Version = Annotated[int, Doc("Policy version.")]
Time = Annotated[float, Doc("Unix seconds.")]
Seconds = Annotated[Number, Doc("Seconds.")]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Payload:
    """Base of events' data. Subclasses are frozen dataclasses with a form on the wire."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    @cache
    def defaults(cls) -> tuple[tuple[str, Any], ...]:
        """Return the names and defaults of the fields; ``dataclasses.MISSING`` where there is no
        default."""
        return tuple(
            (
                field.name,
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory(),
            )
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        )

    def wire(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain values."""
        sent: dict[str, Any] = {}
        for name, default in self.defaults():
            value = getattr(self, name)
            if value != default:
                sent[name] = [item.wire() for item in value] if name in _NESTED else value
        return sent

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Return the payload that was sent as ``data``.

        A field without default that an older version did not send is None.
        """
        known = {
            name: data.get(name)
            for name, default in cls.defaults()
            if name in data or default is dataclasses.MISSING
        }
        for name in _NESTED.keys() & known.keys():
            known[name] = [_NESTED[name].of(item) for item in known[name] or ()]
        return cls(**known)


class EventData(Payload):
    """Base of the payloads of events. ``kind``: the event's name in streams and files."""

    kind: ClassVar[Kind]

    def __init_subclass__(cls, kind: Kind) -> None:
        super().__init_subclass__()
        cls.kind = kind


class StateEvent(EventData, kind="state"):
    """The run's state has changed."""

    state: RunState
    reason: Annotated[str, Doc("Why it failed or stopped; empty where there is nothing to say.")]


class StepEvent(EventData, kind="step"):
    """An optimizer step was made. Further numbers are the algorithm's and the engine's own
    metrics."""

    step: Annotated[int, Doc("From 1.")]
    version: Annotated[int, Doc("Policy version that the step made: its number.")]
    rows: Annotated[int, Doc("Samples trained.")]
    groups: Annotated[list[int], Doc("Numbers of their groups.")]
    loss: Number = None
    reward_mean: Annotated[Number, Doc("Of the rows that have a reward; null where none has.")]
    reward_std: Number = None
    reward_failed: Annotated[
        int, Doc("Rows on which a reward function failed; they are in no mean.")
    ] = 0
    reward_absent: Annotated[
        int, Doc("Rows to which no reward function applies; they are in no mean.")
    ] = 0
    staleness_mean: Annotated[Number, Doc("Versions.")] = None
    staleness_p95: Annotated[Number, Doc("Versions.")] = None
    staleness_max: Annotated[Number, Doc("Versions.")] = None
    response_length_mean: Annotated[Number, Doc("Tokens.")] = None
    tokens_generated: Annotated[int, Doc("Since the run's beginning.")]
    tokens_trained: Annotated[int, Doc("Since the run's beginning.")]
    tokens_filtered: Annotated[int, Doc("Since the run's beginning.")]
    seconds: Seconds = None
    train_seconds: Seconds = None
    train_cpu_share: Annotated[
        Number,
        Doc(
            "Part of its time in which the thread that trains had a core: below 1 it waited for "
            "one, or a device."
        ),
    ] = None
    predicted_seconds: Annotated[
        Number, Doc("Seconds that a simulation with the costs of earlier steps says.")
    ] = None
    predicted_staleness: Annotated[Number, Doc("Mean staleness that it says, in versions.")] = None
    skipped: Annotated[
        str, Doc("Why no step was taken: its loss or gradient was not finite. The weights stay.")
    ] = ""
    rewards: Annotated[
        Mapping[str, Mapping[str, Number]],
        Doc(
            "By reward function: `mean` and `std` of its scores of these rows; and of all its "
            "calls since the step before what `stage` events have in `calls`. Of several "
            "functions, within groups: `share`, the part of the reward's variance that it makes, "
            "and `correlation` with the rest of the reward."
        ),
    ] = field(default_factory=dict)
    metrics: Mapping[str, Number] = field(default_factory=dict)  # sent beside the fields above

    def wire(self) -> dict[str, Any]:
        sent = super().wire()
        # no metric of that name takes its place
        return {**sent.pop("metrics", {}), "rewards": self.rewards, **sent}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        names = {name for name, _ in cls.defaults()}
        return super().of(
            {**data, "metrics": {name: value for name, value in data.items() if name not in names}}
        )


class Answer(Payload):
    """A held-out prompt and its greedy response; of several turns, a line for each speaker."""

    prompt: str
    response: str
    reward: Annotated[Number, Doc("Null where a reward function failed, or none applies.")]


class EvaluationEvent(EventData, kind="evaluation"):
    """Held-out prompts were answered by one version."""

    version: Version
    step: Annotated[int, Doc("Steps that had been made.")]
    count: Annotated[int, Doc("Answers that have a reward.")]
    failed: Annotated[
        int, Doc("Answers on which a reward function or their environment failed; in no mean.")
    ] = 0
    absent: Annotated[
        int, Doc("Answers to which no reward function applies; they are in no mean.")
    ] = 0
    reason: Annotated[
        str, Doc("Why an environment failed first, or, first in this run, a reward function.")
    ] = ""
    reward_mean: Annotated[Number, Doc("Of these `count` answers; null where there is none.")]
    functions: Annotated[
        Mapping[str, Number], Doc("Mean score of each reward function, where there are several.")
    ] = field(default_factory=dict)
    samples: Sequence[Answer]
    due: Annotated[
        int | None, Doc("The version that was due, when the engine had gone past it.")
    ] = None
    missed: Annotated[
        int, Doc("Due versions since the last evaluation that the engine has passed over.")
    ] = 0
    last_version: Annotated[int | None, Doc("The newest that gave an answer.")] = None
    seconds: Annotated[Number, Doc("From its beginning to the last answer.")] = None
    tokens: Annotated[int, Doc("Generated tokens of the answers.")] = 0
    share: Annotated[Number, Doc("Of the engine's rows that it took in that time, on average.")] = (
        None
    )


class LedgerEvent(EventData, kind="ledger"):
    """Samples and tokens since the run's beginning, and turns of trajectories: generated = trained +
    filtered + remade + in flight."""

    generated: int
    trained: int
    filtered: int
    remade: int
    in_flight: int
    redelivered: Annotated[int, Doc("Rows that came back from a lease that had ended.")]
    generated_tokens: int
    trained_tokens: int
    filtered_tokens: int
    remade_tokens: int
    in_flight_tokens: int
    generated_turns: int = 0
    trained_turns: int = 0
    filtered_turns: int = 0
    remade_turns: int = 0
    in_flight_turns: int = 0
    skipped_steps: Annotated[
        int, Doc("Steps that were skipped; their samples count as trained.")
    ] = 0
    spared_groups: Annotated[
        int,
        Doc(
            "Groups that were trained though they taught nothing: `algorithm.max_refill` let their "
            "step drop no more."
        ),
    ] = 0
    replayed: Annotated[
        int, Doc("Samples of earlier steps that were trained again, each time; in no sum.")
    ] = 0
    replayed_tokens: Annotated[int, Doc("Their tokens.")] = 0
    dropped: Annotated[Mapping[str, int], Doc("Groups that were dropped, by reason.")] = field(
        default_factory=dict
    )
    dropped_tokens: Annotated[Mapping[str, int], Doc("Filtered tokens, by reason.")] = field(
        default_factory=dict
    )
    version: Annotated[
        int | None, Doc("Policy version of the trainer; null from older programs.")
    ] = None


class StageEvent(EventData, kind="stage"):
    """A worker's share in a stage since its process began.

    Seconds; the four shares add up to `wall`.
    """

    stage: str
    worker: Worker
    busy: Seconds
    waiting_input: Seconds
    waiting_room: Seconds
    other: Seconds
    wall: Seconds
    rows: int
    tokens: int
    parked: Annotated[int, Doc("Responses put aside to be continued.")]
    queue_depth: Annotated[int, Doc("Rows, or groups, that wait for the stage.")]
    in_flight: Annotated[int, Doc("Rows that the worker holds.")]
    calls: Annotated[
        Mapping[str, Mapping[str, float]],
        Doc(
            "Of a reward stage, by function: the `responses` that it was to score, and those that "
            "were `lost`, as it could not; its `calls`, those that `failed`, those made `again`; "
            "the `seconds` inside it, and those that its calls `waited` before."
        ),
    ] = field(default_factory=dict)
    trajectories: Annotated[
        Mapping[str, float],
        Doc(
            "Of the environment stage: trajectories that are `open`; and so far `turns` that were "
            "answered, with their `generated_tokens`, and their `engine_seconds`, "
            "`waiting_seconds` and `environment_seconds`; `branches` that programs began as they "
            "went back; `calls` of tools and `failed_calls`; `observed_tokens`; trajectories that "
            "were `replayed` or `remade` as their environment was gone, and that ended: "
            "`ended_done` by their environment, `ended_turns` at `max_turns`, `ended_tokens` at "
            "`max_tokens`, `ended_truncated` with a turn that was cut, `ended_timeout`, "
            "`ended_failed` with the reward 0, `ended_dropped`. Of the rollout stage: "
            "`computed_again_tokens`, whose keys and values were gone when a turn began."
        ),
    ] = field(default_factory=dict)
    drafts: Annotated[
        Mapping[str, float],
        Doc(
            "Of a rollout worker whose engine makes drafts: `drafted_tokens` counts the tokens of "
            "its drafts so far, `held_tokens` those of them that were sampled."
        ),
    ] = field(default_factory=dict)


class Span(Payload):
    """One thing that a worker did, such as a claim, a swap or a publication."""

    name: str
    start: Time
    seconds: float
    rows: int = 0
    version: int | None = None


class SpanEvent(EventData, kind="span"):
    """What a worker did since its last event of this kind: the longest spans of it."""

    stage: str
    worker: Worker
    spans: Sequence[Span]
    left_out: Annotated[int, Doc("Shorter ones that are left out.")]


class SyncEvent(EventData, kind="sync"):
    """Weights were published, loaded by an engine, or moved between ranks."""

    worker: Worker
    version: Version
    bytes: int
    publish_seconds: Seconds = None
    exposed_seconds: Annotated[Number, Doc("In which the engine made no token.")] = None
    hidden_seconds: Annotated[Number, Doc("Beside generation.")] = None
    to: Annotated[
        str,
        Doc("In a colocated run: `generation` or `training`, which the weights were moved for."),
    ] = ""
    gap_max: Annotated[Number, Doc("Largest difference of a probed logprob.")] = None
    gap_q95: Annotated[Number, Doc("Their 95th percentile.")] = None
    gap_mean: Number = None
    gap_k3: Number = None
    gap_tokens: Annotated[Number, Doc("Tokens probed.")] = None
    gap_max_limit: Number = None
    gap_q95_limit: Number = None
    gap_k3_limit: Number = None
    gap_mean_limit: Number = None
    merged: Annotated[
        int,
        Doc(
            "Events that the run's file keeps as this one: seconds and bytes are sums, gaps "
            "the largest."
        ),
    ] = 1
    released_bytes: Annotated[
        int, Doc("In a colocated run: of training's memory, moved to the host.")
    ] = 0
    device_bytes: Annotated[
        dict[str, int], Doc("In a colocated run: most on the device, by phase.")
    ] = field(default_factory=dict)


class TurnEvent(EventData, kind="turn"):
    """In a colocated run: training and generation have taken turns on a rank's device.

    Sizes in bytes.
    """

    worker: Worker
    phase: str
    version: Version
    device_bytes: Annotated[int | None, Doc("In use on the device.")]
    generating_bytes: Annotated[int, Doc("In use on the device when generation ended.")] = 0
    cache_bytes: Annotated[int, Doc("Of them, the KV cache.")] = 0


class CheckpointEvent(EventData, kind="checkpoint"):
    """A checkpoint is whole."""

    version: Version
    path: Annotated[str, Doc("On the machine that runs it.")]
    requested: Annotated[bool, Doc("Whether it was requested.")]
    exposed_seconds: Annotated[Number, Doc("In which training waited: the copy of its state.")] = (
        0.0
    )
    seconds: Annotated[Number, Doc("Until it was whole, beside training.")] = 0.0


class WorkerEvent(EventData, kind="worker"):
    """A worker process has started, stopped, died, or met something else that `change` names."""

    stage: str
    worker: Worker
    change: Annotated[
        str,
        Doc("started, ready, stopped, died, restarted, absent, left, kept its weights, rewound, …"),
    ]
    pid: int = 0
    reason: str = ""
    name: Annotated[str, Doc("Of its present life.")] = ""
    version: Annotated[int | None, Doc("Policy version that a run was rewound to.")] = None
    node: Annotated[str, Doc("Name of the machine that it runs on; in `ready` events.")] = ""
    host: Annotated[
        str, Doc("Name of the host that has started it, or that it is; in `ready` events.")
    ] = ""


class PromptEvent(EventData, kind="prompt"):
    """Something about the run's prompts.

    One that another program put into it was left out, with its `position`; some are too long, with
    how many were `skipped` and `cut` so far; or an epoch of a source has begun, with the `epochs`
    of all.
    """

    change: Literal["left out", "too long", "epoch"]
    reason: str
    position: int | None = None
    skipped: int = 0
    cut: int = 0
    epochs: Annotated[
        Mapping[str, int],
        Doc("The epoch that each source is in, from 1, by its key in the recipe."),
    ] = field(default_factory=dict)


class ForecastEvent(EventData, kind="forecast"):
    """What the next steps will take, by a simulation with the costs of the last ones; and the
    staleness bound that this asks for, where the run decides it."""

    step: Annotated[int, Doc("The first one that it is about.")]
    version: Annotated[int, Doc("Policy version that it begins with.")]
    step_seconds: Seconds
    tokens_per_second: Annotated[Number, Doc("Response tokens trained.")]
    generation: Annotated[
        Number, Doc("Share of time in which the rollouts' decoding capacity is in use.")
    ]
    training: Annotated[Number, Doc("Share of time in which the trainer trains.")]
    staleness_mean: Annotated[Number, Doc("Versions.")]
    bound: Annotated[int, Doc("Staleness bound in use from now on, in versions.")]
    before: Annotated[int, Doc("Staleness bound until now.")]
    drift: Annotated[
        Number, Doc("Seconds of the last steps over those that were forecast, less 1.")
    ] = None
    reason: Annotated[
        str, Doc("A drift or a change of the bound, in words; empty where there is neither.")
    ] = ""


class AlarmEvent(EventData, kind="alarm"):
    """The guard has found something unusual. There is one event until the metric is usual again."""

    metric: Annotated[
        str,
        Doc(
            "A number of step events; or `probe_share`, `probe`, `tokenizer`, `dropped_groups`, "
            "`failed_environments`, `branches`."
        ),
    ]
    step: Annotated[int, Doc("Of a swap, the one that made its version. 0: before the first one.")]
    version: Annotated[int, Doc("Policy version that this step makes.")]
    value: Number
    usual: Annotated[Number, Doc("Median of the steps before.")] = None
    limit: Annotated[Number, Doc("That the value is past, where there is one.")] = None
    reason: Annotated[str, Doc("What is unusual.")]
    look: Annotated[str, Doc("What to look at.")]
    worker: Annotated[str, Doc("The worker that found it; empty: the guard.")] = ""


EVENTS: dict[str, type[EventData]] = {event.kind: event for event in EventData.__subclasses__()}
# fields that are lists of payloads
_NESTED: dict[str, type[Payload]] = {"samples": Answer, "spans": Span}


@dataclass(frozen=True)
class Event:
    """One entry of a run's event stream: ``time`` in Unix seconds, ``data`` the payload as it was
    sent, with steps that count from 1."""

    id: str
    time: float
    kind: str
    data: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.kind in ("step", "alarm", "forecast"):
            object.__setattr__(self, "data", _counted_from_1(self.kind, self.data))

    def decoded(self) -> EventData | None:
        """Return the payload as a dataclass; None for a kind that this version does not know."""
        kind = EVENTS.get(self.kind)
        return None if kind is None else kind.of(self.data)


def _counted_from_1(kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``data`` with its step counted from 1.

    Before 0.2 steps were counted from 0: such a step is 1 less than its version, and such an alarm
    or forecast has no version.
    """
    step = data.get("step")
    version = data.get("version")
    if not isinstance(step, int):
        return data
    if kind != "step" and version is None:
        return {**data, "step": step + 1, "version": step + (kind == "alarm")}
    return {**data, "step": version} if kind == "step" and version == step + 1 else data


def next_id(last: str) -> str:
    """Return an id of this moment that is greater than ``last``, as the index's server gives them.

    >>> next_id("99999999999999-7")
    '99999999999999-8'
    """
    milliseconds, number = order(last)
    now = int(time.time() * 1000)
    return f"{now}-0" if now > milliseconds else f"{milliseconds}-{number + 1}"


def order(event_id: str) -> tuple[int, int]:
    """Sort key of an event's id; "" is before all.

    >>> order("") < order("17-2") < order("17-10") < order("18")
    True
    """
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds or -1), int(number or 0)


def by_count(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return reasons and their counts, the greatest first."""
    return sorted(reasons.items(), key=lambda one: (-one[1], one[0]))
