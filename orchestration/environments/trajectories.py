"""The trajectories of a recipe, as its environment worker and its evaluations play them.

environments of user's code ──▶ a pool of processes (orchestration.environments.pool)
with the inline launcher    ──▶ called in the worker
"""

from __future__ import annotations

import os
from pathlib import Path

from orchestration.processes.environment import of_user_code
from orchestration.recipe.dialogue import dialogues_of
from orchestration.recipe.schema import Recipe
from orchestration.sandbox.sandbox import Sandbox
from orchestration.sandbox.user_code import readable
from stages.environments.classes import environments
from stages.environments.interface import Declarations, EnvironmentCaller
from stages.model.load import Tokenizer
from stages.trajectories.trajectory import Limits, Trajectories


def make_caller(
    recipe: Recipe, places: int, log: Path, *, inline: bool | None = None
) -> EnvironmentCaller:
    """Return what calls the user's environments of ``recipe``, with ``places`` open at a time.

    ``log`` gets what they print. ``inline``: they are called in this process; default: as
    ``launch.launcher`` says.
    """
    section = recipe.environment
    use = section.use
    assert use is not None
    if isinstance(use, dict):
        use = {name: each for name, each in use.items() if name not in section.outside}
    if recipe.launch.launcher == "inline" if inline is None else inline:
        from stages.trajectories.local import LocalCaller

        return LocalCaller(environments(use, section.options), places)
    from orchestration.environments.pool import EnvironmentPool

    sandbox = None
    if section.sandbox:
        sandbox = Sandbox(
            read=readable(section.read), network=section.network, memory=section.memory
        )
    return EnvironmentPool(
        use,
        section.options,
        processes=section.processes,
        concurrency=-(-places // section.processes),
        memory=section.memory,
        log=log,
        sandbox=sandbox,
        environment=of_user_code(dict(os.environ), recipe.reward.environment),
    )


def make_trajectories(
    recipe: Recipe, tokenizer: Tokenizer, caller: EnvironmentCaller, declared: Declarations
) -> Trajectories:
    """Return the trajectories of ``recipe``, whose environments are ``declared`` and called by
    ``caller``."""
    section = recipe.environment
    return Trajectories(
        caller,
        declared.by_name,
        dialogues_of(recipe, tokenizer, declared),
        Limits(
            max_turns=section.max_turns,
            max_tokens=recipe.longest_response,
            turn_tokens=recipe.rollout.max_tokens,
            step_seconds=section.timeout,
            trajectory_seconds=section.trajectory_timeout,
        ),
        seed=recipe.seed,
    )
