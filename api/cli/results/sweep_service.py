"""Runs of a sweep in the queue of a service.

submit, under a key of the sweep and the run ─▶ id, in sweep.json ─▶ events ─▶ report
  └ repeated after a kill: the same run         └ stopped before: resumed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection

from api.cli.results.compare import result_of
from api.client import ApiProblem, Client, NotFound
from api.schemas.runs import RunView
from orchestration.comparison.results import RunResult
from orchestration.recipe.problems import RecipeError
from orchestration.sweep.checks import recipe_of
from orchestration.sweep.record import Sweep, SweepRun
from pipeline.data.events import Event

PATIENCE = 300.0  # seconds for which a sweep survives a service that does not answer
KINDS = ("step", "evaluation")


class ServiceRuns:
    """Executes the runs of ``sweep`` by a service, which goes on with them when the sweep's process
    is killed."""

    def __init__(self, sweep: Sweep, client: Client) -> None:
        self._sweep = sweep
        self._client = client

    def has_room(self, running: Collection[SweepRun], run: SweepRun) -> bool:
        """See :class:`orchestration.sweep.execution.Executor`. The service has a queue."""
        return True

    async def execute(
        self, run: SweepRun, report: Callable[[Event], None], stop: asyncio.Event
    ) -> tuple[str, str]:
        """See :class:`orchestration.sweep.execution.Executor`."""
        try:
            view = await self._begin(run)
        except (ApiProblem, RecipeError) as problem:
            return "failed", str(problem)
        stopping = asyncio.create_task(self._stop(view.id, stop))
        try:
            async with contextlib.aclosing(self._client.events(view.id, kinds=KINDS)) as events:
                async for event in events:
                    report(event)
            view = await self._client.wait_until_ended(view.id)
        finally:
            stopping.cancel()
        return view.state, view.reason

    async def _begin(self, run: SweepRun) -> RunView:
        """Return the run of the service, which is submitted, or goes on. Raises ApiProblem and
        RecipeError."""
        if not run.id:  # or it was submitted, and a kill came before the note: the key finds it
            request = self._sweep.request
            recipe = recipe_of(request.recipe, run.settings, self._sweep.folder, files=False)
            tables = json.loads(recipe.to_json())
            view = await self._client.submit(tables, key=f"{self._sweep.id}-{run.name}")
            self._sweep.change(run, "running", id=view.id)
        view = await self._client.run(run.id)
        return await self._client.resume(run.id) if view.state == "stopped" else view

    async def _stop(self, run: str, stop: asyncio.Event) -> None:
        await stop.wait()
        with contextlib.suppress(ApiProblem):  # it has ended meanwhile
            await self._client.stop(run)

    async def result(self, run: SweepRun) -> RunResult:
        """See :class:`orchestration.sweep.execution.Executor`."""
        try:
            return await result_of(self._client, run.id)
        except NotFound as error:
            raise FileNotFoundError(str(error)) from None
