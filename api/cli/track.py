"""``asyncdock track``: a run in TensorBoard, MLflow or W&B (api.telemetry.trackers).

RUN_DIR, or --server and a run's id ──▶ its events ──▶ the tracker's files in DIR
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from api.cli.exit_codes import BAD_INPUT, INTERRUPTED, NO_SERVICE
from api.client.credentials import DEFAULT_SERVER, KeyringError, find_token
from api.terminal.screen import complain, write


def track_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run; with --server, a run's id.")],
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="tensorboard, mlflow or wandb.")] = "tensorboard",
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Its files. Default: TRACKER in the run's folder.")
    ] = None,
    server: Annotated[str, typer.Option("--server", metavar="URL", help=f"As {DEFAULT_SERVER}.")] = "",
) -> None:
    """Show a run in TensorBoard, MLflow or W&B, while it goes on or afterwards. Called again it goes on where it was."""
    from api.telemetry.trackers import TRACKERS, TrackerMissing, TrackError

    if to not in TRACKERS:
        _refuse(f"--to: {to!r} is not a tracker; use one of: {', '.join(TRACKERS)}")
    folder = Path(run)
    if not server and not (folder / "recipe.json").exists():
        _refuse(f"run: {run} is not the folder of a run; or give --server and a run's id")
    place = into or (Path("runs") / run / to if server else folder / to)
    try:
        count = asyncio.run(_of_server(run, to, place, server) if server else _of_folder(folder, to, place))
    except (TrackerMissing, TrackError) as refused:
        _refuse(str(refused))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    write(f"{count} points of {folder.name} are in {place}")


async def _of_folder(folder: Path, to: str, into: Path) -> int:
    from api.telemetry.trackers import TRACKERS, events_of_folder, track

    recipe = json.loads((folder / "recipe.json").read_text())
    name = folder.resolve().name  # noqa: ASYNC240
    return await track(
        lambda after: events_of_folder(folder, after), name, into, lambda key: TRACKERS[to](into, name, recipe, key)
    )


async def _of_server(run: str, to: str, into: Path, server: str) -> int:
    from api.client import ApiProblem, Client, ServiceError
    from api.telemetry.trackers import TRACKERS, track

    try:
        async with Client(server, find_token(server)) as client:
            recipe = (await client.run(run)).recipe
            return await track(
                lambda after: client.events(run, after=after),
                run,
                into,
                lambda key: TRACKERS[to](into, run, recipe, key),
            )
    except ServiceError as error:
        complain(f"error: {error}")
        unknown = isinstance(error, ApiProblem) and error.status == 404
        raise typer.Exit(BAD_INPUT if unknown else NO_SERVICE) from None
    except (KeyringError, ValueError) as error:
        _refuse(str(error))


def _refuse(text: str) -> NoReturn:
    complain(f"error: {text}")
    raise typer.Exit(BAD_INPUT)
