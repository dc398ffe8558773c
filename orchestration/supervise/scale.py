"""Scaling: the number of rollout workers that a run is asked for while it goes on.

asyncdock runs scale, REST, autoscale ──▶ document SCALE ──▶ supervisor: starts workers, lets the last ones leave
a worker that leaves: document LEAVE ──▶ it claims nothing more, cuts and parks its responses, and ends
"""

from __future__ import annotations

import asyncio

from orchestration.recipe.loading.load import change_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.state.documents import RUN_RECIPE, SCALE
from orchestration.state.registry import WrongState
from pipeline.data.events import LIVE
from pipeline.index.client import Index
from pipeline.problems import Problem


def scaled(recipe: Recipe, rollouts: int) -> Recipe:
    """Return ``recipe`` with ``rollouts`` rollout workers.

    Raises RecipeError when the run cannot have so many.
    """
    overrides = [f"{key}={value}" for key, value in overrides_of(recipe, rollouts).items()]
    return change_recipe(recipe, overrides, runs=True)


def overrides_of(recipe: Recipe, rollouts: int) -> dict[str, int]:
    """Return the keys that change for ``rollouts`` rollout workers: those beyond the ones that the
    run's machine starts are left to hosts, where it has any. Raises RecipeError where the number
    cannot change."""
    if recipe.colocated or not recipe.runs_stage("rollout"):
        why = "cannot change: this run starts no rollout workers by themselves"
        raise RecipeError(
            recipe.name,
            [
                Problem(
                    "rollout.workers",
                    rollouts,
                    why,
                    "set launch.placement = 'separate' in a new run",
                )
            ],
        )
    remote = recipe.launch.remote_rollouts
    if remote:
        remote = max(0, rollouts - (recipe.rollout.workers - remote))
    return {"rollout.workers": rollouts, "launch.remote_rollouts": remote}


async def request_scale(index: Index, rollouts: int) -> tuple[str, int]:
    """Ask the run of ``index`` for ``rollouts`` rollout workers.

    Returns its state, and the number that it was asked for before. Raises RecipeError where it
    cannot have so many, and WrongState where it is not alive.
    """
    state = (await index.state())[0]
    recipe = await RUN_RECIPE.get(index)
    if recipe is None or state not in LIVE:
        raise WrongState(index.run, state, "scale")
    await asyncio.to_thread(scaled, recipe, rollouts)
    before = await SCALE.get(index) or recipe.rollout.workers
    await SCALE.put(index, rollouts)
    return state, before
