"""Requests of Tinker's clients as JSON. Fields that are not read are ignored: SDKs of other versions
send some."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel

from orchestration.calls.interface import CheckpointKind, SaveOptions
from stages.calls.interface import AdamOptions, ModelOptions

LARGEST = 2**63 - 1
Integer = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Number = Annotated[int, Field(ge=0, le=LARGEST)]
Turn = Annotated[int, Field(ge=1, le=LARGEST)]
Named = Annotated[str, Field(min_length=1, max_length=300)]
Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$",
        description="Letters, digits, '_', '-' and '.': it is a part of a path.",
    ),
]
Seconds = Annotated[float, Field(gt=0, le=1e10)]
Metadata = dict[str, Any]


class Tolerant(BaseModel):
    """Base of requests."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class SessionBody(Tolerant):
    tags: list[str] = []
    user_metadata: Metadata | None = None
    display_name: str | None = Field(default=None, max_length=1000)


class OfSession(Tolerant):
    session_id: Named


class Ending(Tolerant):
    type: str = Field(default="success", max_length=100)


class FinishBody(Tolerant):
    reason: Ending = Ending()


class OfModel(Tolerant):
    model_id: Named


class Ordered(OfModel):
    """A call that has a number among those of its model."""

    seq_id: Turn


class Lora(Tolerant):
    rank: int = Field(default=32, ge=0, le=4096)
    seed: int | None = Field(default=None, ge=0, le=LARGEST)
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def options(self) -> ModelOptions:
        return ModelOptions(
            rank=self.rank,
            seed=self.seed or 0,
            attention=self.train_attn,
            mlp=self.train_mlp,
            head=self.train_unembed,
        )


class AdamW(Tolerant):
    type: Literal["adamw"] = "adamw"


class ModelBody(Tolerant):
    session_id: Named
    model_seq_id: Number = 0
    base_model: Named
    user_metadata: Metadata | None = None
    lora_config: Lora = Lora()
    optimizer_config: AdamW = AdamW()


class AdamBody(Tolerant):
    type: Literal["adam", "adamw"] = "adam"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class StepBody(Tolerant):
    adam_params: AdamBody = Field(
        AdamBody(),
        validation_alias=AliasChoices("adam_params", "optimizer_params", "optim_params"),
    )

    def options(self) -> AdamOptions:
        return AdamOptions(**self.adam_params.model_dump(exclude={"type"}))


class SaveBody(Tolerant):
    path: Name | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None

    def options(self, seq_id: int) -> SaveOptions:
        """Return it as the service takes it, as call ``seq_id`` of a model."""
        return SaveOptions(
            self.path or f"state-{seq_id}",
            ttl=self.ttl_seconds,
            overwrite=self.overwrite,
            metadata=self.user_metadata or {},
        )


class SaveExternalBody(Tolerant):
    path: Name
    ttl_seconds: Seconds | None = None
    age_encryption_recipients: list[str] | None = Field(
        default=None, max_length=0, description="Files are not encrypted here: leave it out."
    )

    def options(self, _: int) -> SaveOptions:
        return SaveOptions(self.path, ttl=self.ttl_seconds)


class SaveSamplerBody(SaveBody):
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"

    def options(self, seq_id: int) -> SaveOptions:
        number = self.sampling_session_seq_id
        name = self.path or (f"sampler-{seq_id}" if number is None else None)
        inflight = self.kind == "inflight"
        return replace(
            super().options(seq_id), name=name, number=number, inflight=inflight, overwrite=False
        )


class LoadBody(Tolerant):
    """Weights for a model that there is (``model_id``, ``seq_id``), or for a new one
    (``session_id``, ``model_seq_id``)."""

    model_id: Named | None = None
    seq_id: Turn = 1
    session_id: Named | None = None
    model_seq_id: Number = 0
    base_model: Named | None = None
    path: Named
    optimizer: bool = False
    user_metadata: Metadata | None = None
    optimizer_config: AdamW = AdamW()


class LossInput(Tolerant):
    name: str
    rank: int


class LossNode(Tolerant):
    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class LossGraph(Tolerant):
    format: Literal[1] = 1
    nodes: list[LossNode]


class LossBody(Tolerant):
    session_id: Named
    custom_loss_seq_id: Number = 0
    inputs: list[LossInput]
    graph: LossGraph


class OfPath(Tolerant):
    tinker_path: Named


class CopyBody(Tolerant):
    """For a model of a session (``session_id``, ``model_seq_id``), or else for one of its own."""

    source_path: Named
    session_id: Named | None = None
    model_seq_id: Number = 0
    ttl_seconds: Seconds | None = None


class CopyHeaders(Tolerant):
    key: str = Field(
        default="", max_length=300, pattern=r"^[\x21-\x7e]*$", alias="X-Idempotency-Key"
    )


class SamplerBody(Tolerant):
    session_id: Named
    sampling_session_seq_id: Number = 0
    base_model: Named | None = None
    model_path: Named | None = None


class OfSampler(Tolerant):
    sampling_session_id: Named


class OfRequest(Tolerant):
    request_id: Named


class Target(OfSampler):
    """The samples of a sampler, of one clone of a client's."""

    cloned_sampler_id: Number = 0


class CompletionsBody(Tolerant):
    target: Target
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None


class LifeBody(Tolerant):
    ttl_seconds: Seconds | None = None


class ModelPath(Tolerant):
    model: Named


class CheckpointPath(ModelPath):
    kind: CheckpointKind
    name: Name

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


class ExternalPath(CheckpointPath):
    kind: CheckpointKind = "external_weights"


class SessionPath(Tolerant):
    session: Named


class SequencePath(Tolerant):
    sequence: Named


class SamplerPath(Tolerant):
    sampler: Named


class ArchivePath(Tolerant):
    ticket: str = Field(pattern=r"^[A-Za-z0-9_-]{43}$")


class PageQuery(Tolerant):
    limit: int = Field(default=100, ge=1, le=1000)
    offset: int = Field(default=0, ge=0, le=LARGEST)


class StepsQuery(Tolerant):
    after: Number = 0


class Answer(RootModel[dict[str, Any]]):
    """An answer with the fields that the SDK's model of it has."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
