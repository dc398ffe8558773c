"""The runner: the process that one run of a service lives in. Its workers are its children.

    lease: renewed ─┬─▶ Run.host ─▶ outcome ─▶ conclude: the run has ended
                    │     └─ events ─▶ metrics.jsonl; each change of state wakes whoever watches the list of runs
                    └─ lost: somebody else runs it; everything here ends at once, and nothing is said

It knows the run's id, the index and its lease, and reads the rest from the list of runs. An agent starts it, and needs not
live on.
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

from orchestration.events_file import METRICS, MetricsFile
from orchestration.logs import configure
from orchestration.processes.forkserver import ForkServer
from orchestration.processes.handles import Process
from orchestration.recipe.schema import Recipe
from orchestration.run.run import READERS_SECONDS, Run
from orchestration.service.lifecycle import LEASE_VARIABLE, conclude
from orchestration.service.registry import LEASE_SECONDS, Registry
from pipeline.index.client import INDEX_VARIABLE, IndexUnreachable

log = structlog.get_logger()

EXIT_LOST = 4
EXIT_ENDED = 143  # as of a process that SIGTERM has ended


class LeaseLost(Exception):
    """Somebody else holds the run."""


class Runner:
    """Holds the run ``run`` under ``token``, and executes it."""

    def __init__(self, url: str, run: str, token: str, forks: ForkServer | None = None) -> None:
        self.registry, self.run, self.token, self._forks = Registry(url), run, token, forks
        self._process = str(Process.of(os.getpid()))

    async def execute(self) -> None:
        """To the run's end. Raises :class:`LeaseLost` when somebody else has the run."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._renew()
                holding = tasks.create_task(self._hold())
                await self._work()
                holding.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await self.registry.close()

    async def _renew(self) -> None:
        if not await self.registry.renew(self.run, self.token, self._process):
            raise LeaseLost(f"run {self.run!r} is not held by this runner's lease any more")

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            await self._renew()

    async def _work(self) -> None:
        state, reason = "failed", ""
        try:
            record = await self.registry.get(self.run)
            run = Run.hosted(Recipe.model_validate(record.recipe), Path(record.folder), self.run)
            run.forks = self._forks
            following = asyncio.create_task(self._follow(run))
            try:
                outcome = await run.host(self.registry.url)
                await asyncio.wait([following], timeout=READERS_SECONDS)
            finally:
                following.cancel()
                failed = (await asyncio.gather(following, return_exceptions=True))[0]
                if isinstance(failed, Exception):
                    log.error("its events could not be written down", file=METRICS, error=repr(failed))
            state, reason = outcome.state, outcome.reason
        except IndexUnreachable:
            raise  # nothing is wrong with the run; it can be taken over when the index is back
        except Exception as error:  # what a restart would not mend: its folder, its memory, its recipe
            log.exception("the run cannot be executed")
            reason = f"{type(error).__name__}: {error}"
        await conclude(self.registry, self.run, self.token, state, reason)

    async def _follow(self, run: Run) -> None:
        """Write down what happens, behind what former runners have, and wake whoever watches the list."""
        with MetricsFile(run.out_dir / METRICS) as file:
            async for event in run.events(file.last):
                if event.kind == "worker" and event.data["change"] == "rewound" and "version" in event.data:
                    file.rewind(event.data["version"])
                file.event(event)
                if event.kind == "state":
                    await self.registry.touch()


async def _until_ended(url: str, run: str, token: str, forks: ForkServer | None) -> int:
    """Execute the run; SIGTERM ends this process and its workers, and changes nothing else. Returns the exit code."""
    work = asyncio.create_task(Runner(url, run, token, forks).execute())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    try:
        await work
    except LeaseLost as lost:
        log.warning("ending", reason=str(lost))
        return EXIT_LOST
    except asyncio.CancelledError:
        return EXIT_ENDED
    return 0


def forked(arguments: Sequence[str]) -> None:
    """:func:`main` in a child of a fork server: this run's workers come from a fork of it."""
    forks = ForkServer.within()
    try:
        main(arguments, forks)
    finally:
        forks.close()


def main(arguments: Sequence[str] | None = None, forks: ForkServer | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="The process of one run of a service; started by its agent, which puts the index's URL into "
        f"{INDEX_VARIABLE} and the lease into {LEASE_VARIABLE}."
    )
    parser.add_argument("--run", required=True)
    options = parser.parse_args(arguments)
    configure(terminal=False)
    structlog.contextvars.bind_contextvars(run=options.run, process="runner")
    sys.path.append(
        os.getcwd()
    )  # rewards, algorithms and engines given as module:name; last, so that nothing is shadowed
    token = os.environ.pop(LEASE_VARIABLE)  # not for its workers
    sys.exit(asyncio.run(_until_ended(os.environ[INDEX_VARIABLE], options.run, token, forks)))


if __name__ == "__main__":
    main()
