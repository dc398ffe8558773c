"""``asyncdock checkpoint``: the checkpoints of a run's folder.

RUN_DIR ──▶ checkpoints/step-*/digests.json ──▶ every file is read and compared
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from api.cli.common.exit_codes import FAILED
from api.cli.common.options import JsonOption
from api.cli.common.output import print_json, refuse
from api.cli.folder.foreign import run_folder
from api.terminal.screen import write

checkpoint_app = typer.Typer(help="Look at the checkpoints of a run.", no_args_is_help=True)


@checkpoint_app.command()
def verify(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            callback=run_folder,
            help="The folder of a run, or of one of its checkpoints.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Read every file of a run's checkpoints, also at checkpoint.url, and compare it with the
    digest of when it was written. Ends with 1 where one is damaged."""
    from orchestration.checkpoints.verification import NoCheckpoints, verified

    try:
        verifications = list(verified(run))
    except NoCheckpoints as error:
        refuse(error)
    if as_json:
        print_json([asdict(verification) for verification in verifications])
    else:
        for verification in verifications:
            write(verification.text)
    if any(verification.damages for verification in verifications):
        raise typer.Exit(FAILED)
