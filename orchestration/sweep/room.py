"""The memory of this machine, which the runs of a sweep share.

recipe ──▶ needs of the planner ──▶ Share: host, one device ──▶ Room.has: beside those that run, or not yet
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

from orchestration.recipe.checks.memory import (
    count,
    device_of,
    host_bytes,
    is_on_cpu,
    needs_of,
)
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.memory_parts import Engine

# Of a run's processes beside what the planner derives: interpreters, libraries. Measured: `tiny`.
PROCESS_BYTES = 1 << 30


@dataclass(frozen=True)
class Share:
    """Bytes that a run takes of the host's memory, and of one device of the machine; None: unknown,
    so that it shares no device."""

    host: int
    device: int | None = 0
    name: str = ""

    @classmethod
    def of(cls, recipe: Recipe) -> Share:
        needs = needs_of(recipe)
        if needs is None or recipe.rollout.engine == "vllm":
            return cls(PROCESS_BYTES, 0 if _computes_here(recipe) else None)
        devices = needs.devices
        on_device = sum(
            count(recipe, side) * sum(parts.values()) for side, (_, parts) in devices.items()
        )
        name = next((name for name, _ in devices.values()), "")
        return cls(PROCESS_BYTES + needs.host_bytes, on_device, name)


def _computes_here(recipe: Recipe) -> bool:
    """Return whether all engines are on the CPU."""
    if {recipe.rollout.engine, recipe.train.engine} == {"mock"}:
        return True
    return recipe.rollout.engine != "vllm" and all(
        is_on_cpu(device_of(recipe, side)) for side in get_args(Engine)
    )


class Room:
    """The memory of this machine. ``host``: its bytes; None: not known."""

    def __init__(self, host: int | None = None) -> None:
        self._host = host if host is not None else host_bytes()

    def has(self, taken: Collection[Share], more: Share) -> bool:
        """Return whether ``more`` fits beside ``taken``. A run alone fits: its own check says so."""
        if not taken:
            return True
        shares = [*taken, more]
        if self._host is not None and sum(share.host for share in shares) > self._host:
            return False
        on_device = [share.device for share in shares if share.device != 0]
        if len(on_device) < 2 or more.device == 0:
            return True
        if None in on_device:
            return False
        from stages.device import memory_bytes

        room = memory_bytes(more.name)
        return room is not None and sum(filter(None, on_device)) <= room
