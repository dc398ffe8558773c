"""Derives groups in flight, tokens and memory from a recipe, without running it.

``asyncdock check`` prints them.

Memory figures are worst cases: every prompt and every response as long as the recipe allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestration.recipe.flow import LONGEST_PROMPT, column_bytes, computes_reference, flow_of
from orchestration.recipe.model_files import experts_of, parameters_in, text_config
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.sizes.memory_parts import (
    ITEM_BYTES,
    Engine,
    Sizes,
    cache_bytes,
    draft_bytes,
    memory,
    optimizer_bytes,
    rollout_state,
    train_state,
)
from orchestration.recipe.sizes.notices import notices
from pipeline.problems import Problem
from stages.flow.catalogue import expert_type
from stages.flow.declarations import itemsize
from stages.flow.document import document
from stages.prompts.rows.options import PromptLimits

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe
    from stages.adapters.options import AdapterOptions
    from stages.parallel.layout import Layout
    from stages.parallel.placement import ModelState, Names, Placement
    from stages.resharding.plan import ReshardPlan


# header, offsets, scalars and alignment of one written block; a sample lies in at most four
BLOCK_BYTES = 1024
TEXT_BYTES = 8  # of a prompt's text and other columns, for each of its tokens
# Written down here because the code that makes these models takes seconds to load. Embeddings are
# their output heads too.
PARAMETERS = {"smollm2": 134_515_008, "tiny": 77_184, "tiny-moe": 250_368}
_TINY: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 49,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2": {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    },
    "tiny": _TINY,
    "tiny-moe": _TINY | _EXPERTS,
    "mock": {"vocab_size": 49},  # the tokenizer is that of the tiny model
}
HEADS = ("num_attention_heads", "num_key_value_heads")
WEIGHT_SLOTS = 2  # versions in the trainer's weight store
VLLM_SLOTS = 1  # versions that vLLM's workers load from: a node's, or an engine's adapters
SLAB_SHARE = 1 / 8  # of the arena, in all workers' slabs
GATE_SHARE = 0.75  # prompts enter only while less than this share of the arena is taken


@dataclass(frozen=True)
class Turns:
    """Bytes of the largest rank of a colocated run.

    On the device: while it trains (without activations), while it generates (without KV caches, at
    most ``caches``; 0: not known), and in between, ``buckets`` included. And in ``host`` memory while it
    generates.
    """

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
    """Rows of trained steps that no checkpoint covers yet, which a restarted trainer replays, and of
    those that later steps may train again."""
    arena_bytes: int
    prompt_tokens: int
    tokens_per_step: int
    decode_rows: int
    """Responses that all rollout workers together decode at the same time."""
    parameters: int | None
    """Weights of the model; None for the mock model."""
    trained_parameters: int | None
    """Those that are trained and published: all of them, or those of adapters."""
    train_ranks: int
    train_bytes: int
    """Shards of one rank: weights, gradients and AdamW's two moments, in the model's dtype, or in
    float32 with mixed precision, where one rank alone also holds the copy in which it computes.
    Without activations and gathered layers."""
    rollout_bytes: int
    """Weights of all rollout engines, with the copy that each verifies before it swaps (none in a
    colocated run, nor where vLLM's workers receive by themselves). Without KV caches."""
    reference_bytes: int
    slot_bytes: int
    """Versions of the weights in shared memory: the trainer's, and those from which vLLM's workers
    load."""
    copy_bytes: int
    """Host memory of one rank for the copy from which checkpoints are written beside training:
    weights and moments."""
    turns: Turns | None
    """Only of a colocated run."""
    memory: dict[Engine, dict[str, int]]
    """Derived bytes of one rank of the torch train engine at the peak of a step, and of one torch
    rollout engine, by part, with all rows as long as the recipe allows. Empty where the model's
    sizes are not known."""
    flow: dict[str, Any]
    """Stages, and the columns between them: see :func:`stages.flow.document.document`."""
    picked: str
    """Options of the algorithm that follow from the staleness bound, and why; "" when none does."""
    notices: list[str]
    """What is allowed, and better otherwise: see :mod:`orchestration.recipe.sizes.notices`."""


def plan(recipe: Recipe) -> Plan:
    """Derive the numbers of ``recipe``. Loads no weights."""
    flow = recipe.staleness_plan
    same = ("bound", "window", "slack", "max_age", "groups_per_step", "groups_in_flight")
    parameters = parameters_of(recipe)
    trained = trained_parameters(recipe) or 0
    sizes = Sizes.of(config_of(recipe.model.source))
    training = train_state(recipe, sizes, parameters or 0, trained)
    published = trained * ITEM_BYTES[recipe.model.dtype]
    reference = parameters_of_source(recipe.model.reference or recipe.model.source) or 0
    # vLLM's workers map the node's copy, once for all of them, but for adapters
    stores = (
        (recipe.rollout.workers if recipe.adapters else 1)
        if recipe.rollout.engine == "vllm" and recipe.runs_stage("rollout")
        else 0
    )
    return Plan(
        **{name: getattr(flow, name) for name in same},
        rows_in_flight=flow.groups_in_flight * recipe.algorithm.group_size,
        rows_per_step=recipe.rows_per_step,
        rows_retained=_steps_retained(recipe) * recipe.rows_per_step,
        arena_bytes=arena_bytes(recipe),
        prompt_tokens=prompt_limits(recipe).tokens or 0,
        tokens_per_step=recipe.rows_per_step * recipe.longest_response,
        decode_rows=recipe.replicas * recipe.rollout.max_rows,
        parameters=parameters,
        trained_parameters=trained_parameters(recipe),
        train_ranks=recipe.train.ranks,
        train_bytes=training["weights"] + training["optimizer"] + training["gradients"],
        rollout_bytes=sum(rollout_state(recipe, parameters or 0, trained).values())
        * recipe.replicas,
        reference_bytes=reference * ITEM_BYTES[recipe.model.dtype]
        if computes_reference(recipe)
        else 0,
        slot_bytes=0 if recipe.colocated else (WEIGHT_SLOTS + VLLM_SLOTS * stores) * published,
        copy_bytes=training["checkpoint copy"] if recipe.runs_stage("update") else 0,
        turns=turns(recipe) if recipe.colocated and parameters else None,
        memory=memory_of(recipe),
        flow=document(flow_of(recipe)),
        picked=recipe.typed_algorithm.under(recipe.oldest_trained)[1],
        notices=list(map(str, notices_of(recipe))),
    )


def memory_of(recipe: Recipe) -> dict[Engine, dict[str, int]]:
    """See :attr:`Plan.memory`."""
    source = recipe.model.source
    policy, reference, critic = (
        (config_of(each), parameters_of_source(each))
        for each in (source, recipe.model.reference or source, recipe.critic.source or source)
    )
    prompt = prompt_limits(recipe).tokens or 0
    parts = memory(recipe, policy, reference, critic, prompt, trained_parameters(recipe))
    if "rollout" in parts and (draft := recipe.rollout.draft_model):
        model = config_of(draft), parameters_of_source(draft)
        parts["rollout"]["draft model"] = draft_bytes(recipe, model, prompt)
    return parts


def arena_bytes(recipe: Recipe) -> int:
    """Bytes that the arena needs so that the run never blocks: all samples in flight and all
    that no checkpoint covers yet or a later step may train again, as long as they may be, and the
    share that the gate leaves free."""
    # int64 ids and their text. The prompts admitted together are one block, which is released as a
    # whole.
    prompt = (8 + TEXT_BYTES) * (recipe.prompts.max_prompt_tokens or LONGEST_PROMPT) + BLOCK_BYTES
    parked = recipe.rollout.cuts or recipe.colocated or recipe.has_environment
    steps = _steps_retained(recipe)
    needed = _prompts(recipe, steps) * prompt + _response_bytes(recipe, steps, parked=parked)
    return int(needed / GATE_SHARE / (1 - SLAB_SHARE))


def share_of_trained(recipe: Recipe) -> float:
    """The share of the arena that may be taken at the end of a step so that the run still never
    blocks: beside it lies what is in flight, with rows as long as they may be."""
    limits = prompt_limits(recipe)
    prompt = 8 * (limits.tokens or 0) + (limits.nbytes or 0) + BLOCK_BYTES
    in_flight = _prompts(recipe, 0) * prompt + _response_bytes(recipe, 0, parked=True)
    return GATE_SHARE * (1 - SLAB_SHARE) - in_flight / recipe.pipeline.arena


def _steps_retained(recipe: Recipe) -> int:
    # one is made while the checkpoint is written
    return min(recipe.checkpoint.every + 1 + recipe.replay_versions, recipe.train.steps)


def _prompts(recipe: Recipe, steps: int) -> int:
    """Prompts in the arena, at most, with those of so many trained ``steps``."""
    flow = recipe.staleness_plan
    return 2 * flow.groups_in_flight + steps * flow.groups_per_step


def _response_bytes(recipe: Recipe, steps: int, *, parked: bool) -> int:
    """Bytes of all responses in the arena, at most, with those of so many trained ``steps``;
    ``parked``: including those that are cut and continued."""
    flow = recipe.staleness_plan
    tokens = recipe.longest_response
    retained = steps * flow.groups_per_step
    # int64 ids and float32 logprobs of rollout and of a reference, in one block for each stage that
    # writes.
    routed = routed_bytes(recipe)
    response = (
        (8 + 4 + 4) * tokens
        + routed
        + column_bytes(recipe)
        + (4 + len(recipe.stages)) * BLOCK_BYTES
    )
    # A block of parked rows is released with the last of them.
    progress = 2 * ((8 + 4) * tokens + routed + BLOCK_BYTES) if parked else 0
    groups_bytes = (flow.groups_in_flight + retained) * response + flow.groups_in_flight * progress
    return recipe.algorithm.group_size * groups_bytes


def routed_bytes(recipe: Recipe) -> int:
    """Bytes of a sample's column ``routed_experts``, at most; 0 for a run without."""
    if recipe.train.router == "own":
        return 0
    experts, chosen = experts_of(config_of(recipe.model.source))
    tokens = (recipe.prompts.max_prompt_tokens or LONGEST_PROMPT) + recipe.longest_response - 1
    return tokens * chosen * itemsize(expert_type(experts))


def prompt_limits(recipe: Recipe) -> PromptLimits:
    """How long a prompt may be: ``prompts.max_prompt_tokens``, or else what the arena has room for;
    never more than the model's context leaves beside a response."""
    steps = _steps_retained(recipe)
    available = recipe.pipeline.arena * GATE_SHARE * (1 - SLAB_SHARE) - _response_bytes(
        recipe, steps, parked=True
    )
    room = int(available / _prompts(recipe, steps)) - BLOCK_BYTES  # bytes of one prompt
    tokens = recipe.prompts.max_prompt_tokens
    why = "prompts.max_prompt_tokens"
    if tokens is None:
        tokens = max(LONGEST_PROMPT, room // (8 + TEXT_BYTES))
        why = "for which pipeline.arena has room"
    nbytes = max(TEXT_BYTES * tokens, room - 8 * tokens)
    context = context_of(recipe)
    if context is not None and context - recipe.longest_response < tokens:
        tokens = context - recipe.longest_response
        why = (
            f"the model's context of {context} less {recipe.longest_response_key} = "
            f"{recipe.longest_response}"
        )
    return PromptLimits(tokens, why, nbytes, recipe.longest_response)


def slab_bytes(recipe: Recipe) -> int:
    """Bytes of a slab: each writing worker has one open, and one with rows that are not released
    yet."""
    from orchestration.recipe.worker_kinds import KINDS
    from pipeline.warehouse.dock import SLAB

    writers = sum(len(kind.numbers(recipe)) for kind in KINDS.values() if kind.writes)
    return min(SLAB, int(recipe.pipeline.arena * SLAB_SHARE / (2 * writers)))


def trained_state(recipe: Recipe) -> ModelState:
    """The parameters of the recipe's model in the dtype in which they are trained: float32 with
    mixed precision."""
    return _state_of(recipe.model.source, recipe.trained_dtype)


@lru_cache(maxsize=16)  # seconds for a large model
def _state_of(source: str, dtype: str) -> ModelState:
    import torch

    from stages.model.load import load_config
    from stages.parallel.placement import model_state

    return model_state(load_config(source), getattr(torch, dtype))


def held_bytes(recipe: Recipe, source: Placement) -> tuple[int, ...]:
    """Bytes that each rank holds beside the weights that it trains, between two steps: the
    optimizer's state, and with mixed precision on one rank the copy in which it computes."""
    sizes = Sizes.of(config_of(recipe.model.source))
    item = ITEM_BYTES[recipe.trained_dtype]
    of_state = tuple(
        optimizer_bytes(recipe, sizes, source.nbytes(rank) // item, source.world)
        for rank in range(source.world)
    )
    if not (recipe.mixed_precision and source.world == 1):
        return of_state
    return (
        of_state[0] + source.nbytes(0) * ITEM_BYTES[recipe.model.dtype] // ITEM_BYTES["float32"],
    )


def rollout_layout(recipe: Recipe, ranks: int) -> Layout:
    """The layout of the recipe's rollout engines on ``ranks`` ranks: a whole model on each one, or
    on each ``vllm.tensor_parallel`` of them."""
    from stages.parallel.layout import Layout

    tp = recipe.rollout.vllm.tensor_parallel if recipe.rollout.engine == "vllm" else 1
    return Layout(dp_replicate=max(1, ranks // tp), tp=tp)


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
    """The swap of a colocated run.

    ``names``: of the rollout engine's tensors. Defaults are the recipe's own:
    :func:`trained_state`, that of ``train``, :func:`rollout_layout`, ``sync.bucket``. Raises
    LayoutError where a layout does not fit the model.
    """
    import torch

    from stages.parallel.placement import place, train_placement
    from stages.resharding.plan import plan_reshard

    model = model or trained_state(recipe)
    train = train or recipe.train.layout
    # A layout that the train engine has is placed as the engine does: what is outside the layers is
    # cut over all ranks.
    source = place(model, train) if train.beyond_train_engine else train_placement(model, train)
    target = place(
        model,
        rollout or rollout_layout(recipe, source.world),
        names=names,
        dtype=getattr(torch, recipe.model.dtype),
    )
    return plan_reshard(
        source,
        target,
        bucket_bytes=bucket_bytes or recipe.sync.bucket,
        ranks_per_node=ranks_per_node,
    )


def turns(recipe: Recipe) -> Turns:
    """Memory of a colocated run's ranks while they train, generate, and swap."""
    from stages.resharding.plan import Phase
    from stages.resharding.plan import memory as memory_of_swap

    sizes = Sizes.of(config_of(recipe.model.source))
    caches = 0
    if sizes is not None:
        caches = cache_bytes(recipe, sizes, prompt_limits(recipe).tokens or 0)
    if recipe.adapters:  # the base stays where it is, and so does what the adapters' training holds
        ranks = recipe.train.ranks
        item = ITEM_BYTES[recipe.model.dtype]
        learned = trained_parameters(recipe) or 0
        base = (parameters_of(recipe) or 0) * item
        shard = -(-learned * ITEM_BYTES[recipe.trained_dtype] // ranks)
        # the engine's, and those in which training computes
        copies = 2 if recipe.mixed_precision and ranks == 1 else 1
        weights = base + (base // ranks if ranks > 1 else 0) + copies * learned * item
        training = weights + 4 * shard
        resting = weights + 3 * shard
        return Turns(training, resting, training, buckets=0, caches=caches, host=0)
    plan = reshard_plan(recipe)
    held = held_bytes(recipe, plan.source)
    phases = {phase.phase: phase for phase in memory_of_swap(plan, held)}
    return Turns(  # with gradients while it trains
        training=max(2 * plan.source.nbytes(rank) + held[rank] for rank in range(plan.world)),
        generating=max(phases[Phase.GENERATE].live),
        between=max(phases[Phase.GATHER].live),
        buckets=max(plan.temporary),
        caches=caches,
        host=max(phases[Phase.PREFETCH].host),
    )


def parameters_of(recipe: Recipe) -> int | None:
    """Number of weights of the recipe's model: see :func:`parameters_of_source`."""
    return parameters_of_source(recipe.model.source)


def trained_parameters(recipe: Recipe) -> int | None:
    """Number of weights that are trained and published: the model's, or those of its adapters; None
    where not known."""
    if recipe.adapters is None or recipe.model.source == "mock":
        return parameters_of(recipe)
    return _adapter_parameters(recipe.model.source, recipe.adapters)


@lru_cache(maxsize=16)
def _adapter_parameters(source: str, adapters: AdapterOptions) -> int | None:
    from stages.adapters.names import adapter_shapes
    from stages.model.load import empty_model

    return value_or_none(
        lambda: sum(map(math.prod, adapter_shapes(empty_model(source), adapters).values()))
    )


def parameters_of_source(source: str) -> int | None:
    """Number of weights of the model ``source``, tied ones once.

    For a folder, from the headers of its safetensors files; None for the mock model, and where
    there are no such files.
    """
    if source == "mock":
        return None
    return PARAMETERS[source] if source in PARAMETERS else parameters_in(source) or None


def checkpoint_bytes(recipe: Recipe) -> int:
    """Bytes of one checkpoint: the model in its dtype, and the trained weights with the optimizer's
    state; and of a critic of its own the same."""
    if not recipe.runs_stage("update"):
        return 0
    critic = (
        parameters_of_source(recipe.critic.source or recipe.model.source)
        if recipe.trains_critic
        else 0
    )
    beside = trained_parameters(recipe) or 0 if recipe.adapters else 0  # the adapters by themselves
    weights = ((parameters_of(recipe) or 0) + beside + (critic or 0)) * ITEM_BYTES[
        recipe.model.dtype
    ]
    trained = trained_parameters(recipe) or 0
    return weights + sum(_trained_bytes(recipe, count) for count in (trained, critic or 0))


def _trained_bytes(recipe: Recipe, trained: int) -> int:
    """Bytes of so many ``trained`` weights and the optimizer's state of them."""
    sizes = Sizes.of(config_of(recipe.model.source))
    return trained * ITEM_BYTES[recipe.trained_dtype] + optimizer_bytes(recipe, sizes, trained)


def heads_of(source: str) -> dict[str, int]:
    """Numbers of heads that tensor-parallel ranks share, by their names in the config of the model
    ``source``; empty without one."""
    config = config_of(source)
    return {
        name: config[name]
        for name in HEADS
        if isinstance(config.get(name), int) and config[name] > 0
    }


def config_of(source: str) -> dict[str, Any]:
    """The config of the model ``source``, as far as it is known without loading it."""
    return CONFIGS[source] if source in CONFIGS else text_config(source)


def vocabulary_of(recipe: Recipe) -> int | None:
    """Number of tokens that the recipe's model knows; None where its config does not have it."""
    size = config_of(recipe.model.source).get("vocab_size")
    return size if isinstance(size, int) else None


def context_of(recipe: Recipe) -> int | None:
    """Tokens of a prompt with its response that the recipe's model and engines allow; None where
    that is not known."""
    rollout = recipe.rollout
    config = config_of(recipe.model.source)
    if rollout.engine == "vllm" and rollout.vllm.max_model_len:
        return rollout.vllm.max_model_len
    limits = [config.get("max_position_embeddings", config.get("n_positions"))]
    change = longrope_change(recipe)
    if (
        change is not None
        and (recipe.prompts.max_prompt_tokens or 1) + recipe.longest_response <= change
    ):
        # the recipe does not ask for longer rows, and so keeps the short factors
        limits.append(change)
    return min((size for size in limits if isinstance(size, int) and size > 0), default=None)


def longrope_change(recipe: Recipe) -> int | None:
    """Tokens of a row above which the recipe's model takes the long factors of longrope; None
    without longrope."""
    config = config_of(recipe.model.source)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # "su": longrope in older configs
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return None
    size = config.get(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings")
    )
    return size if isinstance(size, int) else None


def longest_row(recipe: Recipe) -> int:
    """Tokens of the longest row that the recipe allows.

    All engines of a run choose the factors of longrope by it.
    """
    rollout = recipe.rollout
    if rollout.engine == "vllm" and rollout.vllm.max_model_len:
        return rollout.vllm.max_model_len
    return (prompt_limits(recipe).tokens or 0) + recipe.longest_response


def notices_of(recipe: Recipe) -> list[Problem]:
    """See :attr:`Plan.notices`."""
    return list(notices(recipe, longest_row(recipe), longrope_change(recipe)))
