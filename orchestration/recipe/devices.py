"""Which devices of a node the workers of a run compute on.

    recipe, devices of the node ──▶ assign ──▶ (kind, number) → devices ──▶ the launcher: a worker process sees its own

Ranks of the trainer come first, then rollout engines, then critic and reference, in turn over the
devices: with fewer devices than workers some share one. The workers of a host come as they start. A
device that the recipe numbers (``cuda:1``) is taken as it is, and the others avoid it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.recipe.worker_kinds import remote_workers, workers_of
from stages.device_names import VISIBLE, visible_devices

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe

Worker = tuple[str, int]  # kind and number
# The section with the device and the engine of each kind.
SIDES = {
    "update": "train",
    "colocated": "train",
    "rollout": "rollout",
    "critic": "train",
    "reference": "train",
}


@dataclass(frozen=True)
class Devices:
    """Devices of one ``kind``, as the kind's variable names them.

    ``fixed``: the recipe gives the number, and the worker sees all devices of the node.
    """

    kind: str
    names: tuple[str, ...]
    fixed: bool = False

    def environment(self) -> dict[str, str]:
        """The variable that shows a process these devices alone, which it numbers from 0."""
        return {} if self.fixed else {VISIBLE[self.kind][0]: ",".join(self.names)}


def on_this_node() -> dict[str, list[str]]:
    """Returns the devices that processes of this node see, by kind, for kinds with a variable that
    limits them."""
    return {kind: found for kind in VISIBLE if (found := visible_devices(kind))}


def assign(recipe: Recipe, node: Mapping[str, Sequence[str]]) -> dict[Worker, Devices]:
    """Returns the devices of each worker that computes on an accelerator of ``node``."""
    pool = DevicePool(node)
    remote = remote_workers(recipe)
    here = [worker for worker in workers_of(recipe) if worker not in remote]
    here.sort(key=lambda worker: list(SIDES).index(worker[0]) if worker[0] in SIDES else 9)
    # numbered ones first
    here.sort(key=lambda worker: ":" not in (wanted_devices(recipe, worker, node) or ("",))[0])
    for worker in here:
        pool.give(recipe, worker)
    return pool.given


def wanted_devices(recipe: Recipe, worker: Worker, kinds: Iterable[str]) -> tuple[str, int] | None:
    """Returns the device that ``worker`` computes on, as the recipe names it, and how many; None
    without an engine.
    ``kinds``: of which there are devices; the first one is `auto`."""
    section = getattr(recipe, SIDES.get(worker[0], ""), None)
    if section is None or section.engine == "mock":
        return None
    several = (
        section.vllm.tensor_parallel if worker[0] == "rollout" and section.engine == "vllm" else 1
    )
    # its own section's
    device = getattr(getattr(recipe, worker[0], None), "device", None) or section.device
    return device if device != "auto" else next(iter(kinds), "cpu"), several


def cores_here() -> int:
    """Returns the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(recipe: Recipe, asked: int) -> int:
    """Returns the CPU threads of one engine: ``asked``, or where that is 0 its share of the cores.

    Generation and training run at the same time when the run is asynchronous, and in turn when it
    is not.
    """
    training = recipe.train.ranks + (recipe.critic.ranks if recipe.trains_critic else 0)
    in_turn = recipe.colocated or recipe.staleness_plan.slack == 0
    rollouts = recipe.rollout.workers if recipe.runs_stage("rollout") else 0
    together = training if in_turn else training + rollouts
    return asked or max(1, cores_here() // together)


class DevicePool:
    """The devices of a node.

    Each worker gets those that fewest of the living workers have, and none that a recipe has given
    by its number before, where there are others.
    """

    def __init__(self, node: Mapping[str, Sequence[str]]) -> None:
        self._node = node
        self.given = dict[Worker, Devices]()

    def give(self, recipe: Recipe, worker: Worker) -> None:
        """Give ``worker``, which is about to start, its devices, if it computes on any."""
        name, several = wanted_devices(recipe, worker, self._node) or ("cpu", 0)
        kind, _, number = name.partition(":")
        given = [devices for devices in self.given.values() if devices.kind == kind]
        if number:
            self.given[worker] = Devices(kind, (number,), fixed=True)
        elif names := self._node.get(kind, ()):
            numbered = {devices.names[0] for devices in given if devices.fixed}
            used = [one for devices in given if not devices.fixed for one in devices.names]
            free = [one for at, one in enumerate(names) if str(at) not in numbered] or names
            self.given[worker] = Devices(
                kind, tuple(sorted(free, key=used.count)[:several])
            )  # stable: in the node's order

    def take_back(self, worker: Worker) -> None:
        self.given.pop(worker, None)


def shown(given: Iterable[tuple[Worker, Devices]]) -> str:
    """The devices of each worker, in one line."""
    return ", ".join(
        f"{kind}-{number} on {of.kind} {'+'.join(of.names)}" for (kind, number), of in given
    )
