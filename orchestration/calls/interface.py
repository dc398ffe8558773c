"""What the service of training calls takes and gives.

api ─▶ Service.train, … ─▶ recorded ─▶ acknowledged: a request's id ─▶ in the order of its model ─▶ the engine
       Service.result   ◀─ pending, an answer, or why there is none

Ids of sessions, models, samplers, losses and requests are text. A model is SESSION:train:N, a sampler
SESSION:sample:N, a client's loss SESSION:loss:N. ``owner``: the id of the token that asks; another
owner's things do not exist for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stages.calls.interface import ModelOptions, PassOutput, SampleOutput

Kind = Literal[
    "create_model", "load_weights", "forward", "forward_backward", "optim_step", "save_weights",
    "save_sampler", "save_external", "unload_model", "sample", "create_custom_loss",
]  # fmt: skip
CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


class NotThere(LookupError):
    """No such session, model, sampler, request or checkpoint, for this owner."""


class Gone(NotThere):
    """There was such a request: its answer has been read and forgotten."""


class Busy(RuntimeError):
    """A limit is reached; the client is to try again. ``seconds``: after which time."""

    def __init__(self, message: str, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True)
class CallOptions:
    """The limits of a service."""

    waiting_requests: int = 4096
    """Of an owner, recorded and not answered."""
    waiting_bytes: int = 1 << 30
    """Of an owner's calls that wait."""
    owner_requests: int = 1_000_000
    """Of an owner, answered or not, until they are forgotten: each takes about 1.2 KB of memory."""
    call_bytes: int = 256 << 20
    """Of one call."""
    owner_sessions: int = 256
    """Of an owner, not finished and not silent."""
    finished_sessions: int = 256
    """Of an owner; beyond, the oldest are removed with all that is known of their models, once no
    answer of them is kept. Checkpoints stay."""
    owner_models: int = 256
    """Of an owner, in sessions that are not finished."""
    loaded_models: int = 16
    """On one base; the one used the longest time ago is unloaded, and rebuilt on its next call."""
    loaded_bytes: int = 16 << 30
    """Of their weights, gradients and moments: how many models of rank 0 fit."""
    loaded_adapters: int = 64
    """Weights of samplers that an engine has at once."""
    gap_seconds: float = 10.0
    """For which later calls wait for a missing one; then they go on, as if it had failed. Clients
    whose calls overtake each other send one again for up to five minutes."""
    silent_seconds: float = 600.0
    """Without a heartbeat, after which a session's models are unloaded."""
    answer_seconds: float = 600.0
    """For which an answer is kept after it was read."""
    unread_seconds: float = 86400.0
    """For which an answer is kept that nobody reads."""
    state_steps: int = 64
    """Optimizer steps after which a model's state is saved, and its calls are removed."""
    state_bytes: int = 512 << 20
    """Bytes of calls after which its state is saved at the next step."""
    merged_checkpoints: bool = True
    """Checkpoints have the model merged with its adapter too, which recipes begin with."""
    kept_snapshots: int = 64
    """Samplers of a session that have weights of their own; beyond, those are removed that were not
    used for ``snapshot_seconds``."""
    snapshot_seconds: float = 3600.0
    restarts: int = 5
    """Starts of an engine that fail one after the other, after which it counts as down."""
    attempts: int = 3
    """At a call during which the engine ends, after which the call has failed."""


@dataclass(frozen=True)
class SaveOptions:
    """Of weights that are saved as ``name``, or open sampler ``number`` of the session. ``inflight``:
    that sampler follows the later ones of such calls. ``ttl``: seconds until they expire."""

    name: str | None
    number: int | None = None
    inflight: bool = False
    ttl: float | None = None
    overwrite: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """A request that has failed for good. ``by_client``: because of what it asked for."""

    message: str
    by_client: bool
    again: bool = False
    """Nothing was done, and the same request may succeed: the engine's process has ended."""


@dataclass(frozen=True)
class Done:
    """A request that was served. ``value``: by its kind PassOutput, SampleOutput, or a dict of JSON:
    create_model, load_weights, unload_model {model_id}; optim_step {metrics}; save_weights,
    save_external {path}; save_sampler {path} or {sampling_session_id}; create_custom_loss
    {loss_id}."""

    kind: Kind
    value: PassOutput | SampleOutput | Mapping[str, Any]


@dataclass(frozen=True)
class Acknowledged:
    """A request that is recorded. ``sequence_ids``: of a sample, one for each response."""

    request_id: str
    model_id: str = ""
    sequence_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A sample that has an answer, of about so many ``bytes``."""

    request_id: str
    succeeded: bool
    bytes: int


@dataclass(frozen=True)
class ModelInfo:
    model_id: str
    base: str
    """The name of the base model."""
    options: ModelOptions
    architecture: str = ""
    tokenizer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    last_request: float = 0.0
    """Seconds since 1970."""
    failed: bool = False
    steps: int = 0
    """Optimizer steps of its weights."""
    waiting: int = 0
    """Calls without an answer."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A saved state. ``path``: tinker://MODEL/KIND/NAME; ``expires``: seconds since 1970; ``public``:
    all owners may read it."""

    path: str
    model_id: str
    kind: CheckpointKind
    name: str
    time: float
    bytes: int
    options: ModelOptions
    base: str
    expires: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    public: bool = False


@dataclass(frozen=True)
class SamplerInfo:
    sampler_id: str
    base: str
    path: str | None = None


@dataclass(frozen=True)
class SessionInfo:
    session_id: str
    models: Sequence[str]
    samplers: Sequence[str]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    display_name: str = ""
