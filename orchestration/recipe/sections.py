"""The sections of a recipe and their keys, with types, ranges and meanings.

Relations between keys are checked in :mod:`orchestration.recipe.checks`."""

from __future__ import annotations

import ssl
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler

from orchestration.recipe.bounds import LARGEST
from orchestration.recipe.values import (
    Betas,
    Count,
    CountOrZero,
    Device,
    Groups,
    Seconds,
    Size,
    SizeOrZero,
    Steps,
    StepsOrZero,
    Tokens,
    TokensOrZero,
    size_from,
)
from stages.algorithms.grpo import GRPO
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.registry import BUILT_IN, Side
from stages.json_schema import only_where, schema_of, unit

INDEX_SCHEMES = ("redis://", "rediss://", "unix://")
DEVICE_MEANING = (
    "`auto`: the accelerator that torch finds, else the CPU. A number chooses one of several devices: `cuda:1`. `npu` needs "
    "torch_npu."
)


def _index_url(value: object) -> object:
    if isinstance(value, str) and value != "embedded" and not value.startswith(INDEX_SCHEMES):
        raise ValueError("not an index; use 'embedded', or a URL that begins with redis://, rediss:// or unix://")
    return value


class Section(BaseModel):
    """A table of the recipe. Each key's meaning is its field's description: JSON Schema, OpenAPI and docs/recipe.md have it
    from there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model that is trained."""

    source: str = Field(
        min_length=1,
        description="`smollm2`, `tiny`, `mock`, or the path of a folder with a Hugging Face checkpoint.",
        examples=["smollm2", "models/my-model"],
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Number format of the weights. See also `train.precision`."
    )


class VllmSection(Section):
    """Settings of `rollout.engine = "vllm"` beside those of `rollout`."""

    max_model_len: Tokens | None = Field(
        default=None, description="Longest prompt with its response. Default: what the model's configuration allows."
    )
    block_size: Tokens | None = Field(
        default=None,
        description="Tokens of one block of the KV cache; a group shares its prompt in whole blocks. Default: vLLM's.",
    )
    kv_cache_bytes: Size | None = Field(
        default=None,
        description="Memory of the KV cache. Without it vLLM takes `gpu_memory_utilization` of its device.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of the device's memory that vLLM may use in all."
    )
    enforce_eager: bool = Field(
        default=False, description="Run without compiling the model: a faster start, slower tokens."
    )
    tensor_parallel: Count = Field(default=1, description="Devices that one engine shares its matrices between.")
    pause: Literal["keep", "abort"] = Field(
        default="keep",
        description="Responses in flight when weights arrive: `keep` holds them and continues them, `abort` ends them, and "
        "they are continued as new requests.",
    )
    kv_cache: Literal["keep", "rebuild"] = Field(
        default="keep", description="KV cache of those responses: kept, or computed again with the new weights."
    )


def _no_options(side: Side) -> ConfigDict:
    """The built-in engines take no options: a section's JSON Schema says so."""
    built_in: Any = {"properties": {"engine": {"enum": list(BUILT_IN[side])}}}
    return ConfigDict(json_schema_extra={"if": built_in, "then": {"properties": {"options": {"maxProperties": 0}}}})


class RolloutSection(Section):
    """Generation of responses."""

    model_config = _no_options("rollout")

    engine: str = Field(
        default="torch",
        min_length=1,
        examples=["torch", "vllm", "mock", "my_engines:fast"],
        description="`torch`, `vllm`, `mock`, an engine that an installed package registers, or `module:factory`.",
    )
    options: dict[str, Any] = Field(
        default={}, description="Keyword arguments of the engine's factory. The built-in engines take none."
    )
    device: Device = Field(default="auto", description=DEVICE_MEANING)
    workers: Count = Field(default=1, description="Rollout engines (replicas), a process each.")
    max_rows: Annotated[int, Field(ge=1), unit("responses")] = Field(
        default=32, description="Responses that one worker decodes at the same time."
    )
    max_tokens: Tokens = Field(default=64, description="Longest response. A longer one is cut there: `truncated`.")
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature of training responses, which must differ within a group."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling: probability mass kept. 1.0: all.")
    top_k: TokensOrZero = Field(default=0, description="Sample from the so many likeliest tokens. 0: all.")
    stop: list[str] = Field(
        default=[], max_length=64, description="A response ends once it contains one of these texts."
    )
    budget: TokensOrZero = Field(
        default=0,
        description="Tokens of a response in one visit to an engine; then it is parked, and the next free worker continues "
        "it. 0: no limit.",
    )
    on_update: Literal["keep", "cut"] = Field(
        default="keep",
        description="Responses in flight when weights arrive: `keep` continues them with the KV cache they have, `cut` "
        "parks them and continues them with a new one.",
    )
    threads: CountOrZero = Field(default=0, description="CPU threads of one worker. 0: shared out by the launcher.")
    vllm: VllmSection = VllmSection()
    mock: Annotated[dict[str, Any], schema_of(MockRolloutOptions)] = Field(
        default_factory=dict, description='Latency model of `engine = "mock"`.'
    )


class RewardFunction(Section):
    """One reward function and its weight."""

    name: str = Field(
        min_length=1,
        description="A reward of the package (`arithmetic`, `exact_number`, `reasoning_gym`, `spelling`), one that an "
        "installed package registers, or `module:function`.",
        examples=["arithmetic", "my_rewards:brevity"],
    )
    weight: float = Field(default=1.0, description="Factor of its score in the sample's reward, which is the sum.")


class RewardSection(Section):
    """Scoring of responses."""

    functions: list[RewardFunction] = Field(
        min_length=1, max_length=64, description="Reward functions; their weighted scores add up."
    )
    workers: Count = Field(default=1, description="Reward controllers, which score at the same time.")


class AlgorithmSection(Section):
    """What is learned from the rewards."""

    name: str = Field(
        default="grpo",
        description="`grpo`, an algorithm that an installed package registers, or `module:Class`.",
        examples=["grpo", "my_algorithms:Reinforce"],
    )
    group_size: Annotated[int, Field(ge=1), unit("responses")] = Field(
        default=8, description="Responses to each prompt (N), which are compared with one another."
    )
    options: Annotated[dict[str, Any], schema_of(GRPO | dict[str, Any])] = Field(
        default_factory=dict, description="Arguments of the algorithm's class; those of `grpo` follow."
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return only_where({"name": "grpo"}, "options", core, handler)


class TrainSection(Section):
    """The optimizer steps."""

    model_config = _no_options("train")

    engine: str = Field(
        default="torch",
        min_length=1,
        examples=["torch", "mock", "my_engines:trainer"],
        description="`torch`, `mock`, an engine that an installed package registers, or `module:factory`.",
    )
    options: dict[str, Any] = Field(
        default={}, description="Keyword arguments of the engine's factory. The built-in engines take none."
    )
    device: Device = Field(default="auto", description=DEVICE_MEANING)
    dp: Count = Field(
        default=1, description="Data-parallel ranks: they share out a step's rows, and each layer's weights (FSDP2)."
    )
    tp: Count = Field(default=1, description="Tensor-parallel ranks: they cut each replica's matrices between them.")
    precision: Literal["model", "mixed"] = Field(
        default="model",
        description="`model`: weights, gradients and optimizer state in `model.dtype`. `mixed`: those in float32, and "
        "compute in `model.dtype`.",
    )
    steps: Steps = Field(description="Optimizer steps of the whole run.")
    groups_per_step: Groups = Field(default=4, description="Prompts of one optimizer step (P), each with its group.")
    learning_rate: float = Field(default=1e-5, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after the warm-up: constant, or down to 0 at the last step."
    )
    warmup_steps: StepsOrZero = Field(default=0, description="Steps in which the learning rate rises from 0.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of AdamW.")
    betas: Betas = Field(default=(0.9, 0.95), description="Decay rates of AdamW's two moments.")
    grad_clip: float = Field(
        default=1.0, gt=0, description="Largest norm of the gradient; a larger one is scaled down."
    )
    token_budget: Tokens = Field(
        default=8192, description="Tokens of one forward and backward pass of one rank (a micro-batch)."
    )
    activation_checkpointing: bool = Field(
        default=False, description="Compute activations again in the backward pass instead of keeping them."
    )
    threads: CountOrZero = Field(default=0, description="CPU threads of one rank. 0: shared out by the launcher.")
    mock: Annotated[dict[str, Any], schema_of(MockTrainOptions)] = Field(
        default_factory=dict, description='Latency model of `engine = "mock"`.'
    )

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.dp * self.tp


TLS_FILES = ("tls_certificate", "tls_key", "tls_authority")


class PipelineSection(Section):
    """The sample flow: staleness, memory, index, warehouses."""

    staleness: Annotated[int, Field(ge=0), unit("versions")] = Field(
        default=1,
        description="Staleness bound (η): versions by which a sample's oldest token may be behind when it is trained. 0: "
        "the synchronous run, bit for bit.",
    )
    window: Groups = Field(
        default=1,
        description="Groups within which a later one may pass a straggler (W). 1: strictly in admission order.",
    )
    arena: Size = Field(default=64 * 2**20, description="Shared memory for the samples' bytes, on each node.")
    lease_seconds: Seconds = Field(
        default=60.0,
        description="A worker's claim ends so long after its last sign of life; its rows are delivered again.",
    )
    keep_samples: SizeOrZero = Field(
        default=64 * 2**20, description="Disk space for the texts of the newest samples. 0: none are kept."
    )
    index: Annotated[str, BeforeValidator(_index_url)] = Field(
        default="embedded",
        json_schema_extra={"pattern": f"^(embedded$|{'|'.join(INDEX_SCHEMES)})"},
        description="`embedded`: a Valkey server of the run's own; or the `redis://`, `rediss://` or `unix://` URL of one.",
    )
    serve: str = Field(
        default="", description="Address on which other nodes reach the warehouse. Empty: it is not served."
    )
    tls_certificate: str = Field(default="", description="PEM file of the warehouse's certificate. With it: TLS.")
    tls_key: str = Field(default="", description="PEM file of its private key.")
    tls_authority: str = Field(
        default="", description="PEM file that the other nodes' certificates are checked against."
    )

    def tls_contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        """A server's and a client's context; None without TLS. Raises OSError (ssl.SSLError) for files that do not fit."""
        if not self.tls_certificate:
            return None
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(self.tls_certificate, self.tls_key)
        return server, ssl.create_default_context(cafile=self.tls_authority)


class SyncSection(Section):
    """How rollout engines take new weights."""

    transport: Literal["shared_memory", "collective"] = Field(
        default="shared_memory",
        description="`shared_memory`: engines read the trainer's memory on the same node. `collective`: bytes travel by "
        "torch.distributed, where trainer and engines have devices or nodes of their own.",
    )
    serve: str = Field(
        default="127.0.0.1", min_length=1, description='Address of the trainer\'s node, for `transport = "collective"`.'
    )
    rolling: bool = Field(
        default=True,
        description="Several replicas swap one after the other, so that generation never stops as a whole.",
    )
    prefetch: bool = Field(
        default=True,
        description="In a colocated run: training's memory comes back as soon as nothing is left to generate, not only when "
        "a batch is claimed.",
    )
    bucket: Annotated[int, size_from(1024), Field(ge=1024, le=LARGEST), unit("bytes")] = Field(
        default=4 * 2**20,
        description="In a colocated run: each of the two buffers through which ranks exchange weights.",
    )
    probe: bool = Field(
        default=True,
        description="After a swap, before its next token, the engine scores a few rows of the batches just trained; their "
        "tokens' logprobs must be the trainer's, within the two limits below.",
    )
    probe_tolerance: float = Field(
        default=0.0,
        ge=0,
        description="Largest difference of a probed logprob: of 95 of 100 tokens, in float32 of every token. 0: by "
        "model.dtype, 0.001 in float32; in bfloat16 6 * 2**-8 * sqrt(layers) * the standard deviation of the probed "
        "logprobs (at least 1). `asyncdock resume` may change it.",
    )
    probe_mean_tolerance: float = Field(
        default=0.0,
        ge=0,
        description="Largest mean of the differences of all probed logprobs. 0: a quarter of the limit above. "
        "`asyncdock resume` may change it.",
    )
    timeout: Seconds = Field(default=120.0, description="Longest time that reading or loading a version may take.")


class EvaluateSection(Section):
    """Evaluation: held-out prompts, answered greedily beside training."""

    every: StepsOrZero = Field(default=0, description="Steps between two evaluations. 0: none.")
    prompts: Annotated[int, Field(ge=1), unit("prompts")] = Field(
        default=32, description="The first so many held-out prompts are answered."
    )
    samples: Annotated[int, Field(ge=0), unit("prompts")] = Field(
        default=4, description="So many of them are shown with their responses."
    )


class CheckpointSection(Section):
    """Checkpoints. Rows of trained steps stay in the arena until one covers them."""

    every: Steps = Field(default=20, description="Steps between two checkpoints.")
    keep: Annotated[int, Field(ge=1), unit("checkpoints")] = Field(
        default=2, description="The newest so many are kept."
    )


class LaunchSection(Section):
    """Worker processes."""

    launcher: Literal["process", "inline"] = Field(
        default="process", description="`process`: a process for each worker. `inline`: all in one process, to debug."
    )
    start_method: Literal["forkserver", "spawn"] = Field(
        default="forkserver",
        description="`forkserver`: workers are forked from a process that has imported everything (Linux only). `spawn`: "
        "each starts from nothing.",
    )
    placement: Literal["separate", "colocated"] = Field(
        default="separate",
        description="`separate`: rollout engines have workers of their own. `colocated`: each rank of the train engine has "
        "a rollout engine too, and they take turns on its device; `rollout.workers` then follows from the ranks.",
    )
    max_restarts: Annotated[int, Field(ge=0), unit("restarts")] = Field(
        default=3, description="Restarts of dead workers in one run; after the last one the run fails."
    )
    startup_timeout: Seconds = Field(default=300.0, description="Longest time until all workers are ready.")
    stop_timeout: Seconds = Field(
        default=60.0,
        description="Time that workers have, when the run is stopped, to finish what they hold, and the trainer to write a "
        "checkpoint.",
    )
    collective_timeout: Seconds = Field(
        default=300.0, description="Longest wait of a rank for another in a call that they make together."
    )


ExternalStage = Literal["rollout", "reward", "reference", "update"]


class ExternalSection(Section):
    """Stages that other programs do (docs/external.md)."""

    stages: list[ExternalStage] = Field(
        default=[],
        max_length=16,
        description="The run starts no workers for these: other programs join it and do them.",
    )
