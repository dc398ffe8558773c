"""``asyncdock pairs``: preference pairs of a run's samples, as prompts of another run
(stages.samples.preference_pairs)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.cli.common.output import refuse
from api.cli.service.asking import ServerOption
from api.cli.service.run_files import folder_of
from api.client.credentials import DEFAULT_SERVER
from api.terminal.numbers import counted
from api.terminal.screen import write
from orchestration.disk import refusal
from orchestration.streams import NO_ROOM


def pairs_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder or id; the run may go on.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="A name that ends in .jsonl or .parquet.")
    ],
    margin: Annotated[
        float,
        typer.Option(min=0.0, help="Least difference of the two rewards. 0: all that differ."),
    ] = 0.0,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Leave out responses that were cut at rollout.max_tokens or a stop text.",
        ),
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Write preference pairs for DPO: of each group that the run was trained on, the best response
    against the worst."""
    from stages.samples.preference_pairs import PairsError, export_pairs

    try:
        pairs, groups = export_pairs(folder_of(run, server), out, margin, cut=not whole)
    except PairsError as error:
        refuse(error)
    except OSError as error:
        refuse(f"out: {refusal(out, 0, error)}" if error.errno in NO_ROOM else error)
    write(f"{counted(pairs, 'pair')} of {counted(groups, 'group')} in {out}")
