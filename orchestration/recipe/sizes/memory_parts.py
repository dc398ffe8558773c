"""Derives the memory of each process with a torch engine from a recipe, part by part, without
loading weights.

    config of the model ─┐                                   ┌─▶ train: weights, optimizer, gradients, activations, logits
    recipe: longest rows ┴▶ micro-batch of S tokens, U places ┼─▶ rollout: weights, new weights, KV cache, logits, …
                                                             ├─▶ reference: weights, activations, logits
                                                             └─▶ critic: as train, without logits

Every row is taken to be as long as the recipe allows. Counted is what is live at the peak: not what
a process takes before it loads a model. Freed memory that the C library or torch keeps for later is
not counted either; :data:`KEPT` is what it came to on CPUs. ``benchmarks/planning/memory.py`` prints these
parts beside what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from orchestration.recipe.flow import computes_reference
from orchestration.recipe.model_files import experts_of
from stages.engines.optimizers import OPTIMIZERS
from stages.parallel.options import STRATEGIES, Strategies

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT = ITEM_BYTES["float32"]
# stages.engines.torch.model.token_logprobs computes at most as many at once
LOGITS_BYTES = 256 * 2**20
# of logits that it works on at once beside them: entropies, gradients, a transposed copy
PIECES_BYTES = 3 * 4 * 2**20
PREFILL_TOKENS = 4096  # of one prefill, unless one prompt has more (stages.engines.torch.rollout)
DRAFTED_ROWS = 16  # for which a model drafts at once (stages.engines.drafts)
# its cache grows by multiples of so many rows, and tokens (…torch.decoding.attention)
SLOTS = 8
SLOT_TOKENS = 32
# glibc returns larger blocks to the system when they are freed, and may keep smaller ones
MAPPED_BYTES = 32 * 2**20
# Measured: bytes, and shares of smaller blocks. After the first of several micro-batches gradients
# lie between the activations that were freed, and the next one's find less room there.
KEPT_BUFFERS = 20 * 2**20
KEPT_ACTIVATIONS = 0.3
KEPT_SEVERAL = 0.6
KEPT_WEIGHTS = 1.25
# measured: times the layers, which a rank of several gathers and frees in both passes
KEPT_GATHERED = 2
# lie in host memory whatever the engine's device is
HOST_PARTS = ("verified copy", "checkpoint copy", "undo copy")
CPU_PARTS = ("kept",)  # only where the engine is on a CPU
Engine = Literal["train", "rollout", "reference", "critic"]
Parts = dict[str, int]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder, from its config.

    ``intermediate``: of the MLP, in a mixture of experts of all that one token uses. ``experts``:
    parameters of all experts of a layer. ``routed``: elements of the rows that go to one token's
    experts. ``head``: elements of one head.
    """

    layers: int
    width: int
    intermediate: int
    experts: int
    routed: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool

    @property
    def outside(self) -> int:
        """Parameters of embedding and output head, which belong to no layer."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes | None:
        """The sizes in ``config``; None where it does not name them as most models do."""
        try:
            heads = int(config["num_attention_heads"])
            width = int(config["hidden_size"])
            experts_per_token = int(config.get("num_experts_per_tok") or 1)
            expert_width = int(
                (experts_per_token > 1 and config.get("moe_intermediate_size"))
                or config["intermediate_size"]
            )
            return cls(
                int(config["num_hidden_layers"]),
                width,
                experts_per_token * expert_width,
                3 * experts_of(config)[0] * expert_width * width,
                experts_per_token * width if experts_of(config)[0] else 0,
                heads,
                int(config.get("num_key_value_heads") or heads),
                int(config.get("head_dim") or width // heads),
                int(config["vocab_size"]),
                bool(config.get("tie_word_embeddings", True)),
            )
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class MicroBatch:
    """A rank's part of the largest micro-batch of a recipe's longest rows: ``tokens`` that the
    model is fed (S), ``places`` where it predicts a response token (U); ``only``: it is the whole
    step."""

    tokens: int
    places: int
    only: bool


def micro_batch(recipe: Recipe, prompt: int) -> MicroBatch:
    """As :func:`stages.engines.plans.plan_micro_batches` packs groups of longest rows into
    ``train.token_budget``;
    ``prompt``: tokens of the longest prompt."""
    train = recipe.train
    size = recipe.algorithm.group_size
    fed = recipe.longest_response - 1
    rows = -(-recipe.trained_rows_per_step // train.dp)
    group = prompt + size * fed  # of one replica
    groups = 1
    fits = size
    budget = train.token_budget * train.cp
    if group <= budget and size <= rows:
        groups = max(1, min(budget // group, rows // size))
    else:
        fits = min(rows, size, max(1, (budget - prompt) // max(1, fed)))
    tokens = -(-groups * (prompt + fits * fed) // train.cp)
    return MicroBatch(tokens, min(tokens, groups * (1 + fits * fed)), groups * fits >= rows)


def layer_bytes(sizes: Sizes, item: int, tokens: int) -> int:
    """Bytes that one layer of a decoder with gated MLPs keeps of ``tokens`` for the backward pass,
    ``item`` bytes a number. Of the two norms: float32 inputs, inverse deviations, and outputs, in a
    lower dtype also those before their weights. Of attention: queries, keys, values, outputs and
    log-sum-exps. Of the MLP: gate before and after its activation, up, and their product; of
    experts also the rows that they are given and return, each twice: in order of experts and of
    tokens."""
    norms = (2 if item == FLOAT else 4) * sizes.width
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.head
    each = item * (norms + 4 * (sizes.intermediate + sizes.routed) + attention) + FLOAT * (
        2 * sizes.width + sizes.heads + 2
    )
    return tokens * each


def train_state(recipe: Recipe, sizes: Sizes | None, parameters: int, learned: int) -> Parts:
    """Bytes that one rank of a train engine holds from step to step, by part: its shares of
    weights, optimizer state and gradients in the dtype in which they are trained; one rank alone
    also the copy in which it computes. ``checkpoint copy``: host memory, from which
    checkpoints are written beside training. ``learned``: parameters that are trained; beside
    adapters the others are frozen. ``sizes``: None where they are not known."""
    train = recipe.train
    item = ITEM_BYTES[recipe.model.dtype]
    share = -(-learned // train.shards)
    if sizes is not None and train.pp > 1 and not recipe.adapters:
        # The first stage has the embedding and the last the head: of tied weights both are whole.
        ends = sizes.outside if sizes.tied else sizes.outside // 2
        share += -(-(ends * train.pp - sizes.outside) // train.shards)
    trained = share * ITEM_BYTES[recipe.trained_dtype]
    frozen = -(-parameters // train.shards) * item if recipe.adapters else 0
    copy = learned * item if recipe.mixed_precision and train.ranks == 1 else 0
    optimizer = optimizer_bytes(recipe, sizes, share, train.shards)
    return {
        "weights": frozen + trained + copy,
        "optimizer": optimizer,
        "gradients": trained,
        "checkpoint copy": trained + optimizer,
    }


def optimizer_bytes(recipe: Recipe, sizes: Sizes | None, learned: int, shards: int = 1) -> int:
    """Bytes of the optimizer's state of ``learned`` parameters, one of so many ``shards`` of the
    trained ones."""
    others = 0
    if sizes is not None and not recipe.adapters:
        others = min(learned, -(-sizes.outside // shards))
    kind = OPTIMIZERS[recipe.train.optimizer]
    return kind.state_bytes(learned - others, others, ITEM_BYTES[recipe.trained_dtype])


def rollout_state(recipe: Recipe, parameters: int, learned: int) -> Parts:
    """Bytes that one rollout engine holds of weights, by part: its own, and the ``verified copy``
    of those that are published, of which it makes the next ones; none in a colocated run, nor where
    vLLM's workers map the node's."""
    item = ITEM_BYTES[recipe.model.dtype]
    maps = recipe.rollout.engine == "vllm" and recipe.adapters is None
    copied = 0 if recipe.colocated or maps else learned * item
    return {"weights": parameters * item, "verified copy": copied}


def cache_bytes(recipe: Recipe, sizes: Sizes, prompt: int) -> int:
    """Bytes of the KV cache of one torch rollout engine: the room for all rows at their longest,
    and what one layer had before it last grew, while that is copied."""
    rollout = recipe.rollout
    groups = -(-rollout.max_rows // recipe.algorithm.group_size)
    room, before = grown(recipe.longest_response - 1)
    slots = -(-rollout.max_rows // SLOTS) * SLOTS
    of_prompts = -(-groups // SLOTS) * SLOTS * -(-prompt // SLOT_TOKENS) * SLOT_TOKENS
    tokens = sizes.layers * (slots * room + of_prompts) + slots * before
    return 2 * ITEM_BYTES[recipe.model.dtype] * sizes.kv_heads * sizes.head * tokens


def train_memory(recipe: Recipe, sizes: Sizes, parameters: int, prompt: int, learned: int) -> Parts:
    """Bytes of one rank of the torch train engine at the peak of a step, by part.

    Ranks hold shares of weights; activations are those of a rank's own rows, divided by ``tp``
    inside layers. ``gathered``: layers that a rank has whole while it computes with them, with a
    gradient, and what is outside of layers. ``learned``: parameters that are trained; beside
    adapters the others are frozen.
    """
    train = recipe.train
    batch = micro_batch(recipe, prompt)
    item = ITEM_BYTES[recipe.model.dtype]
    state = train_state(recipe, sizes, parameters, learned)
    activations, logits, gradients = max(
        _moments_of_a_step(recipe, sizes, batch, state["gradients"]), key=sum
    )
    layer = (
        max(0, (parameters - sizes.outside) // sizes.layers - sizes.experts) // train.tp
        + sizes.experts // train.ep
    )
    freed = (KEPT_ACTIVATIONS if batch.only else KEPT_SEVERAL) * activations
    kept_bytes = _kept(freed, item * batch.tokens * sizes.intermediate // train.tp)
    is_alone = train.ranks == 1
    layer_item = ITEM_BYTES[recipe.trained_dtype] * layer
    if not is_alone and layer_item < MAPPED_BYTES:
        kept_bytes += KEPT_GATHERED * layer_item * -(-sizes.layers // train.pp)
    return state | {
        "gradients": gradients,
        "gathered": 0 if is_alone else item * (3 * layer + 2 * sizes.outside),
        "activations": activations,
        "logits": logits,
        "undo copy": state["checkpoint copy"] if recipe.keeps_undo else 0,
        "kept": kept_bytes,
    }


def _moments_of_a_step(
    recipe: Recipe, sizes: Sizes, batch: MicroBatch, gradients: int
) -> Iterator[tuple[int, int, int]]:
    """Bytes of activations, logits and gradients when each may be most: in the backward pass of the
    head, of the last layer, and of the first layer. In the first micro-batch gradients come as
    activations go; later ones add to all of them."""
    train = recipe.train
    item = ITEM_BYTES[recipe.model.dtype]
    # The outputs of a layer's two norms are of all tokens on each rank; experts take those of their
    # rank.
    fed = batch.tokens * sizes.width
    gathered = 1 if sizes.experts else 2
    layer = (
        layer_bytes(sizes, item, batch.tokens) // train.tp
        + gathered * item * fed * (train.tp - 1) // train.tp
    )
    layers = sizes.layers
    if train.pp > 1:
        # ``vpp`` parts of a rank's layers, each as often as a micro-batch is between its passes on
        # the first rank.
        interleaved = 2 * (train.pp - 1) + (train.vpp - 1) * train.pp + 1
        under_way = train.vpp if batch.only else train.pp if train.vpp == 1 else interleaved
        layers = under_way * -(-layers // (train.pp * train.vpp))
    # ``again``: what is computed again for the backward pass.
    each = layer
    again = 0
    if train.activation_checkpointing:
        each = item * fed // train.tp
        again = layer
    # Beside what the layer keeps: the gradients of its output, and of the two factors of its MLP's
    # product or inside norms.
    working = (
        item * fed
        + batch.tokens * max(2 * item * sizes.intermediate, 3 * FLOAT * sizes.width) // train.tp
    )
    head = 0 if recipe.adapters else item * sizes.vocabulary * sizes.width  # its gradient
    all_logits = min(LOGITS_BYTES, FLOAT * batch.places * sizes.vocabulary)
    outside = 2 * fed * (item + FLOAT) + batch.places * (item + FLOAT) * sizes.width
    earlier = 0 if batch.only else gradients
    pieces = min(PIECES_BYTES, all_logits)
    yield layers * each + outside, all_logits + max(pieces, head), earlier
    yield layers * each + again + working, 0, max(earlier, head)
    yield each + again + working, 0, gradients


def rollout_memory(
    recipe: Recipe, sizes: Sizes, parameters: int, prompt: int, learned: int
) -> Parts:
    """Bytes of one torch rollout engine, by part.

    ``new weights``: a version that is prepared while the one before is in use, ``verified copy``:
    the bytes that it is made of. ``activations``: of one prefill, or of the attention of one decode
    step. On a CPU weights are copies in oneDNN's layout, the head's in
    float32; that counts also for ``auto``, where the device is not known yet.
    """
    rollout = recipe.rollout
    item = ITEM_BYTES[recipe.model.dtype]
    rows = rollout.max_rows
    groups = -(-rollout.max_rows // recipe.algorithm.group_size)
    state = rollout_state(recipe, parameters, learned)
    packed = not recipe.colocated and rollout.device in ("auto", "cpu")
    weights = state["weights"] + (_packed_head(sizes, item) if packed else 0)
    prefill = min(groups * prompt, max(prompt, PREFILL_TOKENS))
    scores = 4 * FLOAT * rows * sizes.heads * (prompt + recipe.longest_response)
    in_layers = FLOAT * max(0, parameters - sizes.outside)  # in bfloat16 as much is kept
    swaps = not recipe.colocated and recipe.runs_stage("update")
    adapters = learned * item if recipe.adapters else 0
    return {
        "weights": weights + adapters,
        "new weights": (adapters or weights) if swaps else 0,
        "verified copy": state["verified copy"] if swaps else 0,
        "KV cache": cache_bytes(recipe, sizes, prompt),
        "activations": max(forward_bytes(sizes, item, prefill), scores),
        "logits": 2 * FLOAT * rows * sizes.vocabulary,
        "kept": _kept(
            KEPT_WEIGHTS * in_layers if swaps and not adapters else 0,
            item * sizes.width * sizes.intermediate,
        ),
    }


def draft_bytes(recipe: Recipe, model: Model, prompt: int) -> int:
    """Bytes of ``rollout.draft_model`` in a rollout engine: its weights, and the keys and values of
    the rows that it drafts for."""
    config, parameters = model
    sizes = Sizes.of(config)
    if parameters is None or sizes is None:
        return 0
    rows = min(recipe.rollout.max_rows, DRAFTED_ROWS)
    tokens = rows * sizes.layers * (prompt + recipe.longest_response)
    cached = 2 * sizes.kv_heads * sizes.head * tokens
    return ITEM_BYTES[recipe.model.dtype] * (parameters + cached)


def grown(tokens: int) -> tuple[int, int]:
    """Tokens of a row that the rollout engine's cache has room for when it has grown to ``tokens``,
    and had room for before it last grew."""
    room = before = 0
    while room < tokens:
        before = room
        room = max(-(-(room + 1) // SLOT_TOKENS) * SLOT_TOKENS, room + room // 2)
    return room, before


def _packed_head(sizes: Sizes, item: int) -> int:
    """Bytes of a float32 output head of its own, beyond what the model has for it: an embedding
    that it is tied to stays."""
    return (FLOAT if sizes.tied else FLOAT - item) * sizes.vocabulary * sizes.width


def forward_bytes(sizes: Sizes, item: int, tokens: int) -> int:
    """Bytes of one layer's forward pass without a gradient: residual stream and norm, and inside
    the MLP its gate before and after its activation, and up; or inside attention queries, keys and
    values, turned and not, and outputs."""
    inside = max(3 * sizes.intermediate, (3 * sizes.heads + 3 * sizes.kv_heads) * sizes.head)
    return item * tokens * (2 * sizes.width + inside)


def reference_memory(
    recipe: Recipe, sizes: Sizes, parameters: int, prompt: int, learned: int
) -> Parts:
    """Bytes of the frozen reference, by part.

    It computes one group at a time, without gradients; logits when of activations only the last
    hidden states are left, of all tokens and of those that predict. Logits in a block that the C
    library maps by itself do not use what it keeps of activations.
    """
    item = ITEM_BYTES[recipe.model.dtype]
    fed = recipe.longest_response - 1
    size = recipe.algorithm.group_size
    budget = recipe.train.token_budget
    rows = min(size, max(1, (budget - prompt) // max(1, fed)))
    tokens = prompt + rows * fed
    places = 1 + rows * fed
    logits = (
        min(LOGITS_BYTES, FLOAT * places * sizes.vocabulary),
        item * (tokens + places) * sizes.width,
    )
    layer = 0, max(forward_bytes(sizes, item, tokens), 2 * FLOAT * tokens * sizes.width)
    of_logits, activations = max(layer, logits, key=sum)
    mapped = logits[0] >= MAPPED_BYTES > item * tokens * sizes.intermediate
    return {
        "weights": parameters * item,
        "activations": activations,
        "logits": of_logits,
        "kept": KEPT_BUFFERS + (layer[1] if mapped else 0),
    }


def critic_memory(
    recipe: Recipe, sizes: Sizes, parameters: int, prompt: int, learned: int
) -> Parts:
    """Bytes of one rank of a critic of its own, by part: a trainer whose head gives one value for
    each token."""
    whole = recipe.model.model_copy(update={"lora": type(recipe.model.lora)()})
    ranks = Strategies().model_dump() | recipe.critic.model_dump(include=set(STRATEGIES))
    alone = recipe.model_copy(
        update={"train": recipe.train.model_copy(update=ranks), "model": whole}
    )
    return train_memory(alone, sizes, parameters, prompt, parameters) | {"logits": 0}


def _kept(share: float, block: int) -> int:
    """Bytes that a process keeps on a CPU: ``share`` of memory in blocks that are at most of
    ``block`` bytes."""
    return KEPT_BUFFERS + (int(share) if block < MAPPED_BYTES else 0)


# a config, and the number of parameters where it is known
Model = tuple[Mapping[str, Any], int | None]


def memory(
    recipe: Recipe, policy: Model, reference: Model, critic: Model, prompt: int, learned: int | None
) -> dict[Engine, Parts]:
    """Bytes of each rank that trains and each engine that generates with the model ``policy``, of
    the ``reference``, and of the ``critic``, by part; ``learned``: parameters of the policy that
    are trained. Only of torch engines, and of models whose sizes are known."""
    here: dict[Engine, bool] = {
        "train": recipe.train.engine == "torch" and recipe.runs_stage("update"),
        "rollout": recipe.rollout.engine == "torch" and recipe.runs_stage("rollout"),
        "reference": recipe.train.engine == "torch"
        and computes_reference(recipe)
        and recipe.runs_stage("reference"),
        "critic": recipe.train.engine == "torch" and recipe.trains_critic,
    }
    derive = {
        "train": train_memory,
        "rollout": rollout_memory,
        "reference": reference_memory,
        "critic": critic_memory,
    }
    models = {"reference": reference, "critic": critic}
    parts_of: dict[Engine, Parts] = {}
    for side in (side for side, runs in here.items() if runs):
        config, parameters = models.get(side, policy)
        if parameters and (sizes := Sizes.of(config)) is not None:
            parts_of[side] = derive[side](
                recipe, sizes, parameters, prompt, parameters if learned is None else learned
            )
    return parts_of
