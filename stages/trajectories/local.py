"""Environments of user's classes and programs in this process.

open ─▶ a ClassEnvironment, or a ProgramEnvironment ─▶ step, each within its time ─▶ close
           └ a call fails, or takes too long ─▶ the trajectory is closed; a thread that hangs goes on
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from stages.environments.classes import ClassEnvironment, EnvironmentFactory
from stages.environments.interface import (
    EnvironmentCaller,
    EnvironmentDeclaration,
    EnvironmentFailed,
    Reply,
    Trajectory,
    Turn,
)
from stages.threads import CallThread

if TYPE_CHECKING:
    from stages.environments.programs.endpoint import Endpoint
    from stages.environments.programs.program import ProgramEnvironment


class LocalCaller(EnvironmentCaller):
    """Calls environments of ``factories``, at most ``places`` of them open. They share this
    process: one that ends it, or blocks its event loop, does so to all. ``endpoint``: at which
    programs reach the policy; by default one of its own."""

    def __init__(
        self,
        factories: Mapping[str, EnvironmentFactory],
        places: int = 1 << 20,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.places = places
        self._factories = factories
        self._free = asyncio.Semaphore(places)
        self._open: dict[str, ClassEnvironment | ProgramEnvironment] = {}
        self._endpoint = endpoint
        self._hanging: list[CallThread] = []

    @property
    def hangs(self) -> bool:
        """Whether a method that took too long still runs."""
        self._hanging = [thread for thread in self._hanging if thread.busy()]
        return bool(self._hanging)

    async def declare(self) -> Mapping[str, EnvironmentDeclaration]:
        return {
            name: await asyncio.to_thread(factory.declare)
            for name, factory in self._factories.items()
        }

    async def open(self, trajectory: Trajectory, timeout: float) -> Reply:
        await self.close(trajectory.key)
        factory = self._factories.get(trajectory.environment)
        if factory is None:
            raise unknown_environment(trajectory.environment, self._factories)
        await take_place(self._free, self.places, timeout)
        self._open[trajectory.key] = environment = self._environment(factory)
        return await self._within(timeout, trajectory.key, environment.open(trajectory))

    async def step(self, key: str, turn: Turn, timeout: float) -> Reply:
        return await self._within(timeout, key, self._open[key].step(turn))

    async def finish(self, key: str, timeout: float) -> Reply:
        return await self._within(timeout, key, self._open[key].finish())

    def _environment(self, factory: EnvironmentFactory) -> ClassEnvironment | ProgramEnvironment:
        if not factory.is_program:
            return ClassEnvironment(factory)
        from stages.environments.programs.endpoint import Endpoint
        from stages.environments.programs.program import ProgramEnvironment

        self._endpoint = self._endpoint or Endpoint()
        return ProgramEnvironment(factory.use, factory.make, factory.options, self._endpoint)

    def knows(self, key: str) -> bool:
        return key in self._open

    async def close(self, key: str) -> None:
        environment = self._open.get(key)
        if environment is not None and self._forget(key, environment):
            await environment.close()

    async def end(self) -> None:
        await asyncio.gather(*map(self.close, list(self._open)))
        if self._endpoint is not None:
            await self._endpoint.end()

    async def _within(self, timeout: float, key: str, call: Coroutine[Any, Any, Reply]) -> Reply:
        environment = self._open[key]
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                return await call
        except EnvironmentFailed:
            if self._forget(key, environment):
                await environment.close()
            raise
        except BaseException:
            self._forget(key, environment)
            method, place = environment.doing()
            self._hanging.append(environment.abandon())
            if deadline.expired():
                raise EnvironmentFailed(f"{method} took more than {timeout:g} s", place) from None
            raise

    def _forget(self, key: str, environment: ClassEnvironment | ProgramEnvironment) -> bool:
        """Return False where ``key`` was closed, or is another trajectory by now."""
        if self._open.get(key) is not environment:
            return False
        del self._open[key]
        self._free.release()
        return True


def unknown_environment(name: str, names: Mapping[str, Any]) -> EnvironmentFailed:
    listed = sorted(names)
    return EnvironmentFailed(f"the row's environment = {name!r} is none of the run's, {listed}")


async def take_place(free: asyncio.Semaphore, places: int, timeout: float) -> None:
    """Wait for a place of a trajectory. Raises EnvironmentFailed."""
    try:
        async with asyncio.timeout(timeout):
            await free.acquire()
    except TimeoutError:
        fix = "raise environment.processes or environment.concurrency"
        reason = f"all {places} places for open trajectories were taken for {timeout:g} s"
        raise EnvironmentFailed(f"{reason}; {fix}") from None
