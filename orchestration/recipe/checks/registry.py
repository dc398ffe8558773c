"""Decorators that register the checks of a recipe, each with the keys that it reads.

    @check("train.warmup_steps", "train.steps")
    def warmup_fits(recipe):
        yield problem(recipe, "train.warmup_steps", "is more than ...", "use ...")

:func:`run_checks` leaves a check out when one of its keys is already known to be wrong.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

from orchestration.recipe.model_files import KNOWN_MODELS
from orchestration.recipe.schema import Recipe
from pipeline.problems import Problem
from stages.device_names import plugin_fault
from stages.prompts.rows.files import Reading
from stages.prompts.rows.prompt_check import PromptCheck

CHAT = ("chat_template", "chat_template_options", "responses")  # of prompts


@dataclass
class Environment:
    """What a recipe is compared with: files, read within ``reading``; the disk of ``folder``; this
    machine's devices if ``devices``, and its addresses if ``here``. ``prompts`` has what was read
    of each source of prompts, by its key in the recipe: a check that reads it runs after the one
    that reads the sources (``machine_check(…, after=…)``)."""

    reading: Reading
    folder: Path
    devices: bool
    here: bool
    prompts: dict[str, PromptCheck] = field(default_factory=dict, init=False)


# Modules with the checks of a subject that many recipes lack, and the keys of the subject: they are
# imported for a recipe in which one of these is not as by default, and find nothing in any other.
SUBJECTS = {
    "adapters": ("model.lora",),
    "addresses": (
        *(f"pipeline.{name}" for name in ("index", "serve")),
        *(f"pipeline.tls_{name}" for name in ("certificate", "key", "authority")),
        "sync.transport",
        *(f"launch.{name}" for name in ("launcher", "remote_rollouts", "address")),
    ),
    "examples": ("model.vocabulary", *(f"prompts.{name}" for name in CHAT)),
    "environment": ("environment",),
    "other_models": ("teacher", "critic", "model.reference", "rollout.draft_model"),
    "training": (
        *(f"train.{name}" for name in ("optimizer", "router_loss", "router_bias_rate")),
        *(f"model.reference_{name}" for name in ("every", "mix")),
    ),
}

Check = Callable[[Recipe], Iterator[Problem]]
MachineCheck = Callable[[Recipe, Environment], Iterator[Problem]]
# of the recipe alone, with the keys or sections that each reads
CHECKS: dict[Check, tuple[str, ...]] = {}
MACHINE_CHECKS: dict[MachineCheck, tuple[str, ...]] = {}  # of files, devices and free room
# the checks whose findings in the Environment each reads
AFTER: dict[MachineCheck, tuple[MachineCheck, ...]] = {}


def check(*keys: str) -> Callable[[Check], Check]:
    """Register a check of the recipe alone. It reads ``keys``, which may be sections."""

    def register(function: Check) -> Check:
        CHECKS[function] = keys
        return function

    return register


def machine_check(
    *keys: str, after: tuple[MachineCheck, ...] = ()
) -> Callable[[MachineCheck], MachineCheck]:
    """Register a check that compares ``keys`` with files, devices or free room of this machine.

    ``after``: the checks whose findings in the :class:`Environment` it reads, or before which it
    must not spend the Reading; they run first.
    """

    def register(function: MachineCheck) -> MachineCheck:
        MACHINE_CHECKS[function], AFTER[function] = keys, after
        return function

    return register


def machine_checks() -> list[MachineCheck]:
    """Return the checks of the machine, each after those that it names, and else in the order of
    their registration."""
    return list(TopologicalSorter({check: AFTER[check] for check in MACHINE_CHECKS}).static_order())


def run_checks(
    recipe: Recipe, wrong: Collection[str], environment: Environment | None
) -> Iterator[Problem]:
    """Run the checks that read none of the ``wrong`` keys; those of the machine only with an
    ``environment``. Where torch cannot be imported here, that is the only problem: no other check
    that asks torch could run."""
    if environment is not None and (fault := plugin_fault()):
        yield Problem("torch", None, *fault)
        return
    _import_subjects(recipe)
    for check_recipe, keys in CHECKS.items():
        if not _overlap(keys, wrong):
            yield from check_recipe(recipe)
    if environment is not None:
        if recipe.launch.on_cluster:  # this machine's devices and memory are not those of its nodes
            environment.devices = False
        for check_machine in machine_checks():
            if not _overlap(MACHINE_CHECKS[check_machine], wrong):
                yield from check_machine(recipe, environment)


def _import_subjects(recipe: Recipe) -> None:
    """Import the checks of the subjects that ``recipe`` has."""
    for name, keys in SUBJECTS.items():
        is_users_model = name == "examples" and recipe.model.source not in KNOWN_MODELS
        if is_users_model or any(is_set(recipe, key) for key in keys):
            importlib.import_module(f"orchestration.recipe.checks.{name}")


def is_set(recipe: Recipe, key: str) -> bool:
    """Return whether ``key``, which may be a section, is not as by default."""
    section, _, name = key.rpartition(".")
    table = operator.attrgetter(section)(recipe) if section else recipe
    default = type(table).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(table, name) != default)


def _overlap(keys: Collection[str], others: Collection[str]) -> bool:
    """Whether a key is one of the others, lies in one, or contains one."""
    pairs = ((f"{key}.", f"{other}.") for key in keys for other in others)
    return any(key.startswith(other) or other.startswith(key) for key, other in pairs)


def problem(recipe: Recipe, key: str, wrong: str, fix: str) -> Problem:
    """A problem of ``key`` with the value that it has in ``recipe``."""
    return Problem(key, operator.attrgetter(key)(recipe), wrong, fix)
