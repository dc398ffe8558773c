"""What a start costs: workers forked from a process that has imported everything, against workers
that import it each.

    fork server, fork server in use already (as in a service), spawn ─▶ a run of mock engines, for each:
        execute ─▶ every worker is ready        seconds to the start of work
        kill -9 of a worker ─▶ its successor is ready
        resident memory of the workers of this process that is theirs alone

    python -m benchmarks.runs.starts [--repeat 5] [--workers 2] [--json FILE]
    python -m benchmarks.runs.starts --ray 3

Arms take turns; medians are shown. The floor of a start by spawn is the workers' imports over the
cores; that of a fork is one process's imports, or nothing where they are done. With ``--ray`` the
arms are runs on a standing Ray cluster of so many raylets on this machine: the first one, for which
each node imports everything, and those after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import harness
from benchmarks.runs.executed import on_ray, raylets
from orchestration.processes.forkserver import ForkServer
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder

ARMS = ("spawn", "forkserver", "in use already")
FIRST = "on Ray, the first run"
LATER = "on Ray, a later run"
VICTIM = "flow-0"


def recipe_of(method: str, workers: int, address: str = "") -> Recipe:
    """``address``: of a Ray cluster that the run is on."""
    return parse_recipe(
        {
            "name": "starts",
            "model": {"source": "mock"},
            "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 16},
            "rollout": {"engine": "mock", "workers": workers, "max_rows": 8, "max_tokens": 16},
            "reward": {"functions": [{"name": "spelling"}]},
            "algorithm": {"group_size": 4},
            "train": {"engine": "mock", "steps": 100_000, "groups_per_step": 4},
            "pipeline": {"arena": "16MiB"},
            "launch": {**(on_ray(address) if address else {}), "start_method": method},
        }
    )


async def measure(
    method: str, workers: int, forks: ForkServer | None, address: str = ""
) -> dict[str, float]:
    """Seconds until all are ready, seconds from a kill to its successor's readiness, private bytes
    of the workers."""
    with tempfile.TemporaryDirectory(prefix="asyncdock-starts-") as folder:
        run = Execution(RunFolder.create(recipe_of(method, workers, address), Path(folder) / "run"))
        stop = asyncio.Event()
        run.forks = forks
        began = time.perf_counter()
        killed = 0.0
        found = dict[str, float]()
        work = asyncio.create_task(run.execute(stop))
        try:
            async for event in run.events():
                if event.kind == "state" and event.data["state"] == "running":
                    found["start"] = time.perf_counter() - began
                    assert run.supervisor is not None
                    pids = run.supervisor.pids()
                    found["private"] = sum(
                        psutil.Process(pid).memory_full_info().uss for pid in pids.values() if pid
                    )
                    killed = time.perf_counter()
                    os.kill(pids[VICTIM], signal.SIGKILL)
                elif (
                    killed
                    and event.kind == "worker"
                    and (event.data["worker"], event.data["change"]) == (VICTIM, "ready")
                ):
                    found["recovery"] = time.perf_counter() - killed
                    stop.set()
        finally:
            stop.set()
            result = await work
    if "recovery" not in found:
        sys.exit(f"{method}: the run ended as {result.state}: {result.reason}")
    return found


async def compare(repeat: int, workers: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with contextlib.closing(ForkServer.start()) as forks:
        await measure("forkserver", workers, forks)  # its imports are done
        for _ in range(repeat):
            for arm in ARMS:
                method, given = (
                    ("spawn", None)
                    if arm == "spawn"
                    else ("forkserver", forks if arm == ARMS[2] else None)
                )
                found[arm].append(await measure(method, workers, given))
    return found


async def compare_on_ray(
    repeat: int, workers: int, nodes: int
) -> dict[str, list[dict[str, float]]]:
    with (
        contextlib.closing(ForkServer.start()) as forks,
        raylets(nodes, cpus=workers + 1) as cluster,
    ):
        await measure("forkserver", workers, forks)  # its imports are done
        runs = [
            await measure("forkserver", workers, forks, cluster.address) for _ in range(1 + repeat)
        ]
    return {FIRST: runs[:1], LATER: runs[1:]}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="rollout workers; there are a flow and an update worker too",
    )
    parser.add_argument(
        "--ray", type=int, default=0, metavar="RAYLETS", help="on a Ray cluster of so many raylets"
    )
    options = parser.parse_args()
    measured = compare_on_ray(options.repeat, options.workers, options.ray) if options.ray else None
    found = asyncio.run(measured or compare(options.repeat, options.workers))
    print(f"{options.workers + 2} workers on {os.cpu_count()} cores, medians of {options.repeat}")
    print("| workers by | start, s | recovery from kill -9, s | memory of the workers' own, MiB |")
    print("|---|---|---|---|")
    for arm, runs in found.items():
        start, recovery, private = (
            statistics.median(run[key] for run in runs) for key in ("start", "recovery", "private")
        )
        print(f"| {arm} | {start:.2f} | {recovery:.2f} | {private / 2**20:.0f} |")
    if options.json:
        options.json.write({"workers": options.workers + 2, "cores": os.cpu_count(), "arms": found})


if __name__ == "__main__":
    main()
