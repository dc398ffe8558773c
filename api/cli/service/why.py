"""``asyncdock why``: what a run waits for at this moment.

RUN_DIR of a run that is executed here ─▶ its index ─┐
RUN of a service ─▶ GET /v1/runs/{run}/waiting ──────┴▶ the chain of waiting, or its last link: the index does not answer
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.exit_codes import NO_SERVICE
from api.cli.options import JsonOption, ServerOption
from api.cli.output import print_json, refuse, write
from api.cli.service.asking import ask
from api.cli.service.runs import LiveArgument
from api.client.credentials import DEFAULT_SERVER


def why_command(
    run: LiveArgument,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the run's index.")] = 5.0,
) -> None:
    """Print who waits for whom in a run at this moment, for how long, and which bound ends it."""
    if (folder := Path(run)).is_dir():
        try:
            chain = asyncio.run(chain_of_folder(folder, timeout))
        except LookupError as error:
            refuse(error.args[0])
        except ConnectionError as error:
            refuse(f"all processes of the run wait for its index, as this command does: {error}", NO_SERVICE)
    else:
        view = ask(server, lambda client: client.waiting(run), run)
        chain = [wait.model_dump() for wait in view.chain]
    if as_json:
        return print_json({"run": run, "chain": chain})
    for depth, wait in enumerate(chain):
        write(f"{'   ' * depth}{'└─ ' if depth else ''}{wait['text']}")
    if not chain:
        write("nothing: the run has ended")


async def chain_of_folder(folder: Path, timeout: float) -> list[dict[str, Any]]:
    """Returns the chain of waiting of the run that is executed in ``folder``. Raises LookupError, and IndexUnreachable when
    its index does not answer within ``timeout`` seconds."""
    from orchestration.guard.waiting import waiting_chain
    from orchestration.service.lifecycle import WHERE
    from pipeline.index.client import Index

    try:
        where = json.loads((folder / WHERE).read_text())
    except OSError:
        raise LookupError(f"run: {folder} is not the folder of a run that is alive") from None
    async with Index(where["index"], where["run"], timeout=timeout) as index:
        return [{**dataclasses.asdict(wait), "text": str(wait)} for wait in await waiting_chain(index)]
