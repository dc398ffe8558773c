"""The reward functions of a recipe, as its reward stage and its evaluations call them.

harmless functions ──▶ called in the worker
all others         ──▶ a pool of processes (orchestration.rewards.pool), imported for them
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from orchestration.recipe.schema import Recipe
from stages.rewards.calls import Caller
from stages.rewards.stage import ErrorPolicy, RewardSet
from stages.tasks.tasks import COMPUTED, HARMLESS


def reward_pool(recipe: Recipe, log: Path) -> Caller | None:
    """Return the pool of the reward functions that need one, or several where they need different
    sandboxes; None where there are none, or ``reward.processes`` is 0."""
    section = recipe.reward
    if not section.processes:
        return None
    functions = [function for function in section.functions if _needs_process(function.name)]
    if not functions:
        return None
    from orchestration.rewards.pool import pools

    return pools(functions, section, log)


def _needs_process(name: str) -> bool:
    if name in COMPUTED:
        from stages.tasks.answers import computes

        return computes()
    return name not in HARMLESS


def reward_set(
    recipe: Recipe, pool: Caller | None = None, end_tokens: Collection[int] = ()
) -> RewardSet:
    """Return the reward functions of ``recipe`` and what is done when they fail. Without ``pool``
    they run in this process.

    ``end_tokens``: ids that end a response.
    """
    section = recipe.reward
    return RewardSet(
        [(function.name, function.weight) for function in section.functions],
        policy=ErrorPolicy(
            timeout=section.timeout,
            retries=section.retries,
            on_error=section.on_error,
            max_error_share=section.max_error_share,
            concurrency=section.concurrency,
        ),
        batched=[function.name for function in section.functions if function.batch],
        options={function.name: function.options for function in section.functions},
        pool=pool,
        end_tokens=frozenset(end_tokens) if section.special_tokens == "keep" else None,
    )


def scored_by(recipe: Recipe) -> dict[str, float]:
    """Return the weights of the functions that a run of ``recipe`` calls, by their names and in the
    order of the column ``scores``; {} where another program scores."""
    if not recipe.runs_stage("reward"):
        return {}
    return {function.name: function.weight for function in recipe.reward.functions}
