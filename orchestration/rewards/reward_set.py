"""The reward functions of a recipe, as its reward stage and its evaluations call them."""

from __future__ import annotations

from pathlib import Path

from orchestration.recipe.schema import Recipe
from orchestration.rewards.pool import RewardPool
from stages.prompts.tasks import HARMLESS
from stages.rewards.calls import Caller
from stages.rewards.stage import ErrorPolicy, RewardSet


def reward_pool(recipe: Recipe, log: Path) -> RewardPool | None:
    """The pool of the reward functions that need one; None where there are none, or ``reward.processes`` is 0."""
    section = recipe.reward
    names = [function.name for function in section.functions if function.name not in HARMLESS]
    if not names or not section.processes:
        return None
    return RewardPool(names, processes=section.processes, memory=section.memory, log=log)


def reward_set(recipe: Recipe, pool: Caller | None = None) -> RewardSet:
    """The reward functions of ``recipe`` and what is done when they fail. Without ``pool`` they run in this process."""
    section = recipe.reward
    policy = ErrorPolicy(section.timeout, section.retries, section.on_error, section.max_error_share)
    return RewardSet([(function.name, function.weight) for function in section.functions], policy=policy, pool=pool)


def droppers(recipe: Recipe) -> tuple[str, ...]:
    """The functions whose failure drops a group, in the order of the column ``scores``; none where failures are handled
    otherwise, or another program scores."""
    drops = recipe.reward.on_error == "drop" and recipe.runs_stage("reward")
    return tuple(function.name for function in recipe.reward.functions) if drops else ()
