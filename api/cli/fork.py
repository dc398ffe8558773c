"""``asyncdock runs fork``: a new run with the weights of a checkpoint of another one.

a folder ─▶ orchestration.run.fork ─▶ executed here      an id ─▶ POST /v1/runs ─▶ the service's queue
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.cli.common.options import PlainOption, SetOption, TrustOption
from api.cli.common.output import refuse
from api.cli.service.asking import ServerOption, ask, is_run_folder, refuse_no_folder, split_step
from api.cli.service.runs import complete_run, runs_app, set_values, started
from api.client.credentials import DEFAULT_SERVER


@runs_app.command()
def fork(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="A run's id or folder, live or ended, and the step of a checkpoint (0: as it "
            "began itself). Default: the newest.",
            autocompletion=complete_run,
        ),
    ],
    set_: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Of a folder: a new one. Default: runs/NAME-fork-TIME."),
    ] = None,
    trust: TrustOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Then watch it.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: of a folder every event, a line each.")
    ] = False,
    plain: PlainOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Start a new run with the weights of a checkpoint of RUN: of a service in its queue, of a
    folder here. RUN stays as it is."""
    name, version = split_step(run)
    overrides = set_values(set_ or [])
    if is_run_folder(name):
        from api.cli.local_run import fork_here  # as a run does, it imports what trains

        fork_here(name, version, overrides, out, trust=trust, as_json=as_json, plain=plain)
    refuse_no_folder(name)
    if out is not None:
        refuse("--out: is for runs in folders; a service chooses the folders of its runs")
    view = ask(server, lambda client: client.fork(name, overrides, version=version), name)
    started(server, view, watch=watch, as_json=as_json, plain=plain)
