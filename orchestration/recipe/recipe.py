"""The recipe: everything that a run is told, as one TOML file checked before anything starts.

    TOML + --set key=value ──▶ fields (pydantic: unknown keys, types, ranges) ──▶ relations between keys ──▶ Recipe
                                              └──────────── all problems at once ────────────┘──▶ RecipeError

What is derived from a recipe (groups in flight, memory, ...) is in :mod:`orchestration.recipe.planner`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, ValidationError

from orchestration.recipe.bounds import LARGEST, NotToml, out_of_bounds, read_toml
from orchestration.recipe.files import KNOWN_MODELS, READING_CHECKS, Surroundings
from orchestration.recipe.problems import Problem as Problem
from orchestration.recipe.problems import RecipeError as RecipeError
from orchestration.recipe.problems import format_size as format_size
from orchestration.recipe.problems import suggest as suggest
from orchestration.recipe.problems import wrong_and_fix
from pipeline.staleness import StalenessPlan, passing_steps
from stages.algorithms.grpo import GRPO
from stages.device_names import EXAMPLES, PATTERN, device_fix
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.registry import BUILT_IN, TOLD, EngineUnknown, Side, engine_names, find_factory
from stages.json_schema import only_where, schema_of, unit
from stages.prompts.files import Reading
from stages.prompts.sources import PromptOptions
from stages.prompts.tasks import CONFIGS
from stages.user_code import place_of

UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
MOST_PROBLEMS = 100  # keys of a recipe that are wrong by themselves; more are counted
INDEX_SCHEMES = ("redis://", "rediss://", "unix://")
NAMES_ITS_KEY = re.compile(r"(?P<key>\w+\.\w+)(?: = .*?)? (?P<wrong>(?:is|means|must|needs) .*)", re.DOTALL)


def parse_size(value: object) -> object:
    """Bytes from ``64MiB``, ``1.5 GiB`` or a whole number. Raises ``ValueError`` with the accepted forms."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]{1,3})?", value.strip())
    unit = (match[2] or "B").upper() if match else ""
    if match is None or unit not in UNITS:
        raise ValueError("not a size; write a whole number of bytes or a text like '64MiB', '1.5GiB' or '500MB'")
    return int(float(match[1]) * UNITS[unit])


def _index_url(value: object) -> object:
    if isinstance(value, str) and value != "embedded" and not value.startswith(INDEX_SCHEMES):
        raise ValueError("not an index; use 'embedded', or a URL that begins with redis://, rediss:// or unix://")
    return value


def _bytes(least: int) -> BeforeValidator:
    """:func:`parse_size`, whose JSON Schema says what it takes: ``least`` bytes or more, or a text."""
    number = r"([0-9]*[1-9][0-9]*(\.[0-9]+)?|0+\.0*[1-9][0-9]*)" if least else r"[0-9]+(\.[0-9]+)?"
    text = rf"^ *{number} ?([KkMmGg]?[Bb]|[KkMmGgTt][Ii][Bb])? *$"
    shown = Annotated[int, Field(ge=least, le=LARGEST)] | Annotated[str, Field(json_schema_extra={"pattern": text})]
    return BeforeValidator(parse_size, json_schema_input_type=shown)


Size = Annotated[int, _bytes(1), Field(ge=1, le=LARGEST), unit("bytes")]
SizeOrNone = Annotated[int, _bytes(0), Field(ge=0, le=LARGEST), unit("bytes")]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
Tokens = Annotated[int, Field(ge=1), unit("tokens")]
TokensOrNone = Annotated[int, Field(ge=0), unit("tokens")]
Groups = Annotated[int, Field(ge=1), unit("groups")]
Steps = Annotated[int, Field(ge=1), unit("steps")]
StepsOrNone = Annotated[int, Field(ge=0), unit("steps")]
Seconds = Annotated[float, Field(gt=0), unit("seconds")]
Share = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[
    tuple[Share, Share], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
]

Device = Annotated[str, Field(pattern=PATTERN, examples=EXAMPLES)]
DEVICE_MEANING = (
    "`auto`: the accelerator that torch finds, else the CPU. A number chooses one of several devices: `cuda:1`. `npu` needs "
    "torch_npu."
)


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
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of training responses.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling: probability mass kept. 1.0: all.")
    top_k: TokensOrNone = Field(default=0, description="Sample from the so many likeliest tokens. 0: all.")
    stop: list[str] = Field(
        default=[], max_length=64, description="A response ends once it contains one of these texts."
    )
    budget: TokensOrNone = Field(
        default=0,
        description="Tokens of a response in one visit to an engine; then it is parked, and the next free worker continues "
        "it. 0: no limit.",
    )
    on_update: Literal["keep", "cut"] = Field(
        default="keep",
        description="Responses in flight when weights arrive: `keep` continues them with the KV cache they have, `cut` "
        "parks them and continues them with a new one.",
    )
    threads: CountOrNone = Field(default=0, description="CPU threads of one worker. 0: shared out by the launcher.")
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
    warmup_steps: StepsOrNone = Field(default=0, description="Steps in which the learning rate rises from 0.")
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
    threads: CountOrNone = Field(default=0, description="CPU threads of one rank. 0: shared out by the launcher.")
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
    keep_samples: SizeOrNone = Field(
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
    bucket: Annotated[int, _bytes(1024), Field(ge=1024, le=LARGEST), unit("bytes")] = Field(
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

    every: StepsOrNone = Field(default=0, description="Steps between two evaluations. 0: none.")
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


class Recipe(Section):
    """One run's settings. Made by :func:`load_recipe`; frozen; travels as JSON through the index to the workers."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the run. Default: the recipe file's name."
    )
    description: str = Field(default="", description="One line for people.")
    seed: CountOrNone = Field(default=0, description="Seed of prompts, draws and initial weights.")
    model: ModelSection
    prompts: PromptOptions
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection
    pipeline: PipelineSection = PipelineSection()
    sync: SyncSection = SyncSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    launch: LaunchSection = LaunchSection()
    external: ExternalSection = ExternalSection()

    def ours(self, stage: ExternalStage) -> bool:
        """Whether the run's own workers do a stage, and no other program."""
        return stage not in self.external.stages

    @property
    def staleness_plan(self) -> StalenessPlan:
        return StalenessPlan(self.pipeline.staleness, self.train.groups_per_step, self.pipeline.window)

    @property
    def colocated(self) -> bool:
        """Whether training and generation take turns on the same devices."""
        return self.launch.placement == "colocated"

    @property
    def replicas(self) -> int:
        """Rollout engines."""
        return self.train.ranks if self.colocated else self.rollout.workers

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm needs logprobs under the frozen reference policy (for example with ``kl_coef`` > 0)."""
        from stages.algorithms import build_algorithm

        return build_algorithm(self.algorithm.name, self.algorithm.options).needs_reference

    def located(self) -> Recipe:
        """The same recipe with the paths in it resolved, so that it means the same in any folder."""
        paths = {"model": ("source",), "prompts": ("path",), "pipeline": TLS_FILES}
        changes = {}
        for section, keys in paths.items():
            found = {key: _resolved(getattr(getattr(self, section), key)) for key in keys}
            changes[section] = getattr(self, section).model_copy(update=found)
        return self.model_copy(update=changes)

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Recipe:
        """The recipe that :meth:`to_json` wrote. Relations and paths were checked when the run was made."""
        return cls.model_validate_json(text)


def _resolved(value: str | None) -> str | None:
    """``value`` as an absolute path when there is a file or a folder of this name; a name stays what it is."""
    if not value or value in KNOWN_MODELS or not Path(value).expanduser().exists():
        return value
    return str(Path(value).expanduser().resolve())


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), folder: Path | None = None, *, files: bool = True
) -> Recipe:
    """Read, override and check the recipe at ``path``: TOML, or JSON as a run's folder keeps it. ``overrides`` are
    ``section.key=value`` with a TOML value; what is no TOML value is a string. A recipe without a name is called like its
    file. ``folder``, ``files``: see :func:`parse_recipe`. Raises :class:`RecipeError`."""
    data, problems = read_recipe(path, overrides)
    _shorten(data, overrides)
    return parse_recipe(data, where=str(path), problems=problems, folder=folder, files=files)


def _shorten(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Let a warm-up end with the run, when the run was made shorter than the recipe's warm-up by an override alone."""
    keys = {text.partition("=")[0].strip() for text in overrides}
    train = data.get("train")
    if "train.steps" in keys and "train.warmup_steps" not in keys and isinstance(train, dict):
        steps, warmup = train.get("steps"), train.get("warmup_steps")
        if type(steps) is int and type(warmup) is int and 0 < steps < warmup:
            train["warmup_steps"] = steps


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[Problem]]:
    """The tables at ``path`` with ``overrides``, not checked any further, and what is wrong with the overrides. Raises
    :class:`RecipeError` when there is no TOML."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = _json_tables(text) if path.suffix == ".json" else read_toml(text)
    except NotToml as error:
        raise RecipeError(str(path), [Problem("file", None, f"is not TOML: {error}")]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [Problem("file", str(path), f"cannot be read ({error})")]) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(str(path), [Problem("file", None, f"is not a recipe in JSON: {error}")]) from error
    data.setdefault("name", path.stem)
    return data, [problem for text in overrides if (problem := _override(data, text))]


def _json_tables(text: str) -> dict[str, Any]:
    """A recipe as a run's folder keeps it."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, not an object")
    return data


def parse_recipe(
    data: Mapping[str, Any],
    where: str = "recipe",
    problems: Sequence[Problem] = (),
    *,
    reading: Reading | None = None,
    folder: Path | None = None,
    devices: bool = True,
    files: bool = True,
) -> Recipe:
    """Check ``data`` (nested tables) and return the recipe, or raise :class:`RecipeError` with all that is wrong, added
    to ``problems`` found before. Relations between keys are checked as far as the keys themselves are sound: no check looks
    at one of which there is a problem. The files that the recipe names are read as far as ``reading`` allows; the run's own
    will lie below ``folder`` (default: the present directory), on whose disk there must be room. ``devices``: whether the
    run will be executed on this machine, so that its devices must be here. ``files``: whether the recipe is compared with
    files and machine at all."""
    found = list(problems)
    if beyond := [Problem(key, None, *said) for key, *said in out_of_bounds(data)]:
        raise RecipeError(where, [*found, *beyond])  # nothing else is asked of such a thing
    try:
        recipe = Recipe.model_validate(data, strict=True)
        unsound: set[str] = set()
    except ValidationError as error:
        recipe, unsound, errors = _sound_part(data, error)
        found += [_field_problem(item, list(_fields(item["loc"][:-1]))) for item in errors[:MOST_PROBLEMS]]
        if len(errors) > MOST_PROBLEMS:
            found.append(Problem("recipe", None, f"has {len(errors) - MOST_PROBLEMS} more keys that are wrong"))
    unsound |= {problem.key for problem in problems}
    sound = (check for check, keys in CHECKS if not any(_touches(key, unsound) for key in keys))
    found += [problem for check in sound for problem in check(recipe)]
    place = Surroundings(reading or Reading(), folder or Path.cwd(), devices)
    reads = (check for check, keys in READING_CHECKS if not any(_touches(key, unsound) for key in keys))
    found += [problem for check in reads if files for problem in check(recipe, place)]
    if found:
        raise RecipeError(where, found)
    return recipe


# What a run may have otherwise when it is resumed: where and how it is computed, not what; and what becomes of prompts that
# it cannot ask.
HOW = (
    "train.dp",
    "train.tp",
    "train.device",
    "train.threads",
    "train.token_budget",
    "train.activation_checkpointing",
    "rollout.device",
    "rollout.threads",
    "rollout.workers",
    "pipeline.keep_samples",
    "prompts.too_long",
    "sync.probe",
    "sync.probe_tolerance",
    "sync.probe_mean_tolerance",
    "launch",
)


def changed(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """``recipe`` with ``overrides`` of the keys in :data:`HOW`. Raises :class:`RecipeError`."""
    data = json.loads(recipe.to_json())
    refused = [
        Problem("--set", text, "would change what the run computes", f"only these may change: {', '.join(HOW)}")
        for text in overrides
        if not any(f"{text.partition('=')[0].strip()}.".startswith(f"{key}.") for key in HOW)
    ]
    found = refused or [problem for text in overrides if (problem := _override(data, text))]
    return parse_recipe(data, where=recipe.name, problems=found)


# ---------------------------------------------------------------------------------------------------------------------
# From text to fields


def _override(data: dict[str, Any], text: str) -> Problem | None:
    """Set one ``section.key=value`` in ``data``, or say why not."""
    key, equals, value = text.partition("=")
    if not equals:
        return Problem("--set", text, "is not key=value", "write for example --set train.steps=10")
    return override(data, key, toml_value(value), "--set", text)


def override(data: dict[str, Any], key: str, value: Any, where: str = "override", text: str = "") -> Problem | None:
    """Set the dotted ``key`` of ``data`` to ``value``, or say why not: of ``where``, showing ``text`` (default: the key)."""
    parts, text = [part.strip() for part in key.split(".")], text or key
    if not all(parts):
        return Problem(where, text, "is not a key", "write for example train.steps")
    at: Any = data
    for part in parts[:-1]:
        at = at[int(part)] if _in_list(at, part) else _table(at, part)
        if not isinstance(at, dict | list):
            return Problem(where, text, f"{part} is a value, not a section", "name an existing section")
    last = parts[-1]
    if isinstance(at, list):
        if not _in_list(at, last):
            return Problem(where, text, f"{parts[-2]} is a list of {len(at)}", f"use an index below {len(at)}")
        at[int(last)] = value
    else:
        at[last] = value
    return None


def _in_list(at: Any, part: str) -> bool:
    """Whether ``part`` is the number of an entry of ``at``."""
    return isinstance(at, list) and re.fullmatch("[0-9]{1,9}", part) is not None and int(part) < len(at)


def _table(at: Any, part: str) -> Any:
    return at.setdefault(part, {}) if isinstance(at, dict) else None


def toml_value(text: str) -> Any:
    """The value of ``key=text`` as TOML reads it; what is no TOML value is a string."""
    try:
        parsed = read_toml(f"value = {text.strip()}")
    except NotToml:
        return text.strip()
    return parsed["value"] if set(parsed) == {"value"} else text.strip()


# ---------------------------------------------------------------------------------------------------------------------
# Problems of single fields

TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list of two numbers",
    "dict_type": "a table",
    "model_type": "a table",
}


# Keys that [train] will have: what is not there yet, and with which layout a plan shows where its weights would lie.
LATER = {
    "train.pp": ("pipeline", "dp=2,pp=2"),
    "train.cp": ("context", "dp=4"),  # dp=2 times cp=2
    "train.ep": ("expert", "dp=2,ep=2"),
    "train.etp": ("expert tensor", "dp=2,tp=2,etp=2"),
}


def lacking(key: str) -> str:
    """What the train engine does not have, of the keys in :data:`LATER`."""
    return f"the train engine has no {LATER[key][0]} parallelism, only dp and tp"


def _field_problem(error: dict[str, Any], allowed: Sequence[str]) -> Problem:
    """``error`` is one of pydantic's; ``allowed`` are the keys that the table it stands in may have."""
    loc, kind, context = error["loc"], error["type"], error.get("ctx", {})
    key, value = ".".join(map(str, loc)), error["input"]
    if kind == "missing" and isinstance(loc[-1], int):
        return Problem(key, None, "is missing", f"give more values in {'.'.join(map(str, loc[:-1]))}")
    if kind == "missing":
        wanted = _annotation(loc)
        table = isinstance(wanted, type) and issubclass(wanted, BaseModel)
        return Problem(key, None, "is missing", f"add a [{key}] section" if table else f"add {loc[-1]} = ...")
    if kind == "extra_forbidden" and key in LATER:
        layout, wrong = LATER[key][1], f"is not there yet: {lacking(key)}"
        shares = ", in which ranks of cp count as dp," if key == "train.cp" else ""
        plan = f"`asyncdock plan reshard RECIPE --train {layout}`{shares} plans such a layout"
        return Problem(key, value, wrong, f"take it out and set train.dp and train.tp; {plan}")
    if kind == "extra_forbidden":
        return Problem(key, value, "is not a known key", suggest(str(loc[-1]), allowed))
    if kind == "literal_error":
        return Problem(key, value, "is not allowed", suggest(str(value), re.findall(r"'([^']*)'", context["expected"])))
    if kind in TYPES:
        return Problem(key, value, f"is a {_toml_type(value)}", f"write {TYPES[kind]}")
    if kind == "value_error":
        message = str(context["error"])
        if (named := NAMES_ITS_KEY.fullmatch(message)) and isinstance(value, Mapping):  # about a section as a whole
            return Problem(named["key"], value.get(named["key"].split(".")[1]), *wrong_and_fix(named["wrong"]))
        return Problem(key, value, *wrong_and_fix(f"is {message}"))
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        sign = {"greater_than_equal": ">=", "greater_than": ">", "less_than_equal": "<=", "less_than": "<"}[kind]
        limit = next(iter(context.values()))
        return Problem(key, value, "is out of range", f"use a value {sign} {limit}")
    if kind == "string_pattern_mismatch" and context["pattern"] == PATTERN:
        return Problem(key, value, "is not the name of a device", device_fix(str(value)))
    if kind == "string_pattern_mismatch":
        return Problem(key, value, "is not a name", "use letters, digits, '.', '_' and '-', a letter or digit first")
    if kind in ("too_short", "too_long", "string_too_short"):
        return Problem(key, value, "has the wrong length", error["msg"])
    return Problem(key, value, error["msg"])


def _key_of(error: Mapping[str, Any]) -> str:
    """The key that one of pydantic's errors of a whole section names; "" where it names none."""
    if error["type"] != "value_error" or not isinstance(error["input"], Mapping):
        return ""
    named = NAMES_ITS_KEY.fullmatch(str(error["ctx"]["error"]))
    return named["key"] if named else ""


def _said_of(name: str, error: Exception) -> tuple[str, str]:
    """Wrong and fix of a message that begins with whose it is and ``name``."""
    return wrong_and_fix(str(error).partition(f"{name!r} ")[2] or str(error))


def _annotation(loc: Sequence[int | str]) -> Any:
    """The declared type at ``loc``, without its ``Annotated`` wrapping."""
    at: Any = Recipe
    for part in loc:
        if isinstance(part, int):
            at = get_args(at)[0]
        elif isinstance(at, type) and issubclass(at, BaseModel) and part in at.model_fields:
            at = at.model_fields[part].annotation
        if get_origin(at) is Annotated:
            at = get_args(at)[0]
    return at


def _fields(loc: Sequence[int | str]) -> Mapping[str, Any]:
    at = _annotation(loc)
    return at.model_fields if isinstance(at, type) and issubclass(at, BaseModel) else {}


def _toml_type(value: object) -> str:
    names: dict[type, str] = {bool: "boolean", int: "whole number", float: "number", str: "text", list: "list"}
    return names.get(type(value), "table" if isinstance(value, Mapping) else type(value).__name__)


# Stands in for what is missing or wrong, so that the relations of the rest can be checked all the same.
_STAND_IN: dict[str, Any] = {
    "model": {"source": "tiny"},
    "prompts": {"source": "jsonl", "path": "?"},
    "reward": {"functions": [{"name": "?"}]},
    "train": {"steps": 1},
}


def _sound_part(data: Mapping[str, Any], error: ValidationError) -> tuple[Recipe, set[str], list[dict[str, Any]]]:
    """A recipe of the sound fields, stand-ins and defaults for the others; the dotted keys of those others; and all of
    pydantic's errors, with those that show only when the first ones are out of the way."""
    sound, unsound, stood_in = copy.deepcopy(dict(data)), set[str](), set[str]()
    errors: list[dict[str, Any]] = [dict(item) for item in error.errors()]
    new = errors
    while new:
        for item in new:
            # An entry of a list makes the list as a whole unsound; what a section says of one of its keys, that key.
            loc = list(itertools.takewhile(lambda part: isinstance(part, str), item["loc"]))
            named = _key_of(item)
            if named and named not in unsound:
                loc = named.split(".")
            unsound.add(".".join(loc))
            at: Any = sound
            for part in loc[:-1]:
                at = at.get(part) if isinstance(at, dict) else None
            if isinstance(at, dict):
                at.pop(loc[-1], None)
        sound.setdefault("name", "recipe")
        for section, fields in _STAND_IN.items():
            given = sound.get(section, {})
            if next(iter(fields)) not in given:
                sound[section] = fields | given
                stood_in.add(section)
        try:
            return Recipe.model_validate(sound, strict=True), unsound, errors
        except ValidationError as again:
            new = [dict(item) for item in again.errors() if ".".join(map(str, item["loc"])) not in unsound]
            known = [(item["loc"], item["msg"]) for item in errors]
            shown = [item for item in new if item["loc"][0] not in stood_in]
            errors = errors + [item for item in shown if (item["loc"], item["msg"]) not in known]
    raise error


def _touches(key: str, unsound: set[str]) -> bool:
    return any(key == other or key.startswith(other + ".") or other.startswith(key + ".") for other in unsound)


# ---------------------------------------------------------------------------------------------------------------------
# Relations between keys: each yields what does not fit together


def _engines_resolve(recipe: Recipe) -> Iterator[Problem]:
    sections: dict[Side, RolloutSection | TrainSection] = {"rollout": recipe.rollout, "train": recipe.train}
    for side, section in sections.items():
        key, name, options = f"{side}.engine", section.engine, section.options
        if name in BUILT_IN[side]:
            if options:
                yield Problem(f"{side}.options", options, f"has no effect with engine {name!r}", "remove the table")
            continue
        try:
            factory = find_factory(side, name)
        except EngineUnknown as error:
            wrong, fix = _said_of(name, error)
            named = f"{suggest(name, engine_names(side))}; or name a factory as 'module:factory'"
            yield Problem(key, name, wrong, fix if ":" in name else named)
            continue
        try:
            inspect.signature(factory).bind(recipe, **dict.fromkeys(TOLD[side]), **options)
        except (TypeError, ValueError) as error:
            takes = f"it is called with the recipe, {', '.join(TOLD[side])} and what {side}.options holds"
            at, value = (f"{side}.options", options) if options else (key, name)
            yield Problem(at, value, f"does not fit what makes the engine ({error})", takes)


def _mock_goes_with_mock(recipe: Recipe) -> Iterator[Problem]:
    engines = {"rollout.engine": recipe.rollout.engine, "train.engine": recipe.train.engine}
    mock = recipe.model.source == "mock"
    for key, engine in engines.items():
        if mock and engine in ("torch", "vllm"):
            yield Problem(key, engine, "cannot run model.source = 'mock'", f"set {key} = 'mock', or choose a model")
        if not mock and engine == "mock":
            fix = f"set model.source = 'mock', or {key} = 'torch'"
            yield Problem(key, engine, f"has no use for model.source = {recipe.model.source!r}", fix)


def _mock_takes_options(recipe: Recipe) -> Iterator[Problem]:
    for key, section, options in (
        ("rollout.mock", recipe.rollout, MockRolloutOptions),
        ("train.mock", recipe.train, MockTrainOptions),
    ):
        if section.mock and section.engine != "mock":
            yield Problem(key, section.mock, f"has no effect with engine {section.engine!r}", "remove the table")
        yield from _refusals(key, options, section.mock)


def _vllm_fits(recipe: Recipe) -> Iterator[Problem]:
    rollout, options = recipe.rollout, recipe.rollout.vllm
    if rollout.engine != "vllm":
        given = options.model_dump(exclude_defaults=True)
        if given:
            yield Problem("rollout.vllm", given, f"has no effect with engine {rollout.engine!r}", "remove the table")
        return
    longest = (recipe.prompts.max_prompt_tokens or 0) + rollout.max_tokens
    if options.max_model_len and options.max_model_len < longest:
        wrong = f"is less than the {longest} tokens that one prompt and response may have"
        yield Problem("rollout.vllm.max_model_len", options.max_model_len, wrong, f"use a value >= {longest}")
    if (rollout.top_k or rollout.top_p < 1) and rollout.temperature != 1:
        wrong = "is not served together with top_k or top_p by vLLM, whose logprobs would not be those of the trainer"
        fix = "set rollout.temperature = 1.0, or rollout.top_k = 0 and rollout.top_p = 1.0"
        yield Problem("rollout.temperature", rollout.temperature, wrong, fix)
    if rollout.stop and options.pause == "abort":
        wrong = "would miss a stop string that an update of the weights cuts in two"
        yield Problem(
            "rollout.vllm.pause", options.pause, wrong, "set rollout.vllm.pause = 'keep', or rollout.stop = []"
        )
    if options.pause == "abort" and "kv_cache" in options.model_fields_set and options.kv_cache == "keep":
        wrong = "keeps nothing of responses that rollout.vllm.pause = 'abort' ends"
        yield Problem("rollout.vllm.kv_cache", "keep", wrong, "remove it, or set rollout.vllm.pause = 'keep'")


def _refusals(key: str, constructor: Callable[..., Any], options: Mapping[str, Any]) -> Iterator[Problem]:
    """What ``constructor`` (a pydantic model, a dataclass, a function) does not take of ``options``."""
    try:
        allowed = list(inspect.signature(constructor).parameters)
    except (TypeError, ValueError) as error:
        yield Problem(key, options, f"cannot be checked ({error})", "name a class or a function")
        return
    if isinstance(constructor, type) and issubclass(constructor, BaseModel):
        try:
            constructor.model_validate(options, strict=True)
        except ValidationError as error:
            for item in error.errors():
                yield _field_problem({**item, "loc": (*key.split("."), *item["loc"])}, allowed)
        except Exception as error:
            yield _raised(key, options, constructor, error)
        return
    unknown = [option for option in options if option not in allowed]
    for option in unknown:
        yield Problem(f"{key}.{option}", options[option], "is not a known key", suggest(option, allowed))
    try:
        constructor(**{option: value for option, value in options.items() if option not in unknown})
    except (TypeError, ValueError) as error:
        yield Problem(key, options, f"is refused ({error})", f"it takes {', '.join(allowed)}")
    except Exception as error:
        yield _raised(key, options, constructor, error)


def _raised(key: str, options: Mapping[str, Any], constructor: Any, error: Exception) -> Problem:
    """What the code of a user has raised that ``options`` were given to."""
    made_by = getattr(constructor, "__init__") if isinstance(constructor, type) else constructor  # noqa: B009
    return Problem(
        key, options, f"cannot be used: {error!r} was raised ({place_of(error, made_by)})", "correct its code"
    )


def _task_takes_config(recipe: Recipe) -> Iterator[Problem]:
    prompts = recipe.prompts
    if prompts.source == "builtin":
        yield from _refusals("prompts.config", CONFIGS[str(prompts.task)], prompts.config)


def _rewards_resolve(recipe: Recipe) -> Iterator[Problem]:
    from stages.rewards.registry import RewardError, RewardFunctions

    there = RewardFunctions()
    names = [function.name for function in recipe.reward.functions]
    for at, name in enumerate(names):
        key = f"reward.functions.{at}.name"
        if name in names[:at]:
            yield Problem(key, name, "is listed twice", "add up the weights")
        if not recipe.ours("reward"):
            continue  # the names of what another program scores
        try:
            there.find(name)
        except RewardError as error:
            wrong, fix = _said_of(name, error)
            yield Problem(key, name, wrong, fix or "put its directory on PYTHONPATH, or correct the name")
    if all(function.weight == 0 for function in recipe.reward.functions):
        yield Problem("reward.functions", None, "all have weight 0", "give at least one another weight")


def _algorithm_takes_options(recipe: Recipe) -> Iterator[Problem]:
    from stages.algorithms import algorithm_class

    name, options = recipe.algorithm.name, recipe.algorithm.options
    try:
        algorithm = algorithm_class(name)
    except ValueError as error:
        yield Problem("algorithm.name", name, *_said_of(name, error))
        return
    lacks = [method for method in ("advantages", "loss", "finish") if not hasattr(algorithm, method)]
    if lacks:
        fix = "see stages.algorithms.Algorithm"
        yield Problem("algorithm.name", name, f"is not an algorithm: it has no {' and no '.join(lacks)}", fix)
        return
    refused = list(_refusals("algorithm.options", algorithm, options))
    yield from refused
    if not refused:
        try:
            _ = recipe.needs_reference
        except Exception as error:
            fix = "give the class a property needs_reference: whether its loss reads ref_logprobs"
            yield Problem("algorithm.name", name, f"has no needs_reference that can be read ({error!r})", fix)
    if name == "grpo" and recipe.algorithm.group_size < 2:
        size = recipe.algorithm.group_size
        yield Problem("algorithm.group_size", size, "leaves no one to compare with in a group", "use a value >= 2")


def _group_fits_engine(recipe: Recipe) -> Iterator[Problem]:
    size, rows = recipe.algorithm.group_size, recipe.rollout.max_rows
    if rows < size:
        fix = f"set rollout.max_rows >= {size}, or algorithm.group_size <= {rows}"
        yield Problem("rollout.max_rows", rows, f"is less than algorithm.group_size = {size}", fix)


def _row_fits_budget(recipe: Recipe) -> Iterator[Problem]:
    longest = (recipe.prompts.max_prompt_tokens or 0) + recipe.rollout.max_tokens
    if recipe.train.token_budget < longest:
        wrong = f"is less than the {longest} tokens that one prompt and response may have"
        yield Problem("train.token_budget", recipe.train.token_budget, wrong, f"use a value >= {longest}")


def _training_explores(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.temperature == 0:
        wrong = "is greedy: the responses of a group would all be equal, and nothing learned"
        yield Problem("rollout.temperature", 0.0, wrong, "use a value > 0, for example 1.0")


def _cuts_make_sense(recipe: Recipe) -> Iterator[Problem]:
    rollout, plan = recipe.rollout, recipe.staleness_plan
    if rollout.budget >= rollout.max_tokens:
        wrong = f"cuts nothing, as no response is longer than rollout.max_tokens = {rollout.max_tokens}"
        fix = f"use a value < {rollout.max_tokens}, or 0 for no budget"
        yield Problem("rollout.budget", rollout.budget, wrong, fix)
    asked = {"rollout.budget": (rollout.budget, 0), "rollout.on_update": (rollout.on_update, "keep")}
    if rollout.engine == "vllm" and rollout.stop and (rollout.budget or rollout.on_update == "cut"):
        wrong = "would be missed by vLLM where a cut parts one in two"
        yield Problem(
            "rollout.stop", rollout.stop, wrong, "set rollout.budget = 0 and rollout.on_update = 'keep', or stop = []"
        )
    for key, (value, default) in asked.items():
        if value != default and plan.slack == 0:
            wrong = (
                f"cuts responses, but with pipeline.staleness = {plan.bound} and pipeline.window = {plan.window} the run is "
                "the synchronous one bit for bit, and a continued response is rounded otherwise"
            )
            needed = passing_steps(plan.window, plan.groups_per_step) + 1
            yield Problem(key, value, wrong, f"set pipeline.staleness >= {needed}, or {key} = {json.dumps(default)}")


def _window_has_room(recipe: Recipe) -> Iterator[Problem]:
    plan = recipe.staleness_plan
    if plan.window > 1 and plan.slack == 0:
        needed = passing_steps(plan.window, plan.groups_per_step) + 1
        wrong = (
            f"lets no group pass under pipeline.staleness = {plan.bound}: "
            f"only the {plan.groups_per_step} groups of one step would be in flight"
        )
        yield Problem(
            "pipeline.window", plan.window, wrong, f"set pipeline.staleness >= {needed}, or pipeline.window = 1"
        )


def _arena_has_room(recipe: Recipe) -> Iterator[Problem]:
    from orchestration.recipe.planner import arena_bytes

    needed = arena_bytes(recipe)
    if recipe.pipeline.arena < needed:
        wrong = f"is {format_size(recipe.pipeline.arena)}, but {format_size(needed)} may be alive at once"
        fix = f"set pipeline.arena = '{-(-needed // 2**20)}MiB', or lower checkpoint.every or pipeline.staleness"
        yield Problem("pipeline.arena", recipe.pipeline.arena, wrong, fix)


def _tls_files_fit(recipe: Recipe) -> Iterator[Problem]:
    files = {f"pipeline.{name}": getattr(recipe.pipeline, name) for name in TLS_FILES}
    if not any(files.values()):
        return
    for key, value in files.items():
        if not value:
            yield Problem(key, value, "is missing", f"give all of {', '.join(files)}, or none for no TLS")
        elif not os.path.isfile(value):
            yield Problem(key, value, "is no file", "give the path of a PEM file")
    if not recipe.pipeline.serve and recipe.sync.transport != "collective":
        wrong = "serves nobody, so that TLS has nothing to protect"
        yield Problem("pipeline.serve", "", wrong, "set pipeline.serve = '0.0.0.0', or take the tls_ keys out")
    if all(os.path.isfile(value) for value in files.values()):
        try:
            recipe.pipeline.tls_contexts()
        except OSError as error:
            fix = "give a PEM certificate with its own private key, and the authority's certificate"
            yield Problem("pipeline.tls_certificate", recipe.pipeline.tls_certificate, f"cannot be used ({error})", fix)


def _external_fits(recipe: Recipe) -> Iterator[Problem]:
    stages = recipe.external.stages
    for at, stage in enumerate(stages):
        if stage in stages[:at]:
            yield Problem(f"external.stages.{at}", stage, "is listed twice", "list it once")
    if "rollout" in stages and recipe.evaluate.every:
        wrong = "asks for evaluations, which the run's own rollout engine would answer"
        fix = "set evaluate.every = 0, or take 'rollout' out of external.stages"
        yield Problem("evaluate.every", recipe.evaluate.every, wrong, fix)
    if "update" in stages and recipe.train.ranks > 1:
        key = "train.dp" if recipe.train.dp > 1 else "train.tp"
        wrong = "lays out a trainer of the run's own, but external.stages holds 'update'"
        yield Problem(key, getattr(recipe.train, key[6:]), wrong, f"set {key} = 1")


def _reference_is_asked(recipe: Recipe) -> Iterator[Problem]:
    if recipe.ours("reference"):
        return
    try:
        needed = recipe.needs_reference
    except Exception:  # reported for the algorithm itself
        return
    if not needed:
        wrong = f"holds 'reference', which algorithm.name = {recipe.algorithm.name!r} with these options never asks"
        fix = "set algorithm.options.kl_coef > 0, or take 'reference' out"
        yield Problem("external.stages", recipe.external.stages, wrong, fix)


def _schedule_fits(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.warmup_steps > recipe.train.steps:
        wrong = f"is more than train.steps = {recipe.train.steps}"
        yield Problem("train.warmup_steps", recipe.train.warmup_steps, wrong, f"use a value <= {recipe.train.steps}")


def _evaluation_has_prompts(recipe: Recipe) -> Iterator[Problem]:
    evaluate = recipe.evaluate
    if evaluate.every and not recipe.prompts.held_out:
        wrong = "holds nothing out for evaluation"
        yield Problem("prompts.held_out", recipe.prompts.held_out, wrong, "use for example 0.1, or evaluate.every = 0")
    if evaluate.every and evaluate.samples > evaluate.prompts:
        fix = f"use a value <= {evaluate.prompts}"
        yield Problem("evaluate.samples", evaluate.samples, f"is more than evaluate.prompts = {evaluate.prompts}", fix)


def _threads_exist(recipe: Recipe) -> Iterator[Problem]:
    cores = os.cpu_count() or 1
    for key, threads in (("rollout.threads", recipe.rollout.threads), ("train.threads", recipe.train.threads)):
        if threads > cores:
            yield Problem(
                key, threads, f"is more than the {cores} cores of this machine", f"use 0 (automatic) .. {cores}"
            )


def _ranks_fit(recipe: Recipe) -> Iterator[Problem]:
    train, rows = recipe.train, recipe.train.groups_per_step * recipe.algorithm.group_size
    together = f"train.dp = {train.dp} times train.tp = {train.tp}"
    if train.dp > rows:
        wrong = f"leaves ranks without one of the {rows} samples of a step"
        yield Problem("train.dp", train.dp, wrong, f"use a value <= {rows}")
    if train.ranks > 1 and train.engine == "mock":
        key = "train.dp" if train.dp > 1 else "train.tp"
        yield Problem(key, getattr(train, key[6:]), "is more than the mock engine has", f"set {key} = 1")
    elif train.ranks > 1 and recipe.launch.launcher == "inline":
        wrong = f"keeps all workers in one process, but {together} is {train.ranks} ranks, a process each"
        yield Problem("launch.launcher", "inline", wrong, "set launch.launcher = 'process'")
    if train.ranks > 1 and ":" in train.device:
        fix = f"write {train.device.partition(':')[0]!r}: each rank takes one of them"
        yield Problem("train.device", train.device, f"is one device for {train.ranks} ranks", fix)


def _ranks_have_cores(recipe: Recipe) -> Iterator[Problem]:
    ranks, cores = recipe.train.ranks, os.cpu_count() or 1
    if ranks <= cores:
        return
    from stages.device import on_cpu  # brings torch, which other recipes are checked without

    if on_cpu(recipe.train.device):
        key = "train.dp" if recipe.train.dp > 1 else "train.tp"
        wrong = f"makes {ranks} ranks, which is more than the {cores} cores of this machine"
        yield Problem(key, getattr(recipe.train, key[6:]), wrong, f"keep train.dp times train.tp <= {cores}")


def heads_divide(recipe: Recipe) -> Iterator[Problem]:
    """Whether ``train.tp`` ranks can share the model's heads."""
    from orchestration.recipe.planner import heads_of

    tp = recipe.train.tp
    heads = heads_of(recipe) if tp > 1 else {}
    uneven = {name: count for name, count in heads.items() if count % tp}
    if uneven:
        said = " and ".join(f"{name} = {count}" for name, count in uneven.items())
        wrong = f"cannot share the model's {said} evenly"
        both = math.gcd(*heads.values())
        fits = [str(size) for size in range(1, both + 1) if both % size == 0]
        yield Problem("train.tp", tp, wrong, f"use one of: {', '.join(fits)}")


def _precision_means_something(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.precision == "mixed" and recipe.model.dtype == "float32":
        wrong = "has no effect with model.dtype = 'float32', in which everything is float32"
        yield Problem("train.precision", "mixed", wrong, "set model.dtype = 'bfloat16', or train.precision = 'model'")


def _turns_can_be_taken(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.colocated:
        return
    rollout, train, together = recipe.rollout, recipe.train, "launch.placement = 'colocated'"
    for key, engine in (("rollout.engine", rollout.engine), ("train.engine", train.engine)):
        if engine != "torch":
            wrong = f"cannot give its device away, as {together} asks for"
            fix = f"set {key} = 'torch', or launch.placement = 'separate'"
            yield Problem(key, engine, wrong, fix)
    if rollout.workers not in (1, train.ranks):
        wrong = f"is not the {train.ranks} ranks that train, each of which has a rollout engine with {together}"
        yield Problem("rollout.workers", rollout.workers, wrong, "leave it out: it follows from train.dp and train.tp")
    for stage in ("rollout", "update"):
        if stage in recipe.external.stages:
            wrong = f"gives {stage!r} to another program, while {together} has both of the run's own on one device"
            yield Problem("external.stages", recipe.external.stages, wrong, "set launch.placement = 'separate'")
    if recipe.sync.transport != "shared_memory":
        wrong = f"is between separate devices, and with {together} trainer and engine share theirs"
        yield Problem("sync.transport", recipe.sync.transport, wrong, "leave it out: they exchange slices")
    if rollout.device != train.device:
        wrong = f"is not train.device = {train.device!r}, which it takes turns with by {together}"
        yield Problem("rollout.device", rollout.device, wrong, f"set rollout.device = {train.device!r}")


# Each with the keys (or sections) it reads: it is left out when one of them is already known to be wrong.
CHECKS: tuple[tuple[Callable[[Recipe], Iterator[Problem]], tuple[str, ...]], ...] = (
    (_engines_resolve, ("rollout.engine", "rollout.options", "train.engine", "train.options")),
    (_mock_goes_with_mock, ("model.source", "rollout.engine", "train.engine")),
    (_mock_takes_options, ("rollout.engine", "rollout.mock", "train.engine", "train.mock")),
    (
        _vllm_fits,
        (
            "rollout.engine",
            "rollout.vllm",
            "rollout.top_k",
            "rollout.top_p",
            "rollout.temperature",
            "rollout.stop",
            "rollout.max_tokens",
            "prompts.max_prompt_tokens",
        ),
    ),
    (_task_takes_config, ("prompts",)),
    (_rewards_resolve, ("reward.functions", "external")),
    (_external_fits, ("external", "evaluate.every", "train.dp", "train.tp")),
    (_reference_is_asked, ("external", "algorithm")),
    (_algorithm_takes_options, ("algorithm",)),
    (_group_fits_engine, ("algorithm.group_size", "rollout.max_rows")),
    (_row_fits_budget, ("prompts.max_prompt_tokens", "rollout.max_tokens", "train.token_budget")),
    (_training_explores, ("rollout.temperature",)),
    (_cuts_make_sense, ("rollout", "pipeline.staleness", "pipeline.window", "train.groups_per_step")),
    (_window_has_room, ("pipeline.window", "pipeline.staleness", "train.groups_per_step")),
    (
        _arena_has_room,
        (
            "pipeline.arena",
            "pipeline.window",
            "pipeline.staleness",
            "train.groups_per_step",
            "algorithm.group_size",
            "prompts.max_prompt_tokens",
            "rollout.max_tokens",
            "rollout.budget",
            "rollout.on_update",
            "checkpoint.every",
            "launch.placement",
        ),
    ),
    (_tls_files_fit, ("pipeline.serve", "sync.transport", *(f"pipeline.{name}" for name in TLS_FILES))),
    (_schedule_fits, ("train.warmup_steps", "train.steps")),
    (_evaluation_has_prompts, ("evaluate", "prompts.held_out")),
    (_threads_exist, ("rollout.threads", "train.threads")),
    (
        _ranks_fit,
        (
            "train.dp",
            "train.tp",
            "train.engine",
            "train.device",
            "train.groups_per_step",
            "algorithm.group_size",
            "launch.launcher",
        ),
    ),
    (heads_divide, ("train.tp", "model.source")),
    (_ranks_have_cores, ("train.dp", "train.tp", "train.device")),
    (_precision_means_something, ("train.precision", "model.dtype")),
    (
        _turns_can_be_taken,
        (
            "launch.placement",
            "external",
            "sync.transport",
            "rollout.engine",
            "rollout.workers",
            "rollout.device",
            "train.engine",
            "train.device",
            "train.dp",
            "train.tp",
        ),
    ),
)
