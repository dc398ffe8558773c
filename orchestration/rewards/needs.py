"""What the processes of reward functions need: a sandbox, and a path of imports.

A function that comes with us or with an installed package is sandboxed, unless it is harmless, and for expressions that it
has math-verify compute also then; a ``module:function`` of the user where the recipe says so, as the service has it say
(:mod:`api.server.access.submission_policy`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from orchestration.recipe.sections.rewards import RewardFunction
from orchestration.sandbox.sandbox import WAY_OUT, Sandbox, available
from stages.prompts.tasks import COMPUTED, REWARDS
from stages.rewards.registry import ENTRY_POINTS, RewardError

ENTRY = "orchestration.rewards.process"
PACKAGES = Path(__file__).resolve().parents[2]  # the folder of our packages

log = structlog.get_logger()


def sandbox_of(function: RewardFunction, memory: int) -> Sandbox | None:
    """The sandbox of ``function``, whose processes may each hold ``memory`` bytes of data; None where it has none."""
    if not function.is_sandboxed and function.name not in COMPUTED:
        return None
    read = tuple(os.path.abspath(os.path.expanduser(path)) for path in function.read)
    return Sandbox(read=read, network=function.network, memory=memory)


def found_sandbox(names: Sequence[str], sandbox: Sandbox) -> Sandbox | None:
    """``sandbox`` as this machine gives it to the functions ``names``. Where it gives none, functions that are installed go
    without, as ours evaluate nothing. Raises RewardError for the user's own."""
    found = available()
    if not found.mechanism:
        if own := [name for name in names if ":" in name]:
            raise RewardError(f"rewards {own}: {found.shortfall}; {WAY_OUT}")
        log.warning("reward functions run without a sandbox", functions=names, reason=found.shortfall)
        return None
    if found.shortfall:
        log.warning("reward functions run in a weaker sandbox", functions=names, reason=found.shortfall)
    read = (*sandbox.read, *(place for name in names for place in _places(name)))
    modules = (*import_path(names), str(PACKAGES))
    return dataclasses.replace(sandbox, read=read, modules=modules, mechanism=found.mechanism)


def preload_of(names: Sequence[str]) -> tuple[str, ...]:
    """What the fork server imports, so that each process has it: of libraries what we call them for, and nothing of a
    user's."""
    libraries = {"reasoning_gym": "reasoning_gym", **dict.fromkeys(COMPUTED, "math_verify")}
    wanted = dict.fromkeys(libraries[name] for name in names if name in libraries)
    return (ENTRY, *(library for library in wanted if importlib.util.find_spec(library) is not None))


def import_path(names: Sequence[str]) -> list[str]:
    """The path of imports of a process that calls ``names``, absolute: it may work in another folder. The working folder is
    not part of it where all of them are installed."""
    here = os.getcwd()
    path = [os.path.abspath(entry) if not entry or os.path.exists(entry) else entry for entry in sys.path]
    own = any(":" in name for name in names)
    return [entry for entry in path if own or entry != here or entry == str(PACKAGES)]


def _places(name: str) -> Iterator[str]:
    """The file or the folders of the module that has the function ``name``, wherever it is installed."""
    module = name.partition(":")[0]
    if ":" not in name:
        if name in REWARDS:
            return
        entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
        module = entries[name].module if name in entries.names else ""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module.partition(".")[0])
        if spec is not None:
            folders = [*spec.submodule_search_locations] if spec.submodule_search_locations else [spec.origin or ""]
            yield from (folder for folder in folders if os.path.exists(folder))
