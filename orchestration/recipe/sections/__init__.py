"""The sections of a recipe and their keys, with types, ranges and meanings.

Relations between keys are checked in :mod:`orchestration.recipe.checks`."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core.core_schema import union_schema

from orchestration.bounds import LARGEST
from orchestration.cluster_backends import CLUSTERS, ClusterBackend
from orchestration.recipe.sections.retired import GONE, RETIRED
from orchestration.recipe.sections.rewards import NETWORK, READ
from orchestration.recipe.sections.rewards import RewardSection as RewardSection
from orchestration.recipe.sections.structure import StructureSection
from orchestration.units import (
    AUTO_STALENESS,
    DEVICE_MEANING,
    INDEX_PATTERN,
    Betas,
    Count,
    CountOrZero,
    Device,
    Groups,
    IndexUrl,
    Seconds,
    Section,
    Size,
    SizeOrZero,
    Staleness,
    Steps,
    StepsOrZero,
    Tokens,
    TokensOrZero,
    auto_staleness,
    size_from,
)
from pipeline.node import AUTO
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.algorithms.registry import built_in
from stages.engines.bounds import LEAST, LEAST_TRAINED, MOST_TEMPERATURE
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.optimizers import OPTIMIZERS
from stages.engines.registry import BUILT_IN, Side
from stages.flow.catalogue import Truncated
from stages.json_schema import (
    CRITIC_IN_CHECKPOINT,
    FixedOnResume,
    IsCode,
    IsPath,
    fault,
    faults,
    key,
    only_where,
    schema_of,
    unit,
)
from stages.parallel.options import RankSizes, Strategies


class LoraSection(Section):
    """Low-rank adapters (LoRA) beside the linear layers of a frozen model: they alone are trained,
    published and swapped."""

    rank: CountOrZero = key(
        0,
        "Rank r of the product B·A that is added to a layer's weight. 0: no adapters, all "
        "weights are trained.",
    )
    alpha: float = key(32.0, "The product is multiplied by `alpha` / `rank`.", gt=0)
    targets: list[str] = key(
        [],
        "Linear layers with an adapter, by the ends of their names. Empty: all but the output "
        "head.",
        max_length=64,
        examples=[["q_proj", "v_proj"]],
    )


REFERENCES = FixedOnResume("rows under way, and the references on disk, go by it")


class ModelSection(Section):
    """The model that is trained."""

    source: Annotated[str, IsPath()] = key(
        ...,
        "`smollm2`, `tiny`, `tiny-moe`, `mock`, or the path of a folder with a Hugging Face "
        "checkpoint.",
        min_length=1,
        examples=["smollm2", "models/my-model"],
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "float32", "Number format of the weights. See also `train.precision`."
    )
    reference: Annotated[str | None, IsPath()] = key(
        None,
        "Checkpoint of the frozen model of `ref_logprobs`. Default: the model as the run begins.",
        min_length=1,
    )
    reference_every: Annotated[StepsOrZero, REFERENCES] = key(
        0,
        "The reference becomes the policy every so many steps (docs/stages.md). 0: it stays "
        "frozen.",
    )
    reference_mix: Annotated[float, Field(gt=0, le=1), REFERENCES] = key(
        1.0, "Share of the policy in a new reference; the rest is the reference before."
    )
    vocabulary: Literal["auto", "tokenizer", "model"] = key(
        "auto",
        "Tokens with a probability where an embedding is larger than its tokenizer "
        "(docs/engines.md).",
    )
    lora: LoraSection = LoraSection()


class VllmSection(Section):
    """Settings of `rollout.engine = "vllm"` beside those of `rollout`.

    Other keys are further arguments of vLLM's engine.
    """

    model_config = ConfigDict(extra="allow")

    max_model_len: Tokens | None = key(
        None,
        "Longest prompt with its response. Default: what the model's configuration allows; with "
        "longrope, the longest row that the recipe allows, by which all engines choose its "
        "factors.",
    )
    block_size: Tokens | None = key(
        None,
        "Tokens of one block of the KV cache; a group shares its prompt in whole blocks. "
        "Default: vLLM's.",
    )
    kv_cache_bytes: Size | None = key(
        None,
        "Memory of the KV cache. Without it vLLM takes `gpu_memory_utilization` of its device.",
    )
    gpu_memory_utilization: float = key(
        0.9, "Share of the device's memory that vLLM may use in all.", gt=0, le=1
    )
    enforce_eager: bool = key(
        False, "Run without compiling the model: a faster start, slower tokens."
    )
    tensor_parallel: Count = key(1, "Devices over which the matrices of one engine are sharded.")
    kv_cache: Literal["keep", "rebuild"] = key(
        "keep", "KV cache of responses in flight: kept, or computed again with the new weights."
    )

    @model_validator(mode="after")
    def _has_no_retired_key(self) -> Self:
        """Refuse a key that has gone: it is no argument of vLLM's."""
        retired = ((name, RETIRED.get(f"rollout.vllm.{name}")) for name in self.model_extra or {})
        faults(self, ((name, GONE, row.fix) for name, row in retired if row is not None))
        return self


def _no_options(side: Side) -> ConfigDict:
    """The built-in engines take no options: a section's JSON Schema says so."""
    built_in: Any = {"properties": {"engine": {"enum": list(BUILT_IN[side])}}}
    return ConfigDict(
        json_schema_extra={
            "if": built_in,
            "then": {"properties": {"options": {"maxProperties": 0}}},
        }
    )


# how often tokens are drawn changes with them, and their logprobs do not
FILTERS = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_tokens"),
)


class RolloutSection(Section):
    """Generation of responses."""

    model_config = _no_options("rollout")

    engine: Annotated[str, IsCode("engine", "torch")] = key(
        "torch",
        "`torch`, `vllm`, `mock`, an engine that an installed package registers, or "
        "`module:factory`.",
        min_length=1,
        examples=["torch", "vllm", "mock", "my_engines:fast"],
    )
    options: dict[str, Any] = key(
        {}, "Keyword arguments of the engine's factory. The built-in engines take none."
    )
    device: Device = key("auto", DEVICE_MEANING)
    workers: Count = key(1, "Rollout engines (replicas), a process each.")
    max_rows: Annotated[int, Field(ge=1), unit("responses")] = key(
        32, "Responses that one worker decodes at the same time."
    )
    max_tokens: Tokens = key(
        64, "Longest response. A longer one is cut and counted as `truncated`."
    )
    truncated: Truncated = key(
        "train",
        "Responses cut at `max_tokens`: `train` treats them as the others; `mask` takes their "
        "tokens out of the loss, while their rewards count in the group's credit; `drop` takes "
        "them out of both.",
    )
    temperature: float = key(
        1.0,
        "Sampling temperature of training responses; logprobs of given ones are at 1.",
        ge=LEAST_TRAINED,
        le=MOST_TEMPERATURE,
    )
    top_p: float = key(
        1.0,
        "Nucleus sampling: probability mass kept. 1.0: all. Like `top_k`, refused where the run's "
        "own trainer reads "
        "`rollout_logprobs`.",
        ge=LEAST,
        le=1,
    )
    top_k: TokensOrZero = key(0, "Number of likeliest tokens to sample from. 0: all. See `top_p`.")
    min_p: float = key(
        0.0,
        "Least probability, as a share of that of the likeliest token. 0: all. See `top_p`.",
        ge=0,
        le=1,
    )
    repetition_penalty: float = key(
        1.0,
        "Divides logits of tokens that are in the prompt or the response. 1: none. See `top_p`.",
        ge=0.01,
        le=100,
    )
    presence_penalty: float = key(
        0.0,
        "Subtracted from logits of tokens that are in the response. See `top_p`.",
        ge=-2,
        le=2,
    )
    frequency_penalty: float = key(
        0.0,
        "Subtracted from logits of tokens as often as they are in the response. See `top_p`.",
        ge=-2,
        le=2,
    )
    logit_bias: dict[
        Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]
    ] = key({}, "Added to logits, by token id. See `top_p`.", max_length=1024)
    min_tokens: TokensOrZero = key(
        0, "Tokens of a response, or a turn, before which it does not end by itself. See `top_p`."
    )
    stop: list[Annotated[str, Field(min_length=1)]] = key(
        [], "A response ends once it contains one of these texts.", max_length=64
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = key(
        [],
        "A response also ends with one of these token ids, beside the tokenizer's end token and "
        "those of the model's "
        "generation_config.json.",
        max_length=64,
    )
    budget: TokensOrZero = key(
        0,
        "Tokens that a worker generates of a response before it parks it; the next free worker "
        "continues it. 0: no "
        "limit.",
    )
    on_update: Literal["keep", "cut"] = key(
        "keep",
        "Responses in flight when weights arrive: `keep` continues them with the KV cache they "
        "have, `cut` parks them and continues them with a new one.",
    )
    straggler: Literal["wait", "park"] = key(
        "wait",
        "A response far longer than the others: `wait` leaves it to its worker; `park` parks it "
        "each time that it has grown by four times the mean length, so that the next free worker "
        "continues it. Neither drops it or draws it again, so lengths are trained as they are "
        "generated.",
    )
    speculate: Literal["auto", "on", "off"] = key(
        "auto",
        "Where few responses decode, the torch engine drafts tokens from earlier responses to the "
        "same prompt and computes several a forward. Tokens change by rounding only. `auto`: on "
        "for CPUs and with `draft_model`, off if the run is synchronous, since its results are "
        "exact bit for bit.",
    )
    draft_model: Annotated[str | None, IsPath()] = key(
        None,
        "A smaller model of the same tokens (as `model.source`) that drafts for the torch engine "
        "where nothing is found in earlier responses. It stays as it is.",
        min_length=1,
    )
    threads: CountOrZero = key(0, "CPU threads of one worker. 0: the launcher divides the cores.")
    structure: Annotated[StructureSection, FixedOnResume("responses under way have it")] = (
        StructureSection()
    )
    vllm: VllmSection = VllmSection()
    mock: Annotated[dict[str, Any], schema_of(MockRolloutOptions)] = key(
        {}, 'Latency model of `engine = "mock"`.'
    )

    @property
    def cuts(self) -> bool:
        """Whether unfinished responses are parked."""
        return bool(self.budget) or self.on_update == "cut" or self.straggler == "park"

    @property
    def filters(self) -> list[str]:
        """The keys that change which tokens are drawn, and not their logprobs."""
        fields = type(self).model_fields
        return [name for name in FILTERS if getattr(self, name) != fields[name].default]


class AlgorithmSection(Section):
    """The algorithm: credit and loss."""

    name: Annotated[str, IsCode("algorithm", "grpo")] = key(
        "grpo",
        "`grpo`, an algorithm that an installed package registers, or `module:Class`.",
        examples=["grpo", "my_algorithms:Reinforce"],
    )
    group_size: Annotated[int, Field(ge=1), unit("responses")] = key(
        8, "Responses to each prompt (N), which are compared with one another."
    )
    max_refill: Annotated[int, Field(ge=1)] = key(
        4,
        "Times `train.groups_per_step`: at most so many groups a step are dropped and replaced "
        "because they teach nothing (`drop_equal`). Further ones are trained, with advantages of "
        "zero; the ledger counts them as `spared_groups`.",
    )
    max_dropped: Annotated[int, Field(ge=1)] = key(
        64,
        "Times `train.groups_per_step`: the run fails when more groups than that leave it "
        "untrained between two steps, for whatever reason: `rollout.truncated`, a reward that "
        "fails, a stage of your own.",
    )
    options: Annotated[dict[str, Any], schema_of(GRPO | dict[str, Any])] = key(
        {},
        "Arguments of the algorithm's class; those of `grpo` follow, the others' are in "
        "docs/stages.md.",
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = only_where({"name": "grpo"}, "options", core, handler)
        if handler.mode == "validation":
            of_the_others: dict[str, Any] = {}
            for name, algorithm in built_in().items():
                if name != "grpo":
                    # of a union, the handler makes a definition of each member
                    of_options = handler(union_schema([algorithm.__pydantic_core_schema__]))
                    options = {"properties": {"options": of_options}}
                    named = {"properties": {"name": {"const": name}}}
                    of_the_others = {"if": named, "then": options, "else": of_the_others}
            # not one `allOf`: generators of values multiply its parts
            handler.resolve_ref_schema(schema)["else"] = of_the_others
        return schema


if TYPE_CHECKING:
    Optimizer = str
else:
    Optimizer = Literal[*OPTIMIZERS]


class TrainSection(Strategies, Section):
    """The optimizer steps."""

    model_config = _no_options("train")

    engine: Annotated[
        str,
        IsCode("engine", "torch"),
        FixedOnResume("the checkpoint has the state of this engine"),
    ] = key(
        "torch",
        "`torch`, `mock`, an engine that an installed package registers, or `module:factory`.",
        min_length=1,
        examples=["torch", "mock", "my_engines:trainer"],
    )
    options: dict[str, Any] = key(
        {}, "Keyword arguments of the engine's factory. The built-in engines take none."
    )
    device: Device = key("auto", DEVICE_MEANING)
    precision: Annotated[
        Literal["auto", "mixed", "model"],
        FixedOnResume("the checkpoint has weights and moments in its number format"),
    ] = key(
        "auto",
        "`mixed`: compute in `model.dtype`; master weights, gradient sums and optimizer state in "
        "float32. `model`: all "
        "in `model.dtype`; in bfloat16 most small updates are then rounded away. `auto`: `mixed` "
        "unless `model.dtype` is "
        "float32.",
    )
    steps: Steps = key(..., "Optimizer steps of the whole run.")
    groups_per_step: Annotated[
        Groups,
        FixedOnResume("the gate counts the groups of all steps by it, of those already made too"),
    ] = key(4, "Prompts of one optimizer step (P), each with its group.")
    replay_groups: Annotated[int, Field(ge=0), unit("groups")] = key(
        0,
        "Groups of earlier steps that each step trains again, beside `groups_per_step`: drawn "
        "uniformly by `seed` and step, fewer where there are fewer. For algorithms to which a "
        "sample's age does not matter, such as `trajectory_balance`. 0: each group is trained "
        "once.",
    )
    replay_versions: Annotated[int, Field(ge=1), unit("versions")] = key(
        4,
        "Steps after its own in which `replay_groups` may draw a group: its tokens are then at "
        "most `pipeline.staleness` + this behind. `pipeline.arena` holds the samples of so many "
        "steps more.",
    )
    optimizer: Annotated[
        Optimizer, FixedOnResume("the checkpoint has the state of this optimizer")
    ] = key(
        "adamw",
        "`adamw`; `muon`, or `adamw8bit` with moments of 8 bits on one rank: of the matrices in "
        "layers, and AdamW of embeddings, head, norms and biases (docs/engines.md).",
    )
    learning_rate: float = key(1e-5, "Peak learning rate.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "Learning rate after the warm-up: constant, or down to `schedule_floor` at the last step.",
    )
    schedule_floor: Annotated[float, Field(ge=0, le=1)] = key(
        0.0, "Share of the peak that a falling learning rate ends at."
    )
    warmup_steps: StepsOrZero = key(0, "Steps in which the learning rate rises from 0.")
    weight_decay: float = key(
        0.0, "Weight decay of matrices: no bias, norm or attention sink decays.", ge=0
    )
    betas: Betas = key((0.9, 0.95), "Decay rates of AdamW's two moments.")
    grad_clip: float = key(1.0, "Largest norm of the gradient; a larger one is scaled down.", gt=0)
    max_skipped_steps: Annotated[int, Field(ge=1), unit("steps")] = key(
        3,
        "A batch with a loss or gradient that is not finite is skipped: its step is counted and "
        "leaves the weights as they are, and its rows are written to `skipped/` in the run's "
        "folder. After so many in a row the run fails. Until a step is taken again no checkpoint "
        "is removed.",
    )
    token_budget: Tokens = key(
        8192, "Tokens of one forward and backward pass of one rank (a micro-batch)."
    )
    activation_checkpointing: bool = key(
        False, "Compute activations again in the backward pass: less memory."
    )
    kernels: Literal["auto", "plain"] = key(
        "auto", "`plain`: no fused or faster functions of the device, to compare with."
    )
    router: Literal["own", "replay"] = key(
        "own",
        "Of a model with experts: train with the trainer's `own` choices, or `replay` those of the "
        "rollout engine.",
    )
    router_loss: float = key(
        0.0,
        "Of a model with experts: coefficient of the loss that balances their load, at the cost of "
        "one more forward pass (docs/engines.md). 0: none.",
        ge=0,
    )
    router_bias_rate: float = key(
        0.0,
        "Of a model whose routers choose by a bias (DeepSeek-V3's): by how much each step moves "
        "the biases, which balances the load of experts without a loss. 0: they stay.",
        ge=0,
    )
    threads: CountOrZero = key(
        0,
        "CPU threads of one rank, also of a critic of its own. 0: the launcher divides the cores.",
    )
    mock: Annotated[dict[str, Any], schema_of(MockTrainOptions)] = key(
        {}, 'Latency model of `engine = "mock"`.'
    )


class CriticSection(RankSizes, Section):
    """A critic of its own, for `algorithm.options.critic = "own"`. What is not set here is as in
    `train`."""

    source: Annotated[str | None, IsPath(), CRITIC_IN_CHECKPOINT] = key(
        None,
        "Its model, as `model.source`; a critic's checkpoint (`checkpoints/STEP/critic/model` of a "
        "run) brings its value head. Default: the model that the policy begins with.",
        min_length=1,
    )
    learning_rate: float | None = key(
        None, "Peak learning rate. Default: `train.learning_rate`.", gt=0
    )
    dp: Count = key(1, "Data-parallel ranks, as `train.dp`; default 1, whatever that is.")
    tp: Count = key(1, "Tensor-parallel ranks, as `train.tp`; default 1, whatever that is.")
    cp: Count = key(
        1, "Context-parallel ranks, as `train.cp`, by `train.context_parallel`; default 1."
    )
    pp: Count = key(1, "Pipeline stages, as `train.pp`; default 1, whatever that is.")


def _teacher_url(value: object) -> object:
    if isinstance(value, str) and value and not value.startswith(("http://", "https://")):
        raise fault("is not a URL", "write one such as http://127.0.0.1:8000/v1")
    return value


class TeacherSection(Section):
    """A teacher behind an OpenAI-compatible server, which gives `ref_logprobs` in the place of
    `model.reference`."""

    url: Annotated[str, BeforeValidator(_teacher_url)] = key(
        "",
        "Its address up to `/v1`. The server must give logprobs of a prompt: `prompt_logprobs` "
        "(vLLM), or `echo` with `logprobs`. Its model has the tokenizer of `model.source`. Empty: "
        "there is none.",
        examples=["http://127.0.0.1:8000/v1"],
        json_schema_extra={"pattern": "^(https?://|$)"},
    )
    model: str = key("", "Name of the model at the server. Default: the first that it lists.")
    api_key_variable: str = key(
        "",
        "Environment variable with the server's API key, which is in no recipe, log or message. "
        "Empty: none is sent.",
    )
    timeout: Seconds = key(60.0, "Longest time of one request, with the responses of one group.")
    retries: CountOrZero = key(
        5, "Further attempts of a request while the server is away, too slow or too busy."
    )
    in_flight: Annotated[int, Field(ge=1), unit("requests")] = key(8, "Requests at the same time.")


class PipelineSection(Section):
    """The sample flow: staleness, memory, index, warehouses."""

    staleness: Staleness = key(
        1,
        "Staleness bound (η): versions by which a sample's oldest token may be behind when it is "
        "trained. 0: the "
        f"synchronous run, bit for bit. `auto`: {AUTO_STALENESS}, and `staleness_min = 1`.",
    )
    staleness_min: Annotated[int, Field(ge=0), unit("versions")] = key(
        0,
        "If set: the run takes the smallest bound from here to `staleness` that keeps its busiest "
        "stage busy, and decides again while it runs.",
    )
    _auto = model_validator(mode="before")(auto_staleness)
    window: Groups = key(
        1,
        "How many groups training may look past the oldest incomplete one (W). 1: admission order.",
    )
    admission: Literal["paced", "eager"] = key(
        "paced",
        "When groups enter: as late as keeps the trainer fed, or as early as the bound allows.",
    )
    arena: Size = key(64 * 2**20, "Shared memory for the samples' bytes, on each node.")
    lease_seconds: Seconds = key(
        60.0,
        "Time after a worker's last heartbeat until its claim ends and its rows are "
        "delivered again.",
    )
    keep_samples: SizeOrZero = key(
        64 * 2**20,
        "Disk space for the texts of the newest samples, and the tokens of trajectories. 0: none "
        "are kept.",
    )
    index: IndexUrl = key(
        "embedded",
        "`embedded`: a Valkey server of the run's own; or the `redis://`, `rediss://` or `unix://` "
        "URL of one.",
        json_schema_extra={"pattern": INDEX_PATTERN},
    )
    serve: str = key(
        AUTO,
        "Address of this machine, HOST or HOST:PORT, at which others reach the run: its warehouse, "
        "its weights (`sync.transport`), and at PORT its embedded index, with a password that the "
        "run makes. `auto`: where others start workers, the one that leads to the index, or to "
        "their network. `0.0.0.0`: all addresses, of which that one is announced. Empty: none do.",
        examples=["10.0.0.1", "10.0.0.1:6379"],
    )
    tls_certificate: Annotated[str, IsPath()] = key(
        "", "PEM file of this machine's certificate. If set, other machines connect by TLS."
    )
    tls_key: Annotated[str, IsPath()] = key("", "PEM file of its private key.")
    tls_authority: Annotated[str, IsPath()] = key(
        "", "PEM file of the authority that signed the other nodes' certificates."
    )

    def tls_contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        """Return a server's and a client's context; None without TLS.

        Raises OSError (ssl.SSLError) for unusable files.
        """
        if not self.tls_certificate:
            return None
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(self.tls_certificate, self.tls_key)
        return server, ssl.create_default_context(cafile=self.tls_authority)


class SyncSection(Section):
    """How rollout engines take new weights."""

    transport: Literal["auto", "shared_memory", "network"] = key(
        AUTO,
        "`shared_memory`: engines read the trainer's memory on the same node. `network`: "
        "engines may be on other nodes. Each node has one copy, which it sends on while it "
        "receives it. `auto`: the one that is needed.",
    )
    at_once: Annotated[int, Field(ge=0), unit("replicas")] = key(
        0,
        "Replicas that swap at the same time; they take turns, so that some always generate. 0: a "
        "quarter of `rollout.workers`, at least one. As many as there are, or more: all together.",
    )
    prefetch: bool = key(
        True,
        "In a colocated run: load training's memory as soon as nothing is left to generate, not "
        "only when a batch is "
        "claimed.",
    )
    bucket: Annotated[int, size_from(1024), Field(ge=1024, le=LARGEST), unit("bytes")] = key(
        4 * 2**20,
        "In a colocated run: each of the two buffers through which ranks exchange weights.",
    )
    probe: bool = key(
        True,
        "After a swap, before its next token, the engine scores a few rows of the batches just "
        "trained; their tokens' logprobs must be the trainer's, within the limit below.",
    )
    probe_tolerance: float = key(
        0.0,
        "Largest difference of a probed logprob: of 95 of 100 tokens, in float32 of every token; "
        "the mean of all may be a fifth of it. 0: by model.dtype, 0.001 in float32; in bfloat16 "
        "7.5 * 2**-8 * sqrt(layers) (at least 4, "
        "and three times as much for a model with experts) * the standard deviation of the probed "
        "logprobs (at least 1). `asyncdock resume` may change it.",
        ge=0,
    )
    timeout: Seconds = key(120.0, "Longest time that reading or loading a version may take.")


class ServeSection(Section):
    """The run's policy, served to other programs (docs/serving.md)."""

    share: float = key(
        0.25,
        "While the run trains, the engines that serve its policy on the same machine compute for "
        "at most this share of the "
        "time.",
        gt=0,
        le=1,
    )


class EvaluateSection(Section):
    """Evaluation: held-out prompts, answered beside training."""

    every: StepsOrZero = key(0, "Steps between two evaluations. 0: none.")
    prompts: Annotated[int, Field(ge=1), unit("prompts")] = key(
        32,
        "Number of held-out prompts that are answered, by rows of the engine (`rollout.max_rows`) "
        "that training leaves idle. When the next version comes before, the rest is answered by at "
        "most a quarter of the rows. At η = 0 all are answered at once.",
    )
    samples: Annotated[int, Field(ge=0), unit("prompts")] = key(
        4, "Number of those prompts that are shown with their responses."
    )
    sampling: Literal["greedy", "rollout"] = key(
        "greedy",
        "How they are answered. `greedy`: with the likeliest tokens. `rollout`: with the "
        "temperature and the filters of `rollout`; the random numbers of a prompt are those of "
        "every evaluation.",
    )


class CheckpointSection(Section):
    """Checkpoints. Rows of trained steps stay in the arena until one covers them."""

    every: Steps = key(20, "Steps between two checkpoints.")
    keep: Annotated[int, Field(ge=1), unit("checkpoints")] = key(
        2, "Number of newest checkpoints that are kept."
    )
    url: str = key(
        "",
        "An existing folder or bucket to which each checkpoint is copied, below the run's id, as a "
        "path or as a URL of any scheme of fsspec (`s3://` needs the package s3fs). Machines "
        "without the run's folder read it there. Empty: none.",
        examples=["s3://bucket/runs"],
    )


class GuardSection(Section):
    """Alarms on what steps and swaps measure (docs/runs.md)."""

    on_alarm: Literal["warn", "pause", "fail"] = key(
        "warn",
        "`warn`: an event and a line in the log. `pause`: the run is paused too. `fail`: "
        "the run fails.",
    )
    sensitivity: float = key(
        8.0,
        "Deviations from the median of the last 32 steps that are an alarm. Less: more alarms, "
        "also false ones.",
        gt=0,
    )
    off: list[str] = key(
        [], "Metrics that are not judged, by name.", max_length=64, examples=[["entropy"]]
    )


class AutoscaleSection(Section):
    """The number of rollout workers follows the load (docs/cluster.md)."""

    min: Count = key(1, "Fewest rollout workers.")
    max: Annotated[int, Field(ge=0), unit("workers")] = key(
        0, "Most rollout workers. 0: the number does not change."
    )
    window: Seconds = key(
        30.0, "Time over which it is measured how long trainer and rollouts wait, until a decision."
    )


if TYPE_CHECKING:
    Launcher = str
else:
    Launcher = Literal["process", "inline", *CLUSTERS]


class LaunchSection(Section):
    """How worker processes start, restart and stop."""

    restart_window: ClassVar[float] = 3600.0
    """Seconds for which a restart counts for ``max_restarts``."""

    launcher: Launcher = key(
        "process",
        "`process`: a process for each worker. `inline`: all in one process, to debug. `ray`: "
        "workers with engines are processes on the nodes of a Ray cluster (docs/cluster.md).",
    )
    address: str = key(
        "auto",
        "Cluster of the launcher; of Ray `HOST:PORT`, `ray://HOST:PORT`, `local` (the run starts "
        "and ends it), or `auto` (docs/cluster.md).",
        min_length=1,
    )
    start_method: Literal["forkserver", "spawn"] = key(
        "forkserver",
        "`forkserver`: workers are forked from a process that has imported everything (Linux "
        "only). `spawn`: each starts a new interpreter.",
    )
    placement: Literal["separate", "colocated"] = key(
        "separate",
        "`separate`: rollout engines have workers of their own. `colocated`: each rank of the "
        "train engine has a rollout engine too, and they take turns on its device; "
        "`rollout.workers` then follows from the ranks.",
    )
    remote_rollouts: Annotated[int, Field(ge=0), unit("workers")] = key(
        0,
        "Of `rollout.workers`, those that other machines start with `asyncdock host` "
        "(docs/cluster.md).",
    )
    max_restarts: Annotated[int, Field(ge=0), unit("restarts")] = key(
        3,
        "Restarts of one worker, or rank group, within an hour; the next fails the run, or lets a "
        "rollout wait.",
    )
    startup_timeout: Seconds = key(
        300.0, "Longest time until all workers are ready; of several rollout workers, one."
    )
    stop_timeout: Seconds = key(
        60.0,
        "When the run is stopped: time for workers to finish their claims, and for the trainer to "
        "write a checkpoint. As long has a rollout worker that leaves to park what it holds, and "
        "a host that leaves to move its samples.",
    )
    autoscale: AutoscaleSection = AutoscaleSection()
    readers: Literal["owner", "group", "all"] = key(
        "owner",
        "Users that may read the run's folder. Its `recipe.json` and its index are its "
        "owner's in any case.",
    )
    hang_timeout: Seconds = key(
        120.0,
        "Longest time without a sign of life of a worker; then it is ended, and restarted "
        "as a dead one. Ranks wait 2.5 times as long for one another in a collective call.",
    )
    stall_timeout: Seconds = key(
        3600.0,
        "Longest time in which no stage of a running run processes a sample; then the worker that "
        "all others wait for (`asyncdock why`) is ended, and restarted. Above the longest "
        "response, step and evaluation.",
    )

    @property
    def collective_seconds(self) -> float:
        """Longest wait of a rank for the others in a collective call."""
        return 2.5 * self.hang_timeout

    @property
    def beat_seconds(self) -> float:
        """Seconds between two signs of life of a worker."""
        return min(2.0, self.hang_timeout / 8)

    @property
    def cluster(self) -> ClusterBackend | None:
        """The cluster whose nodes have the workers with engines; None: it is this machine."""
        return CLUSTERS.get(self.launcher)

    @property
    def on_cluster(self) -> bool:
        """Whether workers with engines are processes on the nodes of a cluster."""
        return self.cluster is not None


ExternalStage = Literal["rollout", "reward", "reference", "update"]


class ExternalSection(Section):
    """Stages that other programs run (docs/external.md)."""

    stages: list[ExternalStage] = key(
        [],
        "Stages for which the run starts no workers: other programs join it and run them.",
        max_length=16,
    )


class StageSection(Section):
    """A stage of your own (docs/stages.md). Further keys are the options of its class."""

    model_config = ConfigDict(extra="allow")

    use: Annotated[str, IsCode("stage", "refused")] = key(
        ...,
        "A stage that an installed package registers, or `module:Class`.",
        min_length=1,
        examples=["my_stages:Judge"],
    )
    workers: Count = key(1, "Processes that run it.")
    timeout: Seconds = key(
        600.0,
        "Longest time of one call of its `process`: of the rows that became ready together, at "
        "most 64, or of one group. After it the worker is started again; the run fails when a call "
        "with one of these rows takes as long again.",
    )
    sandbox: bool = key(
        False,
        "Call it in a sandbox ([rewards.md](rewards.md#the-sandbox)), as it reads what a model "
        "wrote: no network, files read-only and only those needed, a scratch folder. In a service "
        "it always is.",
    )
    network: bool = NETWORK
    read: Annotated[list[str], IsPath()] = READ

    @property
    def options(self) -> dict[str, Any]:
        """The keys of the class: those beside the keys of every stage."""
        return dict(self.model_extra or {})
