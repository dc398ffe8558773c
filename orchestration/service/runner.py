"""The runner: the process that executes one run of a service. The run's workers are its children.

    lease: renewed ─┬─▶ Execution ─▶ result ─▶ conclude: the run has ended
                    │      └─ events ─▶ metrics.jsonl; each change of state wakes the readers of the list of runs
                    └─ lost: another runner has the run; this process ends at once and records nothing

It gets the run's id, the index and its lease, and reads the rest from the registry. It does not
depend on the agent that starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from orchestration.history.events_file import METRICS
from orchestration.logs import configure
from orchestration.private_files import keep_from_others
from orchestration.processes.environment import take
from orchestration.processes.forkserver import ForkServer
from orchestration.processes.handles import Process
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import READERS_SECONDS, Execution
from orchestration.run.folder import RunFolder
from orchestration.run.run_index import GivenIndex
from orchestration.state.lifecycle import LEASE_VARIABLE, conclude
from orchestration.state.recording import Recording
from orchestration.state.registry import LEASE_SECONDS, Registry
from orchestration.streams import open_outputs
from pipeline.first_of import first_of
from pipeline.index.client import INDEX_VARIABLE, Index, IndexUnreachable

log = structlog.get_logger()

EXIT_LOST = 4
EXIT_ENDED = 143  # the exit code of a process that SIGTERM has ended


class RunLost(Exception):
    """Another runner holds the run."""


class Runner:
    """The runner that holds the run ``run`` under the lease ``token`` and executes it."""

    def __init__(self, url: str, run: str, token: str, forks: ForkServer | None = None) -> None:
        self.registry = Registry(url)
        self.run = run
        self.token = token
        self._forks = forks
        self._process = str(Process.of(os.getpid()))

    async def execute(self) -> None:
        """Execute the run to its end. Raises :class:`RunLost` when another runner has it."""
        try:
            await self._renew()
            await first_of(self._work(), self._keep_lease())
        finally:
            await self.registry.close()

    async def _renew(self) -> None:
        if not await self.registry.renew(self.run, self.token, self._process):
            raise RunLost(f"run {self.run!r} is not held by this runner's lease any more")

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            await self._renew()

    async def _work(self) -> None:
        state = "failed"
        reason = ""
        try:
            record = await self.registry.get(self.run)
            recipe = Recipe.recorded(record.recipe)
            keep_from_others(recipe.launch.readers)
            folder = await asyncio.to_thread(
                RunFolder.of_service, recipe, Path(record.folder), self.run
            )
            execution = Execution(folder, GivenIndex(self.registry.url), self._forks)
            following = asyncio.create_task(self._follow(execution))
            try:
                outcome = await execution.execute()
                await asyncio.wait([following], timeout=READERS_SECONDS)
            finally:
                following.cancel()
                failed = (await asyncio.gather(following, return_exceptions=True))[0]
                if isinstance(failed, Exception):
                    log.error(
                        "the run's events could not be written", file=METRICS, error=repr(failed)
                    )
            state = outcome.state
            reason = outcome.reason
        except IndexUnreachable:
            raise  # the run is not at fault: it is taken over when the index is back
        except Exception as error:  # a restart would not fix its folder, its memory, its recipe
            log.exception("the run cannot be executed")
            reason = f"{type(error).__name__}: {error}"
        await conclude(self.registry, self.run, self.token, state, reason)

    async def _follow(self, execution: Execution) -> None:
        """Record the run's events, after those of earlier runners, and report changes of its
        state."""
        async with Index(self.registry.link, self.run) as index:
            recording = await Recording.begin(index, execution.folder.path / METRICS)
            try:
                async for event in execution.events(recording.after):
                    await recording.take(event)
                    if event.kind == "state":
                        await self.registry.touch()
            finally:
                await recording.close()


async def _until_ended(url: str, run: str, token: str, forks: ForkServer | None) -> int:
    """Execute the run.

    Returns the exit code. SIGTERM ends this process and its workers, and nothing else.
    """
    work = asyncio.create_task(Runner(url, run, token, forks).execute())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    try:
        await work
    except RunLost as lost:
        log.warning("ending", reason=str(lost))
        return EXIT_LOST
    except asyncio.CancelledError:
        return EXIT_ENDED
    return 0


def forked(arguments: Sequence[str]) -> None:
    """Run :func:`main` in a child of a fork server; the run's workers are forked from a copy of
    it."""
    forks = ForkServer.within()
    try:
        main(arguments, forks)
    finally:
        forks.close()


def main(arguments: Sequence[str] | None = None, forks: ForkServer | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="The process of one run of a service; started by its agent, which puts the "
        "index's URL into "
        f"{INDEX_VARIABLE} and the lease into {LEASE_VARIABLE}."
    )
    parser.add_argument("--run", required=True)
    options = parser.parse_args(arguments)
    open_outputs()
    configure(terminal=False)
    structlog.contextvars.bind_contextvars(run=options.run, process="runner")
    # for names like `my_reward:exact` in recipes; last, so that it shadows nothing
    sys.path.append(os.getcwd())
    token = take(LEASE_VARIABLE)
    url = take(INDEX_VARIABLE)  # modules that a recipe names are imported here too
    sys.exit(asyncio.run(_until_ended(url, options.run, token, forks)))


if __name__ == "__main__":
    main()
