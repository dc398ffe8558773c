"""A run whose rollout is an external worker of this process, until a file `stop` is there:
`python -m tests.orchestration.run.external_run FOLDER`. Its events are in FOLDER/run/metrics.jsonl."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from orchestration.history.events_file import METRICS, MetricsFile
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.external.test_session import roll_out, taking_part

RECIPE = "recipe.json"
STOP = "stop"


async def write_events(run: Execution, metrics: MetricsFile) -> None:
    async for event in run.events():
        metrics.event(event)


async def main(folder: Path) -> None:
    recipe = Recipe.from_json((folder / RECIPE).read_text())
    run = Execution(RunFolder.create(recipe, folder / "run"))
    with MetricsFile(folder / "run" / METRICS) as metrics:
        async with taking_part(run) as (watched, external, work):
            writing = asyncio.create_task(write_events(run, metrics))
            worker = asyncio.create_task(roll_out(external, "outside"))
            while not (folder / STOP).exists():  # noqa: ASYNC110 (no reader to be woken)
                await asyncio.sleep(0.1)
            watched.stop.set()
            await asyncio.wait([worker], timeout=30)
            await work
            await writing


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
