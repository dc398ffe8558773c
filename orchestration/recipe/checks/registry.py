"""How a check of a recipe is declared: a generator of problems, with the keys that it reads.

    @check("train.warmup_steps", "train.steps")
    def schedule_fits(recipe): ...

A check is left out when a key that it reads is already known to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orchestration.recipe.problems import Problem
from orchestration.recipe.schema import Recipe
from stages.prompts.file_checks import PromptCheck
from stages.prompts.files import Reading


@dataclass
class Surroundings:
    """Where a recipe is checked: see :func:`orchestration.recipe.load.parse_recipe`. ``prompts`` has read the prompts."""

    reading: Reading
    folder: Path
    devices: bool
    prompts: PromptCheck | None = field(default=None, init=False)


Check = Callable[[Recipe], Iterator[Problem]]
MachineCheck = Callable[[Recipe, Surroundings], Iterator[Problem]]
CHECKS: dict[Check, tuple[str, ...]] = {}  # of the recipe alone, with the keys or sections that each reads
MACHINE_CHECKS: dict[MachineCheck, tuple[str, ...]] = {}  # of files, devices and room on this machine


def check(*keys: str) -> Callable[[Check], Check]:
    """Register a check that reads ``keys``, which may be sections."""

    def register(function: Check) -> Check:
        CHECKS[function] = keys
        return function

    return register


def machine_check(*keys: str) -> Callable[[MachineCheck], MachineCheck]:
    """Register a check that compares ``keys`` with the files, devices and free room of this machine."""

    def register(function: MachineCheck) -> MachineCheck:
        MACHINE_CHECKS[function] = keys
        return function

    return register


def touches(keys: Collection[str], wrong: Collection[str]) -> bool:
    """Whether one of ``keys`` is one of the ``wrong`` keys, lies in it, or holds it."""
    return any(
        f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for key in keys for other in wrong
    )
