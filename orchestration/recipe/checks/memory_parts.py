"""Derives the memory of a training step and of a rollout engine from a recipe, part by part, without loading weights.

    config of the model ─┐                                   ┌─▶ train: weights, optimizer, gradients, activations, logits
    recipe: longest rows ┴▶ micro-batch of S tokens, U places ┴─▶ rollout: weights, new weights, KV cache, logits

Every row is taken to be as long as the recipe allows. Counted are live tensors at the peak: not what a process takes before
it loads a model, nor freed memory that the C library keeps. On a CPU glibc keeps up to half as much again of blocks below
32 MiB, unless the environment has ``MALLOC_MMAP_THRESHOLD_=1048576``. ``benchmarks/memory.py`` prints these parts beside
what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT = ITEM_BYTES["float32"]
LOGITS_BYTES = 256 * 2**20  # stages.engines.torch.token_logprobs computes at most as many at once
Engine = Literal["train", "rollout"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder, from its config. ``intermediate``: of the MLP, in a mixture of experts of all that one token
    uses. ``head``: elements of one head."""

    layers: int
    width: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes | None:
        """The sizes in ``config``; None where it does not name them as most models do."""
        try:
            heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
            used = int(config.get("num_experts_per_tok") or 1)
            one = config.get("moe_intermediate_size") if used > 1 else None
            return cls(
                int(config["num_hidden_layers"]),
                width,
                used * int(one or config["intermediate_size"]),
                heads,
                int(config.get("num_key_value_heads") or heads),
                int(config.get("head_dim") or width // heads),
                int(config["vocab_size"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a recipe's longest rows: ``tokens`` that the model is fed (S), ``places`` where it predicts
    a response token (U); ``only``: it is the whole step."""

    tokens: int
    places: int
    only: bool


def micro_batch(recipe: Recipe, prompt: int) -> MicroBatch:
    """As :func:`stages.engines.plans.plan_micro_batches` packs groups of longest rows into ``train.token_budget``;
    ``prompt``: tokens of the longest prompt."""
    train, size, fed = recipe.train, recipe.algorithm.group_size, recipe.rollout.max_tokens - 1
    rows, group = -(-train.groups_per_step * size // train.dp), prompt + size * fed  # of one replica
    if group <= train.token_budget and size <= rows:
        groups = max(1, min(train.token_budget // group, rows // size))
        return MicroBatch(groups * group, groups * (1 + size * fed), groups * size >= rows)
    fits = min(rows, size, max(1, (train.token_budget - prompt) // max(1, fed)))
    return MicroBatch(prompt + fits * fed, 1 + fits * fed, fits >= rows)


def layer_bytes(sizes: Sizes, item: int, tokens: int) -> int:
    """Bytes that one layer of a decoder with gated MLPs keeps of ``tokens`` for the backward pass, ``item`` bytes a number.
    Of the two norms: float32 inputs, inverse deviations, and outputs before and after their weights. Of attention: queries,
    keys, values, outputs and log-sum-exps. Of the MLP: gate before and after its activation, up, and their product."""
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.head
    each = item * (4 * sizes.width + 4 * sizes.intermediate + attention) + FLOAT * (2 * sizes.width + sizes.heads + 2)
    return tokens * each


def train_memory(recipe: Recipe, sizes: Sizes, parameters: int, prompt: int) -> dict[str, int]:
    """Bytes of one rank of the torch train engine at the peak of a step, by part. Ranks hold shares of weights; activations
    are those of a rank's own rows, divided by ``tp`` inside layers."""
    train, batch = recipe.train, micro_batch(recipe, prompt)
    item, trained = ITEM_BYTES[recipe.model.dtype], ITEM_BYTES[recipe.trained_dtype]
    share = -(-parameters // train.ranks)
    copies = parameters * item if recipe.mixed_precision and train.ranks == 1 else 0
    layer = layer_bytes(sizes, item, batch.tokens) // train.tp
    entered = item * batch.tokens * sizes.width  # all that a layer keeps with checkpointing
    inside = sizes.layers * entered + layer if train.activation_checkpointing else sizes.layers * layer
    outside = 2 * batch.tokens * (item + FLOAT) * sizes.width + batch.places * item * sizes.width
    head = item * sizes.vocabulary * sizes.width  # gradient of the head, before it is added to the others
    activations, logits = inside + outside, min(LOGITS_BYTES, FLOAT * batch.places * sizes.vocabulary) + head
    gradients = share * trained
    if batch.only:  # gradients come as activations go: the larger of the two is held
        activations, logits, gradients = (
            (activations, logits, 0) if activations + logits >= gradients else (0, 0, gradients)
        )
    parts = {"weights": share * trained + copies, "optimizer": 2 * share * trained, "gradients": gradients}
    return {**parts, "activations": activations, "logits": logits}


def rollout_memory(recipe: Recipe, sizes: Sizes, parameters: int, prompt: int) -> dict[str, int]:
    """Bytes of one torch rollout engine, by part. ``new weights``: a version that is prepared while the one before is in
    use. ``KV cache``: all rows at their longest, in room that grows by a half. On a CPU the head of a bfloat16 model is held
    in float32 too; it counts also for ``auto``, where the device is not known yet."""
    rollout, item = recipe.rollout, ITEM_BYTES[recipe.model.dtype]
    groups, room = -(-rollout.max_rows // recipe.algorithm.group_size), 32
    while room < rollout.max_tokens:
        room += room // 2
    keys = 8 * -(-rollout.max_rows // 8) * room + 8 * -(-groups // 8) * 32 * -(-prompt // 32)
    head = FLOAT * sizes.vocabulary * sizes.width if item < FLOAT and rollout.device in ("auto", "cpu") else 0
    return {
        "weights": parameters * item + head,
        "new weights": 0 if recipe.colocated else parameters * item + head,
        "KV cache": 2 * item * sizes.layers * sizes.kv_heads * sizes.head * keys,
        "logits": 3 * FLOAT * rollout.max_rows * sizes.vocabulary,
    }


def memory(
    recipe: Recipe, config: Mapping[str, Any], parameters: int | None, prompt: int
) -> dict[Engine, dict[str, int]]:
    """Bytes of each rank that trains and of each engine that generates, by part, for a model with this ``config``. Only of
    torch engines, and of a model whose sizes are known."""
    sizes = Sizes.of(config)
    if sizes is None or not parameters:
        return {}
    of: dict[Engine, dict[str, int]] = {}
    if recipe.train.engine == "torch" and recipe.runs_stage("update"):
        of["train"] = train_memory(recipe, sizes, parameters, prompt)
    if recipe.rollout.engine == "torch" and recipe.runs_stage("rollout"):
        of["rollout"] = rollout_memory(recipe, sizes, parameters, prompt)
    return of
