"""Costs of a model on devices given by numbers, and lengths of responses, where no run has measured
them.

    decoding    each token reads the weights once for all rows, and each row its keys and values: bytes over bandwidth
    training    6 operations a parameter and token (8 with activation checkpointing), and attention; bytes that ranks send
    reference   2 operations a parameter and token          swap    bytes of the weights over the link

Rates that are really reached, not those of data sheets, give the better forecast; costs that are
measured (`asyncdock plan profile`) give the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planning.rank_bytes import Step, waited_for
from orchestration.recipe.model_files import experts_of
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.memory_parts import ITEM_BYTES, Sizes
from orchestration.recipe.sizes.planner import (
    config_of,
    parameters_of,
    prompt_limits,
    trained_state,
)
from orchestration.simulation.costs import ASSUMED, Costs
from orchestration.simulation.mock_costs import prompt_tokens_of

BETWEEN_STEPS = 0.2  # seconds: claims, commits and the step's event of some thousand samples
BETWEEN_STEPS_SOURCE = f"{BETWEEN_STEPS:g} s between two steps, as assumed"


@dataclass(frozen=True)
class Hardware:
    """Of one device: operations a second that matrix products reach, bytes/s of its memory, and
    bytes/s between devices of a node, ``node`` devices each, and between nodes."""

    flops: float
    bandwidth: float
    within: float = 200e9
    between: float = 25e9
    node: int = 8


def analytic_costs(recipe: Recipe, hardware: Hardware, response_tokens: float) -> Costs:
    """Costs of ``recipe`` with responses of ``response_tokens`` on average.

    Raises ValueError where the model's sizes are not known.
    """
    config = config_of(recipe.model.source)
    sizes = Sizes.of(config)
    parameters = (
        None
        if sizes is None
        else parameters_of(recipe) or value_or_none(lambda: _parameters(recipe))
    )
    if sizes is None or parameters is None:
        raise ValueError(
            f"model.source: the sizes of {recipe.model.source!r} are not known; give a folder with "
            f"its config.json"
        )
    experts, chosen = experts_of(config)
    idle = sizes.experts * sizes.layers * (1 - chosen / experts) if experts else 0.0
    active = (
        parameters
        - idle
        - (0 if config.get("tie_word_embeddings", True) else sizes.vocabulary * sizes.width)
    )
    limit = prompt_limits(recipe).tokens or 0  # where the prompts are not here
    item = ITEM_BYTES[recipe.model.dtype]
    prompt = value_or_none(lambda: prompt_tokens_of(recipe)) or float(limit)
    ranks = recipe.train.ranks
    tp = recipe.rollout.vllm.tensor_parallel if recipe.rollout.engine == "vllm" else 1
    row = prompt + response_tokens
    weights = (parameters - idle) * item / tp / hardware.bandwidth
    cached = (
        2
        * sizes.layers
        * sizes.kv_heads
        * sizes.head
        * item
        * (prompt + response_tokens / 2)
        / tp
        / hardware.bandwidth
    )
    operations = 2 * active / tp / hardware.flops
    tokens = recipe.train.groups_per_step * (prompt + recipe.algorithm.group_size * response_tokens)
    passes = 8 if recipe.train.activation_checkpointing else 6
    # Two products, with the keys and with the values of half the row on average.
    attention = passes * sizes.layers * 2 * sizes.heads * sizes.head * row / 2
    compute = (passes * active + attention) / ranks / hardware.flops
    sending = _sending(recipe, hardware, tokens, sizes.width, sizes.head, chosen)
    link = hardware.between if ranks + recipe.rollout.workers > hardware.node else hardware.within
    known = dict.fromkeys(
        Costs.__dataclass_fields__, "derived from the model's sizes and the device's rates"
    )
    return Costs(
        row_rate=1 / weights,
        saturation_rows=max(1.0, weights / operations),
        row_seconds=cached,
        prefill_rate=1 / operations,
        prompt_tokens=prompt,
        swap_seconds=parameters * item / tp / hardware.bandwidth,
        copy_seconds=parameters * item / link,
        step_seconds=sending,
        token_seconds=compute,
        reference_token_seconds=operations * tp,
        between_steps=BETWEEN_STEPS,
        sources={**known, **ASSUMED, "between_steps": BETWEEN_STEPS_SOURCE},
    )


def _parameters(recipe: Recipe) -> int:
    """Of a folder with a config alone."""
    return (
        sum(parameter.nbytes for parameter in trained_state(recipe).parameters)
        // ITEM_BYTES[recipe.trained_dtype]
    )


def _sending(
    recipe: Recipe, hardware: Hardware, tokens: float, width: int, head: int, chosen: int
) -> float:
    """Seconds of a step in which a rank waits for what ranks send; gathers of weights are beside
    compute."""
    train = recipe.train
    if train.ranks == train.replicas:
        return 0.0
    of_replica = tokens / train.replicas
    passes = max(1, round(of_replica / (train.token_budget * train.cp)))
    micro_batches = (int(of_replica / passes),) * passes
    step = Step(micro_batches, width, chosen, head=head, item=ITEM_BYTES[recipe.model.dtype])
    seconds = 0.0
    for nbytes, span in waited_for(trained_state(recipe), train.layout, step):
        seconds += nbytes / (hardware.within if span <= hardware.node else hardware.between)
    return seconds


class LognormalLengths:
    """Log-normal lengths, 1 to ``longest`` tokens; the same for the same seed. A share
    ``stragglers`` is ``times`` as long."""

    CHUNK = 4096  # groups that are drawn at once

    def __init__(
        self,
        group_size: int,
        longest: int,
        *,
        median: float,
        sigma: float,
        seed: int = 0,
        stragglers: float = 0.0,
        times: float = 1.0,
    ) -> None:
        self.group_size = group_size
        self.longest = longest
        self.seed = seed
        self._median = median
        self._sigma = sigma
        self._stragglers = stragglers
        self._times = times
        self._chunks: dict[int, list[list[int]]] = {}

    def __call__(self, group: int) -> Sequence[int]:
        chunk, at = divmod(group, self.CHUNK)
        if chunk not in self._chunks:
            self._chunks[chunk] = self._draw(chunk)
        return self._chunks[chunk][at]

    def _draw(self, chunk: int) -> list[list[int]]:
        random = np.random.default_rng([self.seed, chunk])
        shape = (self.CHUNK, self.group_size)
        drawn = self._median * random.lognormal(0.0, self._sigma, shape)
        if self._stragglers:
            drawn = np.where(random.random(shape) < self._stragglers, drawn * self._times, drawn)
        lengths: list[list[int]] = np.clip(drawn.round(), 1, self.longest).astype(int).tolist()
        return lengths
