"""``asyncdock track``: copies a run's events to TensorBoard, MLflow or W&B
(api.telemetry.trackers).

RUN_DIR, or --server and a run's id ──▶ its events ──▶ the tracker's files in DIR
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from api.cli.common.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, NO_SERVICE
from api.cli.common.output import refuse
from api.cli.folder.foreign import run_folder
from api.client.credentials import DEFAULT_SERVER, KeyringError
from api.terminal.screen import write
from orchestration.disk import refusal
from orchestration.streams import NO_ROOM


def track_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            callback=run_folder,
            help="The folder of a run; with --server, a run's id.",
        ),
    ],
    to: Annotated[
        str, typer.Option(metavar="TRACKER", help="tensorboard, mlflow or wandb.")
    ] = "tensorboard",
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Its files. Default: TRACKER in the run's folder."),
    ] = None,
    server: Annotated[str, typer.Option(metavar="URL", help=f"As {DEFAULT_SERVER}.")] = "",
) -> None:
    """Show a run in TensorBoard, MLflow or W&B, while it goes on or afterwards.

    Called again it goes on where it was.
    """
    from api.telemetry.trackers import TRACKERS, TrackError
    from orchestration.recipe.problems import suggest

    if to not in TRACKERS:
        refuse(f"--to: {to!r} is not a tracker; {suggest(to, TRACKERS)}")
    folder = Path(run)
    if not server and not (folder / "recipe.json").exists():
        refuse(f"run: {run} is not the folder of a run; or give --server and a run's id")
    into = into or (Path("runs") / run / to if server else folder / to)
    try:
        count = asyncio.run(
            _from_server(run, to, into, server) if server else _from_folder(folder, to, into)
        )
    except (TrackError, KeyringError) as error:
        refuse(error)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        refuse(f"--into: {refusal(into, 0, error)}; called again it goes on where it was", FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    write(f"{count} points of {folder.name} are in {into}")


async def _from_folder(folder: Path, to: str, into: Path) -> int:
    from api.telemetry.trackers import TRACKERS, events_of_folder, track

    recipe = json.loads((folder / "recipe.json").read_text())
    name = folder.resolve().name  # noqa: ASYNC240
    return await track(
        lambda after: events_of_folder(folder, after), name, into, TRACKERS[to], recipe
    )


async def _from_server(run: str, to: str, into: Path, server: str) -> int:
    from api.client import ApiProblem, Client, ServiceError
    from api.telemetry.trackers import TRACKERS, track

    try:
        async with Client(server) as client:
            recipe = (await client.run(run)).recipe
            return await track(
                lambda after: client.events(run, after=after), run, into, TRACKERS[to], recipe
            )
    except ServiceError as error:
        unknown = isinstance(error, ApiProblem) and error.status == 404
        refuse(error, BAD_INPUT if unknown else NO_SERVICE)
    except ValueError as error:
        refuse(error)
