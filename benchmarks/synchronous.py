"""The synchronous run: the same stages in a plain loop, without dock, index or workers.

The asynchronous run with η = 0 must equal it bit for bit, and speed-ups are measured against it.

    for each step:  prompts ▶ generate all ▶ reward all ▶ (reference) ▶ credit ▶ optimizer steps ▶ swap weights
                       ▲                                                  │ groups that are dropped
                       └──────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import NonTensorStack, TensorDict

from orchestration.recipe.flow import algorithm_of, needs_reference
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.rewards.functions import reward_set, scored_by
from orchestration.workers.engines import (
    critic_engine,
    reference_engine,
    rollout_engine,
    sampling_of,
    train_engine,
)
from stages.algorithms import Drop
from stages.engines.protocols import Completion, GroupRequest, TrainEngine, UndoableEngine
from stages.flow.catalogue import ROUTED
from stages.flow.groups import outputs_of
from stages.prompts.difficulty import Difficulty
from stages.prompts.gate import columns
from stages.prompts.sources import Prompt, load_prompts
from stages.rewards.stage import score_rows
from stages.rollout.stage import group_seed
from stages.training.advantage import credits, rewards_of_groups, spared


@dataclass(frozen=True)
class SynchronousStep:
    """One step of the loop: its rows as they were trained, what the engine measured, and
    seconds."""

    step: int
    batch: TensorDict
    metrics: dict[str, float]
    reward_mean: float
    generate_seconds: float
    train_seconds: float
    engine: TrainEngine
    critic: TrainEngine | None = None


async def synchronous_run(recipe: Recipe) -> AsyncGenerator[SynchronousStep, None]:
    """Train ``recipe`` step by step, and yield each step with the engine that has its weights.

    The bound is not used. Raises ValueError for a recipe with stages of its own.
    """
    if recipe.stages:
        raise ValueError(
            "stages: the plain loop has only the product's stages; take [[stages]] "
            "out of the recipe"
        )
    tokenizer = tokenizer_of(recipe)
    prompts = load_prompts(
        recipe.prompts, tokenizer, recipe.seed, limits=prompt_limits(recipe)
    ).train
    difficulty = (
        Difficulty(prompts, recipe.seed) if recipe.prompts.sampling == "difficulty" else None
    )
    keys: dict[int, str] = {}  # of the prompts of groups, with difficulty
    algorithm = algorithm_of(recipe)
    sampling = sampling_of(recipe, tokenizer)
    size = recipe.algorithm.group_size
    per_step = recipe.train.groups_per_step
    rewards = reward_set(recipe, end_tokens=sampling.stop_token_ids)
    dropping = scored_by(recipe)
    rollout = rollout_engine(recipe, version=0)
    trainer = train_engine(recipe)
    reference = reference_engine(recipe) if needs_reference(recipe) else None
    critic, learning = (
        (critic_engine(recipe), algorithm.critic_algorithm())
        if recipe.trains_critic
        else (None, None)
    )
    admitted = position = 0
    try:
        for step in range(recipe.train.steps):
            generating = 0.0
            droppable = admitted + recipe.algorithm.max_refill * per_step
            groups: list[int] = []
            asked: dict[int, Prompt] = {}
            completions: dict[tuple[int, int], Completion] = {}
            while len(groups) < per_step:  # once, unless credit drops groups
                fresh = range(admitted, admitted + per_step - len(groups))
                admitted = fresh.stop
                generation_began = time.monotonic()
                for group in fresh:
                    if difficulty is None:
                        asked[group] = prompts.prompt(group)
                    else:
                        place, asked[group], keys[group] = difficulty.choose(position)
                        position = place + 1
                requests = [
                    GroupRequest(
                        group,
                        tuple(range(size)),
                        asked[group].ids,
                        sampling,
                        group_seed(recipe.seed, group),
                    )
                    for group in fresh
                ]
                async with aclosing(rollout.generate(requests)) as ended:  # type: ignore[type-var]
                    async for completion in ended:
                        completions[completion.group, completion.place] = completion
                generating += time.monotonic() - generation_began
                groups += fresh
                batch = _batch(
                    [completions[group, place] for group in groups for place in range(size)]
                )
                given: dict[str, Any] = columns(
                    [asked[group] for group in groups for _ in range(size)]
                )
                batch["prompt_ids"] = torch.nested.nested_tensor(
                    given["prompt_ids"], layout=torch.jagged
                )
                batch["given"], batch["fields"] = (
                    NonTensorStack(*given["given"]),
                    NonTensorStack(*given["fields"]),
                )
                scores = await score_rows(rewards, tokenizer, batch)
                batch["reward"], batch["scores"] = scores.total, scores.scores
                if reference is not None:
                    batch["ref_logprobs"] = await asyncio.to_thread(reference.logprobs, batch)
                members, results = credits(
                    algorithm,
                    batch,
                    batch["group"].tolist(),
                    [len(row) for row in batch["response_ids"].unbind()],
                    recipe.rollout.truncated,
                    dropping,
                )
                results = spared(groups, results, droppable)
                rewards_of = rewards_of_groups(
                    batch, batch["group"].tolist(), members, bool(dropping)
                )
                dropped = [
                    g for g, result in zip(groups, results, strict=True) if isinstance(result, Drop)
                ]
                if difficulty is not None:
                    for group in rewards_of.keys() & set(dropped):
                        difficulty.count(keys[group], rewards_of[group])
                groups = [group for group in groups if group not in dropped]
            for name, column in next(outputs_of(members, results, [0] * len(batch))).rows.items():  # type: ignore[union-attr]
                jagged = isinstance(column, list)
                batch[name] = (
                    torch.nested.nested_tensor(column, layout=torch.jagged) if jagged else column
                )
            if critic is not None:
                batch["values"] = await asyncio.to_thread(critic.values, batch)
            scored = time.monotonic()
            if difficulty is not None:
                for group in groups:
                    if group in rewards_of:
                        difficulty.count(keys[group], rewards_of[group])
            metrics = await _trained(trainer, batch, algorithm)
            if critic is not None:
                learned = await _trained(critic, batch, learning)
                if not metrics:
                    critic.undo()
                elif not learned:
                    cast(UndoableEngine, trainer).undo()
                metrics = {**metrics, **learned} if metrics and learned else {}
            await rollout.load_weights(
                step + 1, {name: value.clone() for name, value in trainer.weights()}
            )
            yield SynchronousStep(
                step,
                batch,
                dict(metrics) or {"loss": math.nan},
                float(batch["reward"].double().mean()),
                generating,
                time.monotonic() - scored,
                trainer,
                critic,
            )
    finally:
        await rollout.close()
        for engine in (trainer, reference, critic):
            if engine is not None:
                engine.close()


async def _trained(engine: Any, batch: TensorDict, algorithm: Any) -> Mapping[str, float]:
    """The metrics of a train batch; none where it is skipped, as a run does."""
    try:
        metrics: Mapping[str, float] = await asyncio.to_thread(engine.train_batch, batch, algorithm)
    except FloatingPointError:
        return {}
    return metrics


def _batch(completions: list[Completion]) -> TensorDict:
    rows = TensorDict({}, batch_size=[len(completions)])
    rows["group"] = torch.tensor([c.group for c in completions])
    rows["place"] = torch.tensor([c.place for c in completions])
    rows["response_ids"] = torch.nested.nested_tensor(
        [c.token_ids for c in completions], layout=torch.jagged
    )
    rows["rollout_logprobs"] = torch.nested.nested_tensor(
        [c.logprobs for c in completions], layout=torch.jagged
    )
    if chosen := [c.routed_experts.flatten() for c in completions if c.routed_experts is not None]:
        rows[ROUTED] = torch.nested.nested_tensor(chosen, layout=torch.jagged)
    rows["truncated"] = torch.tensor([c.finish_reason == "length" for c in completions])
    return rows
