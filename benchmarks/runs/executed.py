"""Execute a run and collect its events; a Ray cluster of several raylets on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import harness
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


@contextmanager
def raylets(number: int, cpus: int, **head: Any) -> Iterator[Any]:
    """Yield a :class:`ray.cluster_utils.Cluster` of ``number`` raylets with ``cpus`` CPUs each;
    ``head``: more arguments of the first one."""
    # Ray lowers the priority of workers; on a busy machine they would get no time.
    # Its memory monitor kills workers when other processes of this machine fill the memory.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    with harness.needs("bench"):
        from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False, **head}
    )
    try:
        for _ in range(number - 1):
            cluster.add_node(num_cpus=cpus)
        yield cluster
    finally:
        cluster.shutdown()


def on_ray(address: str) -> dict[str, str]:
    """Returns a recipe's section `launch`, by which its workers are placed on the cluster at
    ``address``."""
    return {"launcher": "ray", "address": address}
