"""Execute a run and collect its events."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestration.history.events_file import METRICS, MetricsFile
from orchestration.processes.forkserver import ForkServer
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from pipeline.data.events import Event


async def executed(
    recipe: Recipe, out: Path, forks: ForkServer | None = None, *, must_finish: bool = True
) -> list[Event]:
    """Execute ``recipe`` in the folder ``out`` and return all events of the run.

    They are also written to ``metrics.jsonl`` in ``out``. ``forks``: the fork server that starts
    the workers. Raises RuntimeError if ``must_finish`` is set and the run does not finish.
    """
    run = Execution(RunFolder.create(recipe, out))
    events = list[Event]()
    run.forks = forks

    async def follow() -> None:
        with MetricsFile(out / METRICS) as file:
            async for event in run.events():
                events.append(event)
                file.event(event)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        result = await run.execute()
    if must_finish and result.state != "finished":
        raise RuntimeError(f"the run {recipe.name} {result.state}: {result.reason}")
    return events
