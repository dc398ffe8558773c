"""``asyncdock host``: starts workers here for a run that another machine executes.

options ──▶ Host.run until the run has ended, SIGTERM or Ctrl-C
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from api.cli.exit_codes import BAD_INPUT, FAILED
from api.cli.output import refuse


def host_command(
    join: Annotated[
        str,
        typer.Option(
            "--join",
            metavar="URL",
            envvar="ASYNCDOCK_INDEX",
            help="The run's index: redis:// or rediss://. Prefer the environment variable: other users of the machine can "
            "read command lines.",
        ),
    ],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run's id.")],
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="The folder of this host, for logs and downloads.")
    ] = Path("host"),
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Workers at the same time.")] = 1,
    serve: Annotated[
        str, typer.Option(metavar="ADDRESS", help="On which other nodes read this one's samples.")
    ] = "0.0.0.0",
) -> None:
    """Start workers of a run that another machine executes. SIGTERM or Ctrl-C ends them; the run starts them elsewhere."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        asyncio.run(_work(join, run, data.resolve(), workers, serve))
    except (LookupError, ValueError) as error:
        refuse(error, BAD_INPUT)
    except (OSError, RuntimeError) as error:
        refuse(error, FAILED)


async def _work(url: str, run: str, folder: Path, workers: int, serve: str) -> None:
    from orchestration.run.hosts import Host

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Host(url, run, folder, workers=workers, serve=serve).run(stop)
