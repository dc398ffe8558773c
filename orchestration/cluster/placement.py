"""Placement: which node of a cluster has which worker.

    recipe ─▶ needs: resources of a worker ─▶ place: (kind, number) → node ─▶ bundles: what a run reserves on each node

Ranks that train together are packed on as few nodes as they fit on; the ranks of one
tensor-parallel replica, and the devices of one rollout engine, are within a node. Rollout engines
go to the nodes with most room. What has no engine of its own (flow, rewards, stages of the recipe)
runs on the head, and is not placed. Pure functions; resources have Ray's names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestration.recipe.devices import SIDES, Worker, wanted_devices
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import kind_of
from stages.device_names import RESOURCES

Room = dict[str, float]


@dataclass(frozen=True)
class Node:
    """A node and its ``free`` resources, such as {"CPU": 8, "GPU": 4}."""

    name: str
    free: Mapping[str, float]


def needs(recipe: Recipe, worker: Worker, devices: Collection[str]) -> Room:
    """Return the resources of one worker: a CPU for each of its threads, and its devices;
    ``devices``: the kinds that the cluster has, by torch's names."""
    section = getattr(recipe, SIDES.get(worker[0], ""), None)
    room: Room = {"CPU": float(getattr(section, "threads", 0) or 1)}
    name, several = wanted_devices(recipe, worker, devices) or ("cpu", 0)
    if resource := RESOURCES.get(name.partition(":")[0]):
        room[resource] = float(several)
    return room


def place(
    recipe: Recipe, workers: Iterable[Worker], nodes: Sequence[Node], devices: Collection[str]
) -> dict[Worker, str]:
    """Return the node of each of ``workers`` that fits; of the ranks that train together all or
    none."""
    free = {node.name: dict(node.free) for node in nodes}
    placed: dict[Worker, str] = {}
    for unit in _units(recipe, workers):
        room = {worker: needs(recipe, worker, devices) for worker in unit}
        unit_placement = _pack(_replicas(recipe, unit), room, free)
        for worker, node in unit_placement.items():
            _take(free[node], room[worker])
        placed |= unit_placement
    return placed


def bundles(
    recipe: Recipe, placed: Mapping[Worker, str], devices: Collection[str]
) -> dict[str, Room]:
    """Return what the workers of each node take together: the bundles of a placement group."""
    reserved: dict[str, Room] = {}
    for worker, node in placed.items():
        reserved[node] = _sum([reserved.get(node, {}), needs(recipe, worker, devices)])
    return reserved


def describe_lack(
    recipe: Recipe, missing: Iterable[Worker], nodes: Sequence[Node], devices: Collection[str]
) -> str:
    """Return in words which of ``missing`` has no room on ``nodes``."""
    wants = [
        f"{kind}-{number} ({shown(needs(recipe, (kind, number), devices))})"
        for kind, number in missing
    ]
    return (
        f"no room for {', '.join(wants)}; free are "
        f"{'; '.join(shown(node.free) for node in nodes) or 'no nodes'}"
    )


def shown(room: Mapping[str, float]) -> str:
    """Return resources in words.

    >>> shown({"CPU": 2.0, "GPU": 1.0, "memory": 1e9})
    'CPU 2, GPU 1'
    """
    return ", ".join(
        f"{name} {room[name]:g}" for name in ("CPU", *RESOURCES.values()) if name in room
    )


def _units(recipe: Recipe, workers: Iterable[Worker]) -> list[list[Worker]]:
    """Return the workers that are placed together: first the ranks that train, then each other
    worker alone."""
    units: dict[object, list[Worker]] = {}
    for worker in sorted(workers, key=lambda worker: (list(SIDES).index(worker[0]), worker[1])):
        units.setdefault(kind_of(worker[0]).rank_group or worker, []).append(worker)
    return sorted(units.values(), key=lambda unit: not kind_of(unit[0][0]).rank_group)


def _replicas(recipe: Recipe, unit: Sequence[Worker]) -> list[list[Worker]]:
    """Return the ranks of ``unit`` by tensor-parallel replica."""
    replicas: dict[tuple[str, tuple[int, ...]], list[Worker]] = {}
    for kind, number in unit:
        layout = (recipe.critic if kind == "critic" else recipe.train).layout
        replicas.setdefault((kind, layout.group("tp", number)), []).append((kind, number))
    return list(replicas.values())


def _pack(
    replicas: Sequence[Sequence[Worker]], room: Mapping[Worker, Room], free: Mapping[str, Room]
) -> dict[Worker, str]:
    """Return the nodes of ``replicas``, or nothing where they do not fit. A single worker goes to
    the node with most room.

    Several on one node where they fit on one, the one with least room to spare; otherwise node by
    node, from the widest one.
    """
    workers = [worker for replica in replicas for worker in replica]
    total = _sum(room[worker] for worker in workers)
    spare = {
        name: min(has.get(key, 0.0) / amount for key, amount in total.items() if amount)
        for name, has in free.items()
    }
    widest = sorted(free, key=lambda name: (-spare[name], name))
    narrowest = sorted(free, key=lambda name: (spare[name], name))
    for pieces, names in (
        *([] if len(workers) == 1 else [([workers], narrowest)]),
        (replicas, widest),
    ):
        remaining = {name: dict(free[name]) for name in names}
        placement = dict[Worker, str]()
        for piece in pieces:
            needed = _sum(room[worker] for worker in piece)
            if (
                name := next((name for name in names if _fits(needed, remaining[name])), None)
            ) is None:
                break
            _take(remaining[name], needed)
            placement |= dict.fromkeys(piece, name)
        else:
            return placement
    return {}


def _sum(rooms: Iterable[Room]) -> Room:
    total: Room = {}
    for room in rooms:
        for resource, amount in room.items():
            total[resource] = total.get(resource, 0.0) + amount
    return total


def _fits(room: Room, free: Room) -> bool:
    return all(free.get(resource, 0.0) >= amount for resource, amount in room.items())


def _take(free: Room, room: Room) -> None:
    for resource, amount in room.items():
        free[resource] = free.get(resource, 0.0) - amount
