"""Which devices of a node the workers of a run compute on.

    recipe, devices of the node ──▶ assign ──▶ (kind, number) → devices ──▶ the launcher: a worker process sees its own

Ranks of the trainer come first, then rollout engines, then critic and reference, in turn over the devices: with fewer
devices than workers some share one. A device that the recipe numbers (``cuda:1``) is taken as it is, and the others avoid
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.run.kinds import remote_workers, workers_of
from stages.device_names import VISIBLE, visible_devices

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe

Worker = tuple[str, int]  # kind and number
SIDES = {
    "update": "train",
    "colocated": "train",
    "rollout": "rollout",
    "critic": "train",
    "reference": "train",
}  # whose device and engine


@dataclass(frozen=True)
class Devices:
    """Devices of one ``kind``, as the kind's variable names them. ``fixed``: the recipe gives the number, and the worker
    sees all devices of the node."""

    kind: str
    names: tuple[str, ...]
    fixed: bool = False

    def environment(self) -> dict[str, str]:
        """The variable that shows a process these devices alone, which it numbers from 0."""
        return {} if self.fixed else {VISIBLE[self.kind][0]: ",".join(self.names)}


def on_this_node() -> dict[str, list[str]]:
    """Returns the devices that processes of this node see, by kind, for kinds with a variable that limits them."""
    return {kind: found for kind in VISIBLE if (found := visible_devices(kind))}


def assign(recipe: Recipe, node: Mapping[str, Sequence[str]]) -> dict[Worker, Devices]:
    """Returns the devices of each worker that computes on an accelerator of ``node``."""
    wanted: dict[Worker, tuple[str, int]] = {}  # the device's name in the recipe, and how many
    remote = remote_workers(recipe)
    here = [worker for worker in workers_of(recipe) if worker not in remote]
    for worker in sorted(here, key=lambda worker: list(SIDES).index(worker[0]) if worker[0] in SIDES else 9):
        if (device := wanted_devices(recipe, worker, node)) is not None:
            wanted[worker] = device
    fixed = {name for name, _ in wanted.values() if ":" in name}
    given: dict[Worker, Devices] = {}
    taken = dict.fromkeys(node, 0)
    for worker, (name, several) in wanted.items():
        kind, _, number = name.partition(":")
        names = list(node.get(kind, ()))
        if number:
            given[worker] = Devices(kind, (number,), fixed=True)
        elif names:
            free = [one for at, one in enumerate(names) if f"{kind}:{at}" not in fixed] or names
            turns = range(taken[kind], taken[kind] + min(several, len(free)))
            given[worker] = Devices(kind, tuple(free[turn % len(free)] for turn in turns))
            taken[kind] += len(turns)
    return given


def wanted_devices(recipe: Recipe, worker: Worker, kinds: Iterable[str]) -> tuple[str, int] | None:
    """Returns the device that ``worker`` computes on, as the recipe names it, and how many; None without an engine.
    ``kinds``: of which there are devices; the first one is `auto`."""
    section = getattr(recipe, SIDES.get(worker[0], ""), None)
    if section is None or section.engine == "mock":
        return None
    several = section.vllm.tensor_parallel if worker[0] == "rollout" and section.engine == "vllm" else 1
    device = getattr(getattr(recipe, worker[0], None), "device", None) or section.device  # its own section's
    return device if device != "auto" else next(iter(kinds), "cpu"), several


class DevicePool:
    """The devices of a host. Each of its workers gets those that fewest of its living workers have."""

    def __init__(self, node: Mapping[str, Sequence[str]]) -> None:
        self._node, self.given = node, dict[Worker, Devices]()

    def give(self, recipe: Recipe, worker: Worker) -> None:
        """Give ``worker``, which is about to start, its devices, if it computes on any."""
        name, several = wanted_devices(recipe, worker, self._node) or ("cpu", 0)
        kind, _, number = name.partition(":")
        if number:
            self.given[worker] = Devices(kind, (number,), fixed=True)
        elif names := self._node.get(kind, ()):
            used = [name for devices in self.given.values() if devices.kind == kind for name in devices.names]
            fewest = sorted(names, key=used.count)  # stable: in the node's order
            self.given[worker] = Devices(kind, tuple(fewest[:several]))

    def take_back(self, worker: Worker) -> None:
        self.given.pop(worker, None)


def shown(given: Iterable[tuple[Worker, Devices]]) -> str:
    """The devices of each worker, in one line."""
    return ", ".join(f"{kind}-{number} on {of.kind} {'+'.join(of.names)}" for (kind, number), of in given)
