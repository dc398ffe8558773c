"""What follows from a recipe, computed without running it: flow, tokens, memory. ``asyncdock check`` prints it.

Memory figures are worst cases: every prompt and every response as long as the recipe lets it be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.recipe.model_files import parameters_in, text_config
from stages.prompts.options import PromptLimits

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe
    from stages.columns import Flow
    from stages.resharding.layout import Layout, ModelState, Names
    from stages.resharding.plan import ReshardPlan

BLOCK_BYTES = 1024  # header, offsets, scalars and alignment of one written block; a sample lies in at most four
TEXT_BYTES = 8  # of a prompt's text and other columns, for each of its tokens
LONGEST_PROMPT = 2048  # for which the arena must have room where the recipe sets no prompts.max_prompt_tokens
# Known here, as loading the code that makes these models takes seconds. Their embeddings serve as their heads.
PARAMETERS = {"smollm2": 134_515_008, "tiny": 77_184}
HEADS = {
    "smollm2": {"num_attention_heads": 9, "num_key_value_heads": 3},
    "tiny": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
CONTEXTS = {"smollm2": 8192, "tiny": 512}
WEIGHT_SLOTS = 2  # versions that the trainer's weight store keeps
VLLM_SLOTS = 1  # that each vLLM engine's own store keeps, from which vLLM's workers load
SLAB_SHARE = 1 / 8  # of the arena, in all workers' slabs
GATE_SHARE = 0.75  # prompts enter only while less than this share of the arena is taken


@dataclass(frozen=True)
class Turns:
    """Bytes of one rank of a colocated run, of the rank that has most: on the device while it trains (activations on top),
    while it generates (``caches`` on top, at most), and in between, with ``buckets`` of it; and in host memory meanwhile."""

    training: int
    generating: int
    between: int
    buckets: int
    caches: int
    host: int


@dataclass(frozen=True)
class Plan:
    """The derived numbers of a recipe. Sizes are bytes, ages are policy versions."""

    bound: int
    window: int
    slack: int
    max_age: int
    groups_per_step: int
    groups_in_flight: int
    rows_in_flight: int
    rows_per_step: int
    rows_retained: int
    """Rows of trained steps that no checkpoint covers yet; a restarted trainer replays them."""
    arena_bytes: int
    """See :func:`arena_bytes`."""
    prompt_tokens: int
    """See :func:`prompt_limits`."""
    tokens_per_step: int
    decode_rows: int
    """Responses that all rollout workers together decode at the same time."""
    parameters: int | None
    """Weights of the model; None for the mock model."""
    train_ranks: int
    train_bytes: int
    """Of one rank: its shards of weights, gradients and AdamW's two moments, all in the model's dtype, or in float32 with
    mixed precision. Activations and the layers that are gathered to be computed come on top."""
    rollout_bytes: int
    """Weights of all rollout engines, and the copy that each verifies before it swaps (not in a colocated run, nor where
    vLLM's workers receive by themselves). KV caches come on top."""
    reference_bytes: int
    slot_bytes: int
    """Versions of the weights in shared memory: those that the trainer publishes, and what each vLLM engine hands to its
    workers."""
    turns: Turns | None
    """Of a colocated run."""


def plan(recipe: Recipe) -> Plan:
    """Derive the numbers of ``recipe``. Nothing big is loaded."""
    flow, size = recipe.staleness_plan, recipe.algorithm.group_size
    rows_per_step = flow.groups_per_step * size
    parameters = parameters_of(recipe)
    weights = (parameters or 0) * {"float32": 4, "bfloat16": 2}[recipe.model.dtype]
    masters = 4 if recipe.train.precision == "mixed" else {"float32": 4, "bfloat16": 2}[recipe.model.dtype]
    # vLLM's workers then receive into the slot that is counted below.
    straight = recipe.rollout.engine == "vllm" and recipe.sync.transport == "collective"
    return Plan(
        bound=flow.bound,
        window=flow.window,
        slack=flow.slack,
        max_age=flow.max_age,
        groups_per_step=flow.groups_per_step,
        groups_in_flight=flow.groups_in_flight,
        rows_in_flight=flow.groups_in_flight * size,
        rows_per_step=rows_per_step,
        rows_retained=_steps_retained(recipe) * rows_per_step,
        arena_bytes=arena_bytes(recipe),
        prompt_tokens=prompt_limits(recipe).tokens or 0,
        tokens_per_step=rows_per_step * recipe.rollout.max_tokens,
        decode_rows=recipe.replicas * recipe.rollout.max_rows,
        parameters=parameters,
        train_ranks=recipe.train.ranks,
        train_bytes=-(-4 * (parameters or 0) * masters // recipe.train.ranks),
        rollout_bytes=(1 if recipe.colocated or straight else 2) * weights * recipe.replicas,
        reference_bytes=weights if recipe.needs_reference else 0,
        slot_bytes=0 if recipe.colocated else _slots(recipe) * weights,
        turns=turns(recipe) if recipe.colocated and parameters else None,
    )


def _slots(recipe: Recipe) -> int:
    engines = recipe.rollout.workers if recipe.rollout.engine == "vllm" and recipe.runs_stage("rollout") else 0
    return WEIGHT_SLOTS + VLLM_SLOTS * engines


def flow_of(recipe: Recipe) -> Flow:
    """What this recipe's samples are made of."""
    from stages.columns import Flow

    return Flow(rewards=len(recipe.reward.functions), reference=recipe.needs_reference)


def arena_bytes(recipe: Recipe) -> int:
    """What the arena must hold so that the run can never come to a stand: every sample in flight and every one that no
    checkpoint covers yet, all as long as they may be, with the share that the gate leaves free."""
    # int64 ids and the text they were made from. The prompts admitted together lie in one block, which goes as a whole.
    prompt = (8 + TEXT_BYTES) * (recipe.prompts.max_prompt_tokens or LONGEST_PROMPT) + BLOCK_BYTES
    # What a cut response is parked with.
    cut = bool(recipe.rollout.budget or recipe.rollout.on_update == "cut" or recipe.colocated)
    return int((_prompts(recipe) * prompt + _response_bytes(recipe, parked=cut)) / GATE_SHARE / (1 - SLAB_SHARE))


def _prompts(recipe: Recipe) -> int:
    """Prompts that the arena may have to hold."""
    flow = recipe.staleness_plan
    return 2 * flow.groups_in_flight + _steps_retained(recipe) * flow.groups_per_step


def _response_bytes(recipe: Recipe, *, parked: bool) -> int:
    """Of all responses that the arena may have to hold; ``parked``: with those that are cut and go on."""
    flow = recipe.staleness_plan
    retained = _steps_retained(recipe) * flow.groups_per_step
    # int64 ids and float32 logprobs of rollout and of a reference, in one block for each stage that writes.
    response = (8 + 4 + 4) * recipe.rollout.max_tokens + 4 * BLOCK_BYTES
    # A block of parked rows goes with the last of them.
    progress = 2 * ((8 + 4) * recipe.rollout.max_tokens + BLOCK_BYTES) if parked else 0
    return recipe.algorithm.group_size * (
        (flow.groups_in_flight + retained) * response + flow.groups_in_flight * progress
    )


def prompt_limits(recipe: Recipe) -> PromptLimits:
    """How long a prompt may be: ``prompts.max_prompt_tokens`` tokens, or as many as the arena has room for; never more than
    the model's context leaves beside a response. What a resumed run may have otherwise changes none of it."""
    whole = recipe.pipeline.arena * GATE_SHARE * (1 - SLAB_SHARE) - _response_bytes(recipe, parked=True)
    room = int(whole / _prompts(recipe)) - BLOCK_BYTES  # bytes of one prompt
    tokens, why = recipe.prompts.max_prompt_tokens, "prompts.max_prompt_tokens"
    if tokens is None:
        tokens, why = max(LONGEST_PROMPT, room // (8 + TEXT_BYTES)), "for which pipeline.arena has room"
    nbytes = max(TEXT_BYTES * tokens, room - 8 * tokens)
    context = context_of(recipe)
    if context is not None and context - recipe.rollout.max_tokens < tokens:
        tokens = context - recipe.rollout.max_tokens
        why = f"the model's context of {context} less rollout.max_tokens = {recipe.rollout.max_tokens}"
    return PromptLimits(tokens, why, nbytes)


def slab_bytes(recipe: Recipe) -> int:
    """What each writing worker may hold open: one slab, and one whose last rows are not released yet."""
    from orchestration.run.kinds import KINDS
    from pipeline.warehouse.dock import SLAB

    writers = sum(len(kind.numbers(recipe)) for kind in KINDS.values() if kind.writes)
    return min(SLAB, int(recipe.pipeline.arena * SLAB_SHARE / (2 * writers)))


def trained_state(recipe: Recipe) -> ModelState:
    """The parameters of the recipe's model in the dtype that they are trained in: float32 with mixed precision."""
    import torch

    from stages.models import load_config
    from stages.resharding.layout import model_state

    mixed = recipe.train.precision == "mixed"
    return model_state(load_config(recipe.model.source), torch.float32 if mixed else getattr(torch, recipe.model.dtype))


def train_layout(recipe: Recipe) -> Layout:
    """What ``train.dp`` and ``train.tp`` ask for."""
    from stages.resharding.layout import Layout

    return Layout(dp_shard=recipe.train.dp, tp=recipe.train.tp)


def rollout_layout(recipe: Recipe, ranks: int) -> Layout:
    """What the recipe's rollout engines hold when they are on ``ranks`` ranks: a whole model on each, or on each
    ``vllm.tensor_parallel`` of them."""
    from stages.resharding.layout import Layout

    tp = recipe.rollout.vllm.tensor_parallel if recipe.rollout.engine == "vllm" else 1
    return Layout(dp_replicate=max(1, ranks // tp), tp=tp)


def beyond_engine(layout: Layout) -> list[str]:
    """The parts of ``layout`` that the train engine, which shards by ``dp_shard`` and ``tp``, does not have."""
    others = {name: getattr(layout, name) for name in ("pp", "dp_replicate", "ep", "etp")}
    return [f"{name}={size}" for name, size in others.items() if size not in (None, 1)]


def reshard_plan(
    recipe: Recipe,
    names: Names = "hf",
    *,
    model: ModelState | None = None,
    train: Layout | None = None,
    rollout: Layout | None = None,
    bucket_bytes: int | None = None,
    ranks_per_node: int | None = None,
) -> ReshardPlan:
    """The swap of a colocated run, with the tensors of the rollout named as its engine does. What is None is the recipe's
    own: :func:`trained_state`, :func:`train_layout`, :func:`rollout_layout`, ``sync.bucket``. Raises LayoutError where a
    layout does not fit the model."""
    import torch

    from stages.engines.plans import Ranks
    from stages.engines.torch.sharded import placement
    from stages.resharding.layout import place
    from stages.resharding.plan import plan_reshard

    model, train = model or trained_state(recipe), train or train_layout(recipe)
    # Where the engine can hold it, as the engine does: what is outside the layers it cuts over all ranks.
    source = place(model, train) if beyond_engine(train) else placement(model, Ranks(0, train.dp_shard, train.tp))
    target = place(
        model,
        rollout or rollout_layout(recipe, source.world),
        names=names,
        dtype=getattr(torch, recipe.model.dtype),
    )
    return plan_reshard(source, target, bucket_bytes=bucket_bytes or recipe.sync.bucket, ranks_per_node=ranks_per_node)


def turns(recipe: Recipe) -> Turns:
    """What the ranks of a colocated run hold, turn by turn."""
    from stages.resharding.plan import Phase, adamw_bytes, memory

    plan = reshard_plan(recipe)
    phases = {phase.phase: phase for phase in memory(plan, adamw_bytes(plan.source, gradients=False))}
    return Turns(
        training=4 * max(plan.source.nbytes(rank) for rank in range(plan.world)),
        generating=max(phases[Phase.GENERATE].live),
        between=max(phases[Phase.GATHER].live),
        buckets=max(plan.temporary),
        caches=_cache_bytes(recipe),
        host=max(phases[Phase.PREFETCH].host),
    )


def _cache_bytes(recipe: Recipe) -> int:
    """Keys and values of one engine with all of its rows and prompts as long as they may be, and half as much room again,
    by which it grows."""
    from stages.models import load_config

    config, rollout = load_config(recipe.model.source).get_text_config(), recipe.rollout
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item = {"float32": 4, "bfloat16": 2}[recipe.model.dtype]
    tokens = rollout.max_rows * (rollout.max_tokens + (prompt_limits(recipe).tokens or 0))
    return math.ceil(1.5**2 * 2 * item * config.num_hidden_layers * heads * width * tokens)


def _steps_retained(recipe: Recipe) -> int:
    return min(recipe.checkpoint.every, recipe.train.steps)


def parameters_of(recipe: Recipe) -> int | None:
    """Weights of the recipe's model, tied ones once. For a path it reads the headers of the safetensors files, nothing
    more; None for the mock model, and where there are no such files."""
    source = recipe.model.source
    if source == "mock":
        return None
    return PARAMETERS[source] if source in PARAMETERS else parameters_in(source) or None


def checkpoint_bytes(recipe: Recipe) -> int:
    """Of one checkpoint: the model in its dtype, and the trained weights with AdamW's two moments."""
    if not recipe.runs_stage("update"):
        return 0
    size = {"float32": 4, "bfloat16": 2}
    trained = "float32" if recipe.train.precision == "mixed" else recipe.model.dtype
    return (parameters_of(recipe) or 0) * (size[recipe.model.dtype] + 3 * size[trained])


def heads_of(recipe: Recipe) -> dict[str, int]:
    """The heads that tensor-parallel ranks share, by their names in the model's config; empty where there is none."""
    source = recipe.model.source
    if source in HEADS:
        return HEADS[source]
    config = text_config(source)
    return {name: config[name] for name in HEADS["tiny"] if isinstance(config.get(name), int) and config[name] > 0}


def context_of(recipe: Recipe) -> int | None:
    """Tokens that a prompt and its response may have with the recipe's model and engines; None where it is not known."""
    source, rollout = recipe.model.source, recipe.rollout
    if rollout.engine == "vllm" and rollout.vllm.max_model_len:
        return rollout.vllm.max_model_len
    if source == "mock" or source in CONTEXTS:
        return CONTEXTS.get(source)
    config = text_config(source)
    found = [config.get("max_position_embeddings", config.get("n_positions"))]
    layers = config.get("layer_types") or ["sliding_attention"]
    windowed = config.get("use_sliding_window", True) and "sliding_attention" in layers
    if windowed and "torch" in (rollout.engine, recipe.train.engine):  # which attend inside one window only
        found.append(config.get("sliding_window"))
    return min((size for size in found if isinstance(size, int) and size > 0), default=None)
