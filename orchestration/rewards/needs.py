"""Needs of the processes of reward functions: a sandbox, and what their fork server imports.

A function that comes with us or with an installed package is sandboxed, unless it is harmless, and
for expressions that it has math-verify compute also then; a ``module:function`` of the user where
the recipe says so, as the service has it say (:mod:`api.server.access.submission_policy`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import structlog

from orchestration.recipe.sections.rewards import RewardFunction
from orchestration.sandbox.sandbox import WAY_OUT, Sandbox, available
from orchestration.sandbox.user_code import as_given, readable
from stages.rewards.registry import ENTRY_POINTS, RewardError
from stages.tasks.tasks import COMPUTED, REWARDS, RUNNING

ENTRY = "orchestration.rewards.process"

log = structlog.get_logger()


def sandbox_of(function: RewardFunction, memory: int) -> Sandbox | None:
    """Return the sandbox of ``function``, whose processes may each hold ``memory`` bytes of data;
    None where it has none."""
    if not function.is_sandboxed and function.name not in COMPUTED:
        return None
    return Sandbox(read=readable(function.read), network=function.network, memory=memory)


def found_sandbox(names: Sequence[str], sandbox: Sandbox) -> Sandbox | None:
    """Return ``sandbox`` as this machine gives it to the functions ``names``.

    Where it gives none, functions that are installed go without, as ours evaluate nothing. Raises
    RewardError for the user's own, and for those that run programs.
    """
    support = available()
    if running := [name for name in names if name in RUNNING and support.shortfall]:
        raise RewardError(f"rewards {running}: {support.shortfall}; {WAY_OUT}")
    if not support.mechanism:
        if user_functions := [name for name in names if ":" in name]:
            raise RewardError(f"rewards {user_functions}: {support.shortfall}; {WAY_OUT}")
        log.warning(
            "reward functions run without a sandbox", functions=names, reason=support.shortfall
        )
        return None
    if support.shortfall:
        log.warning(
            "reward functions run in a weaker sandbox", functions=names, reason=support.shortfall
        )
    return as_given(sandbox, support, [name for name in names if name not in REWARDS], ENTRY_POINTS)


def preload_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that the fork server imports, so that each process has them: of libraries
    what we call them for, and nothing of a user's."""
    libraries = {"reasoning_gym": "reasoning_gym", **dict.fromkeys(COMPUTED, "math_verify")}
    wanted = dict.fromkeys(libraries[name] for name in names if name in libraries)
    return (
        ENTRY,
        *(library for library in wanted if importlib.util.find_spec(library) is not None),
    )
