"""A run whose environments are called in different places.

open(trajectory) ─┬─ user's code ─────────▶ a pool of processes
                  └─ programs outside ────▶ this process, with the server of their sessions
"""

from __future__ import annotations

from collections.abc import Mapping

from stages.environments.interface import (
    EnvironmentCaller,
    EnvironmentDeclaration,
    Reply,
    Trajectory,
    Turn,
)
from stages.trajectories.local import unknown_environment


class CallerByName(EnvironmentCaller):
    """Calls each environment by the caller that ``by_name`` has for it."""

    def __init__(self, by_name: Mapping[str, EnvironmentCaller]) -> None:
        self._by_name = by_name
        self._callers = {*by_name.values()}
        self._by_key: dict[str, EnvironmentCaller] = {}
        self.places = sum(caller.places for caller in self._callers)

    async def declare(self) -> Mapping[str, EnvironmentDeclaration]:
        declared = dict[str, EnvironmentDeclaration]()
        for caller in self._callers:
            declared |= await caller.declare()
        return declared

    async def open(self, trajectory: Trajectory, timeout: float) -> Reply:
        await self.close(trajectory.key)
        caller = self._by_name.get(trajectory.environment)
        if caller is None:
            raise unknown_environment(trajectory.environment, self._by_name)
        self._by_key[trajectory.key] = caller
        return await caller.open(trajectory, timeout)

    async def step(self, key: str, turn: Turn, timeout: float) -> Reply:
        return await self._by_key[key].step(key, turn, timeout)

    async def finish(self, key: str, timeout: float) -> Reply:
        return await self._by_key[key].finish(key, timeout)

    def knows(self, key: str) -> bool:
        return key in self._by_key and self._by_key[key].knows(key)

    async def close(self, key: str) -> None:
        if caller := self._by_key.pop(key, None):
            await caller.close(key)

    async def end(self) -> None:
        for caller in self._callers:
            await caller.end()
