"""``asyncdock runs archive``, ``delete`` and ``disk``: what runs on this machine take, and keep.

RUN ──▶ its folder on this machine ──▶ FILE.tar.gz, or another folder      (archive)
                                   └─▶ removed                            (delete)
FOLDER… ──▶ the runs in them ──▶ bytes by part, and what can go            (disk)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from api.cli.common.exit_codes import FAILED
from api.cli.common.options import JsonOption
from api.cli.common.output import fitting_table, print_json, refuse
from api.cli.service.asking import ServerOption
from api.cli.service.run_files import folder_of
from api.client.credentials import DEFAULT_SERVER
from api.terminal.screen import complain, safe_console, write


def archive(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its id.")],
    to: Annotated[
        Path, typer.Option(metavar="FILE|FOLDER", help="A new file as X.tar.gz, or a new folder.")
    ],
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Keep an ended run elsewhere: its recipe, metrics, samples, logs and newest checkpoint."""
    from orchestration.run.contents import archive as archived
    from orchestration.state.lock import RunError

    folder = folder_of(run, server)
    try:
        archived(folder, to)
    except (RunError, OSError) as error:
        refuse(error, FAILED)
    if as_json:
        return print_json({"run": str(folder), "archive": str(to)})
    write(f"{folder} is in {to}; unpacked, `asyncdock view` and `asyncdock resume` take it")


def disk(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|FOLDER]...",
            help="Runs' folders or ids, and folders with runs in them. Default: runs.",
        ),
    ] = None,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Show what runs in folders take on the disk, and what of it can go: checkpoints that are not
    the newest of their run."""
    from orchestration.run.contents import sizes
    from orchestration.service.run_folders import RunFolders
    from orchestration.units import format_size

    looked = [folder_of(run, server, is_any=True) for run in runs] if runs else [Path("runs")]
    taken = {str(run): sizes(run) for run in RunFolders(looked).by_id().values()}
    if as_json:
        return print_json(taken)
    if not taken:
        refuse(f"folder: no run is in {', '.join(map(str, looked))}; give the folder of some")
    by_size = sorted(taken.items(), key=lambda run: -run[1]["total"])
    rows = [(run, *map(format_size, parts.values())) for run, parts in by_size]
    columns = ("run", *by_size[0][1])
    leave = ("other", "logs", "metrics", "index", "samples")
    console = safe_console()
    console.print(fitting_table(console, columns, rows, leave, right=columns[1:]))
    total, spare = (sum(parts[name] for parts in taken.values()) for name in ("total", "can go"))
    complain(
        f"{format_size(total)} in all; {format_size(spare)} can go, by `asyncdock runs delete RUN "
        f"--old-checkpoints`, or before they are there by checkpoint.keep"
    )


def delete_folder(run: str, *, old_checkpoints: bool, yes: bool, as_json: bool) -> None:
    """Remove the run in the folder ``run``, or of it what :func:`spare` says."""
    from orchestration.run.contents import remove, sizes, spare
    from orchestration.service.own_services import AUTHORIZATION
    from orchestration.state.lock import LOCK, RunError
    from orchestration.units import format_size

    folder = Path(run).resolve()
    if (data := folder.parent.parent / AUTHORIZATION).exists():
        refuse(f"run: {folder} is a run of the service in {data.parent}; give its id")
    if not (folder / LOCK).exists():
        refuse(f"run: {folder} was never executed, so it may be no run's; remove it yourself")
    parts = sizes(folder)
    what, size = ("old checkpoints of ", "can go") if old_checkpoints else ("", "total")
    confirm(f"Remove {what}{folder} ({format_size(parts[size])}), for good?", yes=yes)
    try:
        remove(folder, spare(folder) if old_checkpoints else [folder])
    except RunError as error:
        refuse(error, FAILED)
    except OSError as error:
        refuse(f"run: {error.filename or folder} cannot be removed: {error.strerror}", FAILED)
    print_json({"deleted": run}) if as_json else complain(f"Removed {what}{folder}.")


def confirm(question: str, *, yes: bool) -> None:
    """End the command unless the user says yes to ``question``, or has with ``yes``."""
    if yes:
        return
    if not sys.stdin.isatty():
        refuse("delete: there is no terminal to ask for confirmation; add --yes")
    if not typer.confirm(question, err=True):
        refuse("Nothing was removed.", FAILED)
