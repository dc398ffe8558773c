"""The service of training calls, as those who reach it from outside see it.

api ─▶ CallService.submit ─▶ recorded ─▶ acknowledged: a request's id ─▶ in the order of its model ─▶ the engine
       CallService.result ◀─ pending, an answer, or why there is none

Ids of sessions, models, samplers and requests are text. A model is SESSION:train:N, a sampler
SESSION:sample:N. ``owner``: the id of the token that asks; another owner's things do not exist for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from stages.calls.interface import (
    AdamOptions,
    Datum,
    LossOptions,
    ModelOptions,
    PassOutput,
    SampleOutput,
    SampleRequest,
    ServedBase,
)

Kind = Literal[
    "create_model", "load_weights", "forward", "forward_backward", "optim_step", "save_weights",
    "save_sampler", "save_external", "unload_model", "sample",
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
    save_external {path}; save_sampler {path} or {sampling_session_id}."""

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
    """A saved state. ``path``: tinker://MODEL/KIND/NAME."""

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


class CallService(Protocol):
    """Everything is asynchronous and may be repeated: the same session, numbers and kind give the
    same answer. Raises NotThere, Busy, and CallRefused for what can be said at once. Numbers
    (``seq_id``) order a model's calls; one that never comes holds the later ones up for a limited
    time."""

    @property
    def bases(self) -> Sequence[ServedBase]:
        """The base models that are served."""

    async def open_session(
        self,
        owner: str,
        *,
        tags: Sequence[str],
        metadata: Mapping[str, Any],
        display_name: str = "",
    ) -> str: ...

    async def heartbeat(self, owner: str, session_id: str) -> None: ...

    async def finish_session(self, owner: str, session_id: str, reason: str) -> None: ...

    async def create_model(
        self,
        owner: str,
        session_id: str,
        number: int,
        base: str,
        options: ModelOptions,
        metadata: Mapping[str, Any],
    ) -> Acknowledged: ...

    async def create_model_from(
        self,
        owner: str,
        session_id: str,
        number: int,
        path: str,
        *,
        optimizer: bool,
        metadata: Mapping[str, Any],
    ) -> Acknowledged: ...

    async def model(self, owner: str, model_id: str) -> ModelInfo: ...

    async def models(self, owner: str) -> Sequence[ModelInfo]: ...

    async def train(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        data: Sequence[Datum],
        loss: str,
        options: LossOptions,
        *,
        backward: bool,
    ) -> Acknowledged: ...

    async def optim_step(
        self, owner: str, model_id: str, seq_id: int, options: AdamOptions
    ) -> Acknowledged: ...

    async def save_weights(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        name: str,
        *,
        ttl: float | None,
        overwrite: bool,
        metadata: Mapping[str, str],
    ) -> Acknowledged: ...

    async def save_external(
        self, owner: str, model_id: str, seq_id: int, name: str, *, ttl: float | None
    ) -> Acknowledged:
        """Save weights for others than this service: see :meth:`exported`."""

    async def save_sampler(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        *,
        name: str | None,
        number: int | None,
        inflight: bool,
        ttl: float | None,
        metadata: Mapping[str, str],
    ) -> Acknowledged:
        """Save weights for sampling under ``name``, or open the session's sampler ``number`` on
        them; ``inflight``: it follows the later ones of such calls."""

    async def load_weights(
        self, owner: str, model_id: str, seq_id: int, path: str, *, optimizer: bool
    ) -> Acknowledged: ...

    async def refuse(
        self, owner: str, model_id: str, seq_id: int, kind: Kind, message: str
    ) -> Acknowledged:
        """Record a call that has failed before it could be made: so it is no gap."""

    async def unload_model(self, owner: str, model_id: str) -> Acknowledged: ...

    async def open_sampler(
        self, owner: str, session_id: str, number: int, *, base: str | None, path: str | None
    ) -> SamplerInfo: ...

    async def sampler(self, owner: str, sampler_id: str) -> SamplerInfo: ...

    async def sample(
        self, owner: str, sampler_id: str, seq_id: int, request: SampleRequest
    ) -> Acknowledged: ...

    async def result(self, owner: str, request_id: str, seconds: float) -> Done | Failed | None:
        """Return the answer to a request, or None when there is none within ``seconds``."""

    async def completions(
        self, owner: str, sampler_id: str, clone: int, cursor: int, seconds: float
    ) -> tuple[Sequence[Completion], int]:
        """Return the samples of a sampler that were answered after ``cursor`` (0: all), or none when
        there is none within ``seconds``, and the cursor after them. ``clone``: those with a
        ``seq_id`` of 10^9 · ``clone`` and more."""

    async def checkpoint(self, owner: str, path: str) -> CheckpointInfo: ...

    async def checkpoints(
        self, owner: str, model_id: str | None = None
    ) -> Sequence[CheckpointInfo]: ...

    async def delete_checkpoint(self, owner: str, path: str) -> None: ...

    async def expire_checkpoint(self, owner: str, path: str, ttl: float | None) -> None: ...

    async def copy_checkpoint(
        self,
        owner: str,
        path: str,
        *,
        session_id: str | None,
        number: int,
        ttl: float | None,
        key: str,
    ) -> CheckpointInfo:
        """Copy a checkpoint to a model that is not trained: ``number`` of the session, or of one of
        its own (None). The same owner and ``key`` give the same copy ("": each call another one)."""

    async def exported(self, owner: str, path: str) -> Mapping[str, str]:
        """Return the files of a checkpoint that others read, by their names in it: an adapter as peft
        has it, and a model as Hugging Face has it."""

    async def archive(self, owner: str, path: str) -> str:
        """Return the path of a .tar file with the checkpoint."""

    async def session(self, owner: str, session_id: str) -> SessionInfo: ...

    async def sessions(self, owner: str) -> Sequence[str]: ...

    async def ledger(self, owner: str, model_id: str) -> Mapping[str, Any]:
        """Return what a model has had: calls by kind and state, data, tokens, steps, staleness of
        the rows whose provenance is known, sampled sequences with their versions."""

    async def steps(self, owner: str, model_id: str, after: int) -> Sequence[Mapping[str, Any]]:
        """Return the optimizer steps of a model whose number is larger than ``after``, by the names
        of :data:`orchestration.calls.steps.FIELDS`. Of long runs older ones are thinned."""

    async def close(self) -> None: ...
