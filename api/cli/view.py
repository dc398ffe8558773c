"""``asyncdock view``: the dashboard on runs of this machine.

FOLDER… ─▶ api.client.folder ─▶ a link for the browser        Ctrl-C closes it; the runs go on
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.common.error_log import say_errors
from api.cli.common.exit_codes import FAILED
from api.cli.common.output import refuse
from api.cli.folder.foreign import run_folder
from api.cli.service.link import print_login_link
from api.cli.service.serve import parse_address, stopped_by_signals
from api.client.folder import TEMPORARY, serve_folders
from api.terminal.screen import complain


def view_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...", help="Folders of runs, or folders with such folders in them."
        ),
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="On loopback. Port 0: any that is free.")
    ] = "127.0.0.1:0",
) -> None:
    """Show runs of this machine in the dashboard, live and ended ones, without a service.

    Nothing can be changed there. Ctrl-C closes it.
    """
    from api.server.app import ServeError

    say_errors(complain, logging.WARNING)
    for folder in folders:
        if not folder.is_dir():
            refuse(f"FOLDER: {folder} is no directory; give one in which `asyncdock run` wrote")
        run_folder(folder)
    try:
        asyncio.run(_view(folders, parse_address(listen)))
    except (ServeError, ValueError) as error:
        refuse(f"view: {error}")
    except (OSError, RuntimeError) as error:
        refuse(f"view: the runs cannot be shown: {error}", FAILED)


async def _view(folders: Sequence[Path], address: dict[str, Any]) -> None:
    def ready(url: str, code: str) -> None:
        print(f"AsyncDock shows the runs in {', '.join(map(str, folders))} at {url}", flush=True)
        print_login_link(url, code)

    stop = stopped_by_signals("Closing; runs go on.")
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as data:
        await serve_folders(folders, Path(data), stop, ready, address)
