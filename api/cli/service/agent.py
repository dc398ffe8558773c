"""``asyncdock agent``: executes a service's runs on this machine, without a REST server.
``asyncdock host``: starts workers here for a run that another machine executes.

agent ──▶ index (or its own below DATA) ──▶ Agent.run until SIGTERM or Ctrl-C; the runs go on without it
host  ──▶ Host.run until the run has ended, SIGTERM or Ctrl-C; the run starts its workers elsewhere

--shared: several agents share DATA. Each takes the first free folder of agent-1, agent-2, …, with
the runs in it, so that a container takes over the runs of the one that it replaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from pathlib import Path
from typing import Annotated

import typer

from api.cli.common.exit_codes import BAD_INPUT, FAILED
from api.cli.common.options import DataOption, IndexOption
from api.cli.common.output import refuse
from pipeline.index.address import with_password


def agent_command(
    data: DataOption,
    index: IndexOption = "",
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Runs at the same time.")] = 1,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Other agents have DIR too: work in its first free folder of agent-1, agent-2, …",
        ),
    ] = False,
) -> None:
    """Execute the runs of a service.

    SIGTERM or Ctrl-C ends the agent and leaves the runs alone: the next one goes on.
    """
    from orchestration.private_files import keep_from_others
    from orchestration.service.agent import AgentError

    keep_from_others()
    try:
        if shared and not index:
            raise ValueError(
                "--shared: agents that share DIR have one index; give it by --index "
                "or ASYNCDOCK_INDEX"
            )
        asyncio.run(_work(index, data, runs, shared))
    except (AgentError, OSError, RuntimeError, ValueError) as error:
        refuse(error, BAD_INPUT if isinstance(error, AgentError | ValueError) else FAILED)


async def _work(url: str, data: Path, runs: int, shared: bool) -> None:
    from orchestration.service.agent import Agent, AgentError
    from orchestration.service.index_server import ServiceIndex
    from orchestration.state.registry import Registry

    service_index = None if url else ServiceIndex(data)
    if service_index is not None:
        url = await asyncio.to_thread(service_index.start)
    stop = _stop_by_signal()
    if shared:
        for part in itertools.count(1):
            with contextlib.suppress(AgentError):  # another agent works there
                return await Agent(url, data / f"agent-{part}", runs).run(stop)
    await Agent(url, data, runs, index=service_index).run(stop)
    if service_index is not None:
        registry = Registry(url)
        active = await registry.active()
        await registry.close()
        if not active:
            await asyncio.to_thread(service_index.stop)


def host_command(
    join: Annotated[
        str,
        typer.Option(
            "--join",
            metavar="URL",
            envvar="ASYNCDOCK_INDEX",
            help="The run's index: redis:// or rediss://; `join` in the run's index.json.",
        ),
    ],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run's id.")],
    token: Annotated[
        str,
        typer.Option(
            "--token",
            metavar="TOKEN",
            envvar="ASYNCDOCK_HOST_TOKEN",
            help="The index's password, unless the URL has it; `token` in the run's index.json. "
            "Prefer the environment variable: other users of the machine can read command "
            "lines.",
        ),
    ] = "",
    data: Annotated[
        Path,
        typer.Option(
            "--data", metavar="DIR", help="The folder of this host, for logs and downloads."
        ),
    ] = Path("host"),
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Workers at the same time.")] = 1,
    serve: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="On which other nodes read this one's samples; `auto`: the one that leads to the "
            "index.",
        ),
    ] = "auto",
) -> None:
    """Start workers of a run that another machine executes.

    SIGTERM or Ctrl-C ends them; the run starts them elsewhere.
    """
    from orchestration.private_files import keep_from_others

    keep_from_others()
    try:
        data.mkdir(parents=True, exist_ok=True)
        asyncio.run(_host(with_password(join, token), run, data.resolve(), workers, serve))
    except (LookupError, OSError, RuntimeError, ValueError) as error:
        refuse(error, BAD_INPUT if isinstance(error, LookupError | ValueError) else FAILED)


async def _host(url: str, run: str, folder: Path, workers: int, serve: str) -> None:
    from orchestration.launch.hosts import Host

    await Host(url, run, folder, workers=workers, serve=serve).run(_stop_by_signal())


def _stop_by_signal() -> asyncio.Event:
    """Return an event that SIGTERM and Ctrl-C set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
