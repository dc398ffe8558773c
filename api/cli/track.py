"""``asyncdock track``: copies a run's events to TensorBoard, MLflow or W&B
(api.telemetry.trackers).

RUN, a folder or an id ──▶ its events ──▶ the tracker's files in DIR
"""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.common.exit_codes import FAILED, INTERRUPTED
from api.cli.common.output import refuse
from api.cli.folder.foreign import run_folder
from api.cli.service.asking import WATCH_PATIENCE, ServerOption, ask, is_run_folder
from api.client.credentials import DEFAULT_SERVER
from api.terminal.screen import write
from orchestration.disk import refusal
from orchestration.streams import NO_ROOM

if TYPE_CHECKING:
    from api.client import Client

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def track_command(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", callback=run_folder, help="A run's folder or id."),
    ],
    to: Annotated[
        str, typer.Option(metavar="TRACKER", help="tensorboard, mlflow or wandb.")
    ] = "tensorboard",
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Its files. Default: TRACKER in the run's folder."),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Show a run in TensorBoard, MLflow or W&B, while it goes on or afterwards.

    Called again it goes on where it was.
    """
    from api.telemetry.trackers import TRACKERS, TrackError
    from orchestration.recipe.problems import suggest

    if to not in TRACKERS:
        refuse(f"--to: {to!r} is not a tracker; {suggest(to, TRACKERS)}")
    folder = Path(run)
    is_here = is_run_folder(run)
    into = into or (folder if is_here else Path("runs") / run) / to
    try:
        count = (
            asyncio.run(_from_folder(folder, to, into))
            if is_here
            else ask(server, lambda client: _from_server(client, run, to, into), run)
        )
    except TrackError as error:
        refuse(error)
    except OSError as error:
        if error.errno in READ_ONLY:
            refuse(
                f"--into: {into} cannot be written ({error.strerror}); give another folder", FAILED
            )
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


async def _from_server(client: Client, run: str, to: str, into: Path) -> int:
    from api.telemetry.trackers import TRACKERS, track

    recipe = (await client.run(run)).recipe
    client.patience = WATCH_PATIENCE
    return await track(
        lambda after: client.events(run, after=after), run, into, TRACKERS[to], recipe
    )
