"""The memory of this machine, which the runs of a sweep share.

recipe ──▶ needs of the planner ──▶ Share: host, one device ──▶ Room.has: beside those that run, or not yet
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from orchestration.recipe.checks.memory import count, host_bytes, is_on_cpu, needs_of
from orchestration.recipe.schema import Recipe

# Of a run's processes beside what the planner derives: interpreters, libraries. Measured: `tiny`.
PROCESS_BYTES = 1 << 30


@dataclass(frozen=True)
class Share:
    """Bytes that a run takes of the host's memory, and of ``device``, one of the machine's;
    infinitely many where that is not known, so that it shares no device."""

    host: int
    on_device: float = 0
    device: str = ""

    @classmethod
    def of(cls, recipe: Recipe) -> Share:
        needs = needs_of(recipe)
        if needs is None or recipe.rollout.engine == "vllm":
            return cls(PROCESS_BYTES, math.inf if _may_use_a_device(recipe) else 0)
        devices = needs.devices.items()
        on_device = sum(count(recipe, side) * sum(parts.values()) for side, (_, parts) in devices)
        device = next((name for _, (name, _) in devices), "")
        return cls(PROCESS_BYTES + needs.host_bytes, on_device, device)


def _may_use_a_device(recipe: Recipe) -> bool:
    if recipe.rollout.engine == recipe.train.engine == "mock":
        return False
    return not (is_on_cpu(recipe.rollout.device) and is_on_cpu(recipe.train.device))


class Room:
    """The memory of this machine. ``host``: its bytes; None: not known."""

    def __init__(self, host: int | None = None) -> None:
        self._host = host or host_bytes() or math.inf

    def has(self, taken: Collection[Share], more: Share) -> bool:
        """Return whether ``more`` fits beside ``taken``. A run alone fits: its own check says so."""
        if taken and sum(share.host for share in taken) + more.host > self._host:
            return False
        others = sum(share.on_device for share in taken)
        if not others or not more.on_device:
            return True
        if not more.device:
            return False
        from stages.device import memory_bytes

        return others + more.on_device <= (memory_bytes(more.device) or 0)
