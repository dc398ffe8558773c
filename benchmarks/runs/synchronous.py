"""The synchronous run: the same stages in a plain loop, without dock, index or workers.

The asynchronous run with η = 0 must equal it bit for bit, and speed-ups are measured against it.

    for each step:  prompts ▶ generate all ▶ reward all ▶ (reference) ▶ credit ▶ optimizer steps ▶ swap weights
                       ▲                                                  │ groups that are dropped
                       └──────────────────────────────────────────────────┘
    with an environment, "generate all" is:  open all ▶ generate a turn of each ▶ answer all ▶ … until all have ended
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import NonTensorStack, TensorDict

from orchestration.environments.trajectories import make_trajectories
from orchestration.recipe.flow import algorithm_of, needs_reference, reward_reads
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
from stages.engines.protocols import (
    Completion,
    GroupRequest,
    RolloutEngine,
    TrainEngine,
    UndoableEngine,
)
from stages.environments.classes import environments
from stages.environments.interface import Declarations
from stages.flow.catalogue import ROUTED, TOKEN_REWARDS
from stages.flow.groups import outputs_of
from stages.model.load import Tokenizer
from stages.prompts.difficulty import Difficulty
from stages.prompts.gate import columns
from stages.prompts.sources import Prompt, load_prompts
from stages.rewards.stage import score_rows
from stages.rollout.stage import group_seed
from stages.training.advantage import credits, rewards_of_groups, spared
from stages.trajectories.local import LocalCaller
from stages.trajectories.play import play
from stages.trajectories.progress import Ending, ended_columns
from stages.trajectories.trajectory import Episode, Trajectories

Key = tuple[int, int]  # group, place


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
    trajectories = await _trajectories(recipe, tokenizer) if recipe.has_environment else None
    prompts = load_prompts(
        recipe.prompts,
        tokenizer,
        recipe.seed,
        limits=prompt_limits(recipe),
        opens=trajectories.dialogues if trajectories else None,
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
    dropping = tuple(scored_by(recipe))
    reads = tuple(reward_reads(recipe, []))
    by_token = TOKEN_REWARDS in {**algorithm.credit_reads, **algorithm.loss_reads}
    if trajectories is not None:
        sampling = trajectories.sampling(sampling)
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
            completions: dict[Key, Completion] = {}
            answers: dict[Key, Episode] = {}
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
                if trajectories is None:
                    completions |= await _generated(rollout, requests)
                else:
                    answers |= await _played(trajectories, rollout, requests, asked)
                generating += time.monotonic() - generation_began
                groups += fresh
                keys_of = [(group, place) for group in groups for place in range(size)]
                if trajectories is None:
                    batch = _batch([completions[key] for key in keys_of])
                else:
                    batch = _batch_of_trajectories(keys_of, [answers[key] for key in keys_of])
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
                scores = await score_rows(rewards, tokenizer, batch, reads, by_token=by_token)
                batch["reward"], batch["scores"] = scores.total, scores.scores
                if by_token:
                    batch[TOKEN_REWARDS] = torch.nested.nested_tensor(
                        scores.by_token, layout=torch.jagged
                    )
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
            every = recipe.model.reference_every
            if every and (step + 1) % every == 0:
                _move(reference, trainer, recipe.model.reference_mix)
            await rollout.load_weights(
                step + 1, {name: value.clone() for name, value in trainer.weights()}
            )
            yield SynchronousStep(
                step + 1,
                batch,
                dict(metrics) or {"loss": math.nan},
                float(batch["reward"].double().mean()),
                generating,
                time.monotonic() - scored,
                trainer,
                critic,
            )
    finally:
        if trajectories is not None:
            await trajectories.caller.end()
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


@torch.no_grad()
def _move(reference: Any, trainer: TrainEngine, share: float) -> None:
    """Make the reference ``share`` × the trainer's policy + (1 − ``share``) × itself."""
    policy = dict(trainer.weights())
    for name, parameter in reference.model.named_parameters():
        mixed = (1 - share) * parameter.float() + share * policy[name].float()
        parameter.copy_(mixed if share < 1 else policy[name])


async def _generated(
    rollout: RolloutEngine, requests: Sequence[GroupRequest]
) -> dict[Key, Completion]:
    async with aclosing(rollout.generate(requests)) as ended:  # type: ignore[type-var]
        return {(done.group, done.place): done async for done in ended}


async def _trajectories(recipe: Recipe, tokenizer: Tokenizer) -> Trajectories:
    section = recipe.environment
    assert section.use is not None
    caller = LocalCaller(environments(section.use, section.options))
    declared = Declarations(await caller.declare())
    return make_trajectories(recipe, tokenizer, caller, declared)


async def _played(
    trajectories: Trajectories,
    rollout: RolloutEngine,
    requests: Sequence[GroupRequest],
    prompts: Mapping[int, Prompt],
) -> dict[Key, Episode]:
    """Return the trajectories of ``requests`` when all have ended."""
    episodes = {}
    for request in requests:
        for place in request.places:
            row = len(request.places) * request.group + place
            fields = prompts[request.group].row
            episode = Episode(trajectories, row, request.group, place, fields)
            episodes[request.group, place] = episode
    await play(rollout, requests, episodes)
    return episodes


def _batch_of_trajectories(keys: Sequence[Key], episodes: Sequence[Episode]) -> TensorDict:
    made = ended_columns(
        [episode.progress for episode in episodes],
        [episode.reward for episode in episodes],
        [Ending.DONE for _ in episodes],
    )
    del made["versions"], made["ending"]
    rows = TensorDict({}, batch_size=[len(keys)])
    rows["group"] = torch.tensor([group for group, _ in keys])
    rows["place"] = torch.tensor([place for _, place in keys])
    for name, column in made.items():
        jagged = isinstance(column, list)
        rows[name] = torch.nested.nested_tensor(column, layout=torch.jagged) if jagged else column
    return rows


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
