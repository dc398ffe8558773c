"""The worker in which the environments of trajectories are called."""

from __future__ import annotations

import asyncio
import secrets

from orchestration.environments.callers import CallerByName
from orchestration.environments.trajectories import make_caller, make_trajectories
from orchestration.recipe.sections.environment import OUTSIDE
from orchestration.state.documents import ENVIRONMENTS, SESSIONS
from orchestration.workers.job import Job
from stages.environments.classes import environments
from stages.environments.interface import Declarations, EnvironmentCaller
from stages.trajectories.stage import Environments


class EnvironmentJob(Job):
    """The job that opens environments and has them answer turns: in processes of their own, or with
    the inline launcher in this one."""

    async def build(self) -> None:
        recipe = self.recipe
        section = recipe.environment
        caller = await self._caller()
        self.resources.push_async_callback(caller.end)
        declared = Declarations(await caller.declare())
        await ENVIRONMENTS.put(self.index, declared)
        self.control(
            Environments(
                self.dock,
                make_trajectories(recipe, self.tokenizer, caller, declared),
                group_size=recipe.algorithm.group_size,
                concurrency=max(
                    section.concurrency,
                    recipe.rows_per_step if recipe.moves_together else recipe.algorithm.group_size,
                ),
                end_token=self.tokenizer.eos_token_id or 0,
                together=recipe.moves_together,
                on_error=section.on_error,
            )
        )

    async def _caller(self) -> EnvironmentCaller:
        flow = self.recipe.staleness_plan
        # those of lost groups stay open until they are overdue
        places = 2 * flow.groups_in_flight * self.recipe.algorithm.group_size
        section = self.recipe.environment
        by_name = dict[str, EnvironmentCaller]()
        if section.outside:  # no code of the user runs here
            by_name = dict.fromkeys(section.outside, await self._caller_of_sessions(places))
        if users := [name for name in section.uses if name not in by_name]:
            log = self.paths.out / "logs" / f"{self.kind}-{self.number}.environments.log"
            by_name |= dict.fromkeys(users, make_caller(self.recipe, places, log))
        return CallerByName(by_name)

    async def _caller_of_sessions(self, places: int) -> EnvironmentCaller:
        """Start the server of sessions, and write its address to the index. Returns the caller of
        programs outside of the run."""
        from orchestration.workers.engines import sync_addresses
        from stages.environments.programs.endpoint import LOOPBACK, Endpoint
        from stages.trajectories.local import LocalCaller

        address = self.recipe.warehouse_address or LOOPBACK
        host, name = await asyncio.to_thread(sync_addresses, address, *await self.index.reach())
        key = secrets.token_urlsafe(24)
        endpoint = Endpoint(host, name, key, patience=self.recipe.environment.timeout)
        url = await endpoint.begin()
        await SESSIONS.put(self.index, {"url": f"{url}/sessions", "key": key})
        uses = dict.fromkeys(self.recipe.environment.outside, OUTSIDE)
        return LocalCaller(environments(uses, {}), places, endpoint)
