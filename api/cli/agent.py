"""``asyncdock agent``: executes a service's runs on this machine, apart from its REST server.

options ──▶ index (or one of its own below DATA) ──▶ Agent.run until SIGTERM or Ctrl-C; the runs go on without it

--shared: several agents have DATA. Each takes the first of its folders agent-1, agent-2, … that no living agent holds, and
with it the runs of whoever had that one before: a container that replaces another need not know which it replaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from pathlib import Path
from typing import Annotated

import typer

from api.terminal.screen import complain


def agent_command(
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="The runs' folders are made below it.")],
    index: Annotated[
        str,
        typer.Option(
            "--index",
            metavar="URL",
            envvar="ASYNCDOCK_INDEX",
            help="The service's Redis or Valkey; better by the environment, as anybody can read a command line. Default: "
            "the service's own below DIR.",
        ),
    ] = "",
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Runs at the same time.")] = 1,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared", help="Other agents have DIR too: work in the first free one of its folders agent-1, agent-2, …"
        ),
    ] = False,
) -> None:
    """Execute the runs of a service. SIGTERM or Ctrl-C ends the agent and leaves the runs alone: the next one goes on."""
    from orchestration.service.agent import AgentError

    try:
        if shared and not index:
            raise ValueError("--shared: agents that share DIR have one index; give it by --index or ASYNCDOCK_INDEX")
        asyncio.run(_work(index, data, runs, shared))
    except (AgentError, OSError, RuntimeError, ValueError) as error:
        complain(f"error: {error}")
        raise typer.Exit(2 if isinstance(error, AgentError | ValueError) else 1) from None


async def _work(url: str, data: Path, runs: int, shared: bool) -> None:
    from orchestration.service.agent import Agent, AgentError
    from orchestration.service.index_server import ServiceIndex
    from orchestration.service.registry import Registry

    own = None if url else ServiceIndex(data)
    if own is not None:
        url = await asyncio.to_thread(own.start)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if shared:
        for part in itertools.count(1):
            with contextlib.suppress(AgentError):  # another one works there
                return await Agent(url, data / f"agent-{part}", runs).run(stop)
    await Agent(url, data, runs, index=own).run(stop)
    if own is not None:
        registry = Registry(url)
        active = await registry.active()
        await registry.close()
        if not active:  # nobody needs it until the next start, which finds all of it
            await asyncio.to_thread(own.stop)
