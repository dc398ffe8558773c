"""The synchronous run: the same stages in a plain loop, without dock, index or workers.

The asynchronous run with η = 0 must equal it bit for bit, and speed-ups are measured against it.

    for each step:  prompts ▶ generate all ▶ reward all ▶ (reference) ▶ advantage ▶ one optimizer step ▶ swap weights
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from orchestration.recipe.planner import prompt_limits
from orchestration.recipe.schema import Recipe
from orchestration.run.engines import reference_engine, rollout_engine, sampling_of, tokenizer_of, train_engine
from stages.algorithms import build_algorithm
from stages.engines.protocols import Completion, GroupRequest, TrainEngine
from stages.gate import columns
from stages.prompts.sources import load_prompts
from stages.rewards.stage import RewardSet, score_rows
from stages.rollout.stage import group_seed
from stages.training.advantage import advantages


@dataclass(frozen=True)
class SynchronousStep:
    """One step of the loop: its rows as they were trained, what the engine measured, and seconds."""

    step: int
    batch: TensorDict
    metrics: dict[str, float]
    reward_mean: float
    generate_seconds: float
    train_seconds: float
    engine: TrainEngine


async def synchronous_run(recipe: Recipe) -> AsyncGenerator[SynchronousStep, None]:
    """Train ``recipe`` step by step, and yield each step with the engine that has its weights. The bound is not used."""
    tokenizer = tokenizer_of(recipe)
    prompts = load_prompts(recipe.prompts, tokenizer, recipe.seed, limits=prompt_limits(recipe)).train
    algorithm = build_algorithm(recipe.algorithm.name, recipe.algorithm.options)
    rewards = RewardSet([(function.name, function.weight) for function in recipe.reward.functions])
    sampling, size, per_step = sampling_of(recipe, tokenizer), recipe.algorithm.group_size, recipe.train.groups_per_step
    rollout, trainer = rollout_engine(recipe, version=0), train_engine(recipe)
    reference = reference_engine(recipe) if algorithm.needs_reference else None
    try:
        for step in range(recipe.train.steps):
            groups = range(step * per_step, (step + 1) * per_step)
            asked = [prompts.prompt(group) for group in groups]
            requests = [
                GroupRequest(group, tuple(range(size)), prompt.ids, sampling, group_seed(recipe.seed, group))
                for group, prompt in zip(groups, asked, strict=True)
            ]
            began = time.monotonic()
            done: dict[tuple[int, int], Completion] = {}
            async with aclosing(rollout.generate(requests)) as completions:  # type: ignore[type-var]
                async for completion in completions:
                    done[completion.group, completion.place] = completion
            generated = time.monotonic()
            batch = _batch([done[group, place] for group in groups for place in range(size)])
            given: dict[str, Any] = columns([prompt for prompt in asked for _ in range(size)])
            batch["prompt_ids"] = torch.nested.nested_tensor(given["prompt_ids"], layout=torch.jagged)
            batch["given"], batch["fields"] = NonTensorStack(*given["given"]), NonTensorStack(*given["fields"])
            batch["reward"] = (await score_rows(rewards, tokenizer, batch)).total
            if reference is not None:
                batch["ref_logprobs"] = await asyncio.to_thread(reference.logprobs, batch)
            batch["advantage"] = advantages(algorithm, batch["reward"], batch["group"].tolist())
            scored = time.monotonic()
            metrics = await asyncio.to_thread(trainer.train_batch, batch, algorithm)
            await rollout.load_weights(step + 1, {name: value.clone() for name, value in trainer.weights()})
            yield SynchronousStep(
                step,
                batch,
                dict(metrics),
                float(batch["reward"].double().mean()),
                generated - began,
                time.monotonic() - scored,
                trainer,
            )
    finally:
        await rollout.close()
        for engine in (trainer, reference):
            if engine is not None:
                engine.close()


def _batch(completions: list[Completion]) -> TensorDict:
    rows = TensorDict({}, batch_size=[len(completions)])
    rows["group"] = torch.tensor([c.group for c in completions])
    rows["place"] = torch.tensor([c.place for c in completions])
    rows["response_ids"] = torch.nested.nested_tensor([c.token_ids for c in completions], layout=torch.jagged)
    rows["rollout_logprobs"] = torch.nested.nested_tensor([c.logprobs for c in completions], layout=torch.jagged)
    return rows
