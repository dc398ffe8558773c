"""The worker in which the environments of trajectories are called."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING

from orchestration.processes.environment import of_user_code
from orchestration.recipe.dialogue import dialogue_of
from orchestration.sandbox.sandbox import Sandbox
from orchestration.sandbox.user_code import readable
from orchestration.state.documents import ENVIRONMENTS, SESSIONS
from orchestration.workers.job import Job
from stages.environments.classes import environments
from stages.environments.interface import Declarations, EnvironmentCaller
from stages.trajectories.stage import Environments, Limits

if TYPE_CHECKING:
    from orchestration.recipe.sections.environment import EnvironmentSection


class EnvironmentJob(Job):
    """The job that opens environments and has them answer turns: in processes of their own, or with
    the inline launcher in this one."""

    async def build(self) -> None:
        recipe = self.recipe
        section = recipe.environment
        caller = await self._caller(section)
        self.resources.push_async_callback(caller.end)
        declared = Declarations(await caller.declare())
        await ENVIRONMENTS.put(self.index, declared)
        self.control(
            Environments(
                self.dock,
                caller,
                declared.by_name,
                dialogue_of(recipe, self.tokenizer, declared),
                Limits(
                    max_turns=section.max_turns,
                    max_tokens=recipe.longest_response,
                    turn_tokens=recipe.rollout.max_tokens,
                    step_seconds=section.timeout,
                    trajectory_seconds=section.trajectory_timeout,
                ),
                seed=recipe.seed,
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

    async def _caller(self, section: EnvironmentSection) -> EnvironmentCaller:
        assert section.use is not None
        flow = self.recipe.staleness_plan
        # those of lost groups stay open until they are overdue
        places = 2 * flow.groups_in_flight * self.recipe.algorithm.group_size
        if section.use == "sessions":  # no code of the user runs here
            return await self._caller_of_sessions(places)
        if self.recipe.launch.launcher == "inline":
            from stages.trajectories.local import LocalCaller

            return LocalCaller(environments(section.use, section.options), places)
        from orchestration.environments.pool import EnvironmentPool

        sandbox = None
        if section.sandbox:
            sandbox = Sandbox(
                read=readable(section.read), network=section.network, memory=section.memory
            )
        return EnvironmentPool(
            section.use,
            section.options,
            processes=section.processes,
            concurrency=-(-places // section.processes),
            memory=section.memory,
            log=self.paths.out / "logs" / f"{self.kind}-{self.number}.environments.log",
            sandbox=sandbox,
            environment=of_user_code(dict(os.environ), self.recipe.reward.environment),
        )

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
        return LocalCaller(environments("sessions", {}), places, endpoint)
