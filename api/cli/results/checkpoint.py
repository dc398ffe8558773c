"""``asyncdock checkpoint``: the checkpoints of a run's folder.

verify   RUN ──▶ checkpoints/step-*/digests.json ──▶ every file is read and compared
offer    RUN ──▶ the newest checkpoint ──▶ DIR of a server ──▶ its path for Tinker's clients
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from api.cli.common.exit_codes import FAILED
from api.cli.common.options import JsonOption
from api.cli.common.output import print_json, refuse
from api.cli.service.asking import ServerOption
from api.cli.service.run_files import folder_of
from api.cli.service.token import token_id
from api.client.credentials import DEFAULT_SERVER
from api.terminal.screen import write

checkpoint_app = typer.Typer(help="Look at the checkpoints of a run.", no_args_is_help=True)


@checkpoint_app.command()
def verify(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's folder or id, or the folder of one of its checkpoints."
        ),
    ],
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Read every file of a run's checkpoints, also at checkpoint.url, and compare it with the
    digest of when it was written. Ends with 1 where one is damaged."""
    from orchestration.checkpoints.verification import NoCheckpoints, verified

    try:
        verifications = list(verified(folder_of(run, server, is_any=True)))
    except NoCheckpoints as error:
        refuse(error)
    if as_json:
        print_json([asdict(verification) for verification in verifications])
    else:
        for verification in verifications:
            write(verification.text)
    if any(verification.damages for verification in verifications):
        raise typer.Exit(FAILED)


@checkpoint_app.command()
def offer(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The folder of a checkpoint, or a run's folder or id: its newest checkpoint.",
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder of `asyncdock tinker`, which may be running."),
    ],
    base: Annotated[str, typer.Option(help="The name there of the model that was trained.")],
    token: Annotated[
        str, typer.Option(metavar="NAME", help="Whose checkpoint it is. Default: your own key's.")
    ] = "",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Let Tinker's clients go on from a checkpoint of a run: prints the path that they give."""
    from api.cli.service.calls import CALLS
    from orchestration.checkpoints.checkpoint import CheckpointUnusable
    from orchestration.checkpoints.offered import offer_checkpoint
    from pipeline.problems import ProblemError

    folder = folder_of(run, server, is_any=True)
    owner = token_id(data, token)
    try:
        path = asyncio.run(offer_checkpoint(folder, data / CALLS, owner, base))
    except (ProblemError, CheckpointUnusable) as error:
        refuse(error)
    except OSError as error:
        refuse(f"--data: {error}", FAILED)
    write(path)
