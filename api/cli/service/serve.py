"""``asyncdock serve``: the REST service, and an agent that executes what is submitted to it.

options ──▶ Settings ──▶ serve ──▶ URL, and a login link, on standard output
                          └──▶ Ctrl-C: streams end, runs go on; a second one ends at once
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.common.exit_codes import FAILED
from api.cli.common.options import DataOption, IndexOption
from api.cli.common.output import refuse
from api.cli.service.calls import described_bases, training_calls
from api.cli.service.link import print_login_link
from api.terminal.screen import complain

if TYPE_CHECKING:  # imported when serving: `asyncdock runs list` imports this module too
    from aiohttp import web

    from api.server.access.settings import Settings

LISTEN = "127.0.0.1:8765"
Names = list[str] | None
Folders = list[Path] | None


def _repeatable(metavar: str, *flag: str, help: str = "") -> Any:
    return typer.Option(*flag, metavar=metavar, help=f"{help} Repeatable.".lstrip())


def serve_command(
    data: DataOption,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Port 0: any that is free.")
    ] = LISTEN,
    index: IndexOption = "",
    runs: Annotated[
        int, typer.Option(metavar="N", help="Runs at the same time; 0: agents elsewhere.")
    ] = 1,
    root: Annotated[Folders, _repeatable("DIR", help="Paths in recipes lie below.")] = None,
    recipes: Annotated[Folders, _repeatable("DIR", help="Stored recipes (TOML).")] = None,
    allow_rewards: Annotated[Names, _repeatable("MODULE:FUNCTION", "--allow-reward")] = None,
    allow_algorithms: Annotated[Names, _repeatable("MODULE:CLASS", "--allow-algorithm")] = None,
    allow_stages: Annotated[Names, _repeatable("MODULE:CLASS", "--allow-stage")] = None,
    allow_engines: Annotated[Names, _repeatable("MODULE:FACTORY", "--allow-engine")] = None,
    allow_datasets: Annotated[Names, _repeatable("MODULE:FUNCTION", "--allow-dataset")] = None,
    allow_listen: Annotated[
        Names, _repeatable("HOST", help="Address on which runs may open ports.")
    ] = None,
    allow_teachers: Annotated[
        Names,
        _repeatable(
            "URL", "--allow-teacher", help="`teacher.url` that runs may ask, with any key."
        ),
    ] = None,
    allow_checkpoints: Annotated[
        Names, _repeatable("URL", help="`checkpoint.url` that runs may write to.")
    ] = None,
    allow_clusters: Annotated[
        Names, _repeatable("ADDRESS", "--allow-cluster", help="`launch.address` of Ray's.")
    ] = None,
    allow_networks: Annotated[
        Names,
        _repeatable(
            "FUNCTION",
            "--allow-network",
            help="Reward function or stage that may have `network = true`.",
        ),
    ] = None,
    allow_environment: Annotated[
        Names, _repeatable("NAME", help="Variable that `reward.environment` may name.")
    ] = None,
    unsandboxed_code: Annotated[
        bool,
        typer.Option(
            "--unsandboxed-code",
            help="Functions of --allow-reward and stages run without a sandbox.",
        ),
    ] = False,
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token", help="Every user of this machine is the owner. On loopback alone."
        ),
    ] = False,
    host_name: Annotated[
        Names, _repeatable("NAME", help="A name it is reached by through a proxy.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM")] = None,
    rate: Annotated[float, typer.Option(help="Requests a second of one address.")] = 1000.0,
    max_connections: Annotated[
        int, typer.Option(help="0: as the limit of open files has room for.")
    ] = 0,
    max_connections_per_address: Annotated[int, typer.Option(help="0: seven eighths of all.")] = 0,
    policies: Annotated[
        int, typer.Option(metavar="N", help="Policies that are open at once; 0: none.")
    ] = 3,
    checkpoint: Annotated[
        Names, _repeatable("NAME=DIR", help="A model that is served, as Hugging Face has it.")
    ] = None,
    tinker: Annotated[
        Names,
        _repeatable(
            "[NAME=]SOURCE",
            help="A model, or a recipe of one, for training loops of Tinker's clients.",
        ),
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Runs in the queue.")] = 1000,
    max_workers: Annotated[int, typer.Option(help="Worker processes of one run.")] = 64,
    max_arena: Annotated[
        str, typer.Option(metavar="SIZE", help="pipeline.arena of one run.")
    ] = "16GiB",
) -> None:
    """Serve the REST API, the dashboard and the runs in DIR until Ctrl-C.

    Runs go on without it, and are there again.
    """
    from pydantic import ValidationError

    from api.server.access.settings import Settings
    from api.server.app import ServeError
    from orchestration.private_files import keep_from_others
    from orchestration.units import parse_size

    keep_from_others()
    # The options that have a setting's name.
    options = {
        name: value
        for name, value in locals().items()
        if name in Settings.model_fields and value is not None
    }
    try:
        parsed_options = {
            **parse_address(listen),
            "roots": _folders("--root", root),
            "recipes": _folders("--recipes", recipes),
            "hosts": host_name or (),
            "burst": max(1, int(2 * rate)),
            "checkpoints": _checkpoints(checkpoint),
            "max_arena": int(str(parse_size(max_arena))),
        }
        settings = Settings(**options | parsed_options)
    except ValidationError as error:
        refuse(
            "\n".join(
                f"serve: {_in_words(dict(details))}" for details in error.errors(include_url=False)
            )
        )
    except ValueError as error:
        refuse(f"serve: {error}")
    calls = training_calls(described_bases(tinker, data), data) if tinker else None
    try:
        asyncio.run(_serve(settings, calls))
    except ServeError as error:
        refuse(error)


def parse_address(listen: str) -> dict[str, Any]:
    """Return the settings host and port of HOST:PORT. Raises ValueError."""
    host, _, port = listen.rpartition(":")
    return {"host": host.strip("[]") or "127.0.0.1", "port": int(port)}


def _in_words(error: dict[str, Any]) -> str:
    """Return what pydantic found, with the setting's name where it is about one alone."""
    name = ".".join(map(str, error["loc"]))
    # of a validator, without pydantic's words
    reason = error.get("ctx", {}).get("error", error["msg"])
    return ": ".join(filter(None, (name, str(reason))))


def _folders(option: str, given: Folders) -> tuple[Path, ...]:
    for path in given or ():
        if not path.is_dir():
            refuse(f"{option}: {path} is no directory")
    return tuple(path.resolve() for path in given or ())


def _checkpoints(given: Names) -> dict[str, Path]:
    folders = {}
    for text in given or ():
        name, _, folder = text.partition("=")
        if not name or not (Path(folder) / "config.json").is_file():
            refuse(
                f"--checkpoint: {text!r} is no NAME=DIR with a Hugging Face checkpoint in DIR, "
                f"which has a config.json"
            )
        folders[name] = Path(folder).resolve()
    return folders


async def _serve(settings: Settings, calls: Callable[[web.Application, str], None] | None) -> None:
    from api.server.app import serve

    await serve(settings, stopped_by_signals("Closing; runs go on."), _print_ready, calls)


def stopped_by_signals(closing: str) -> asyncio.Event:
    """Return an event that Ctrl-C sets, which prints ``closing``; a second one ends the process at
    once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            complain("Ended at once.")
            os._exit(FAILED)
        complain(f"{closing} Ctrl-C once more ends at once.")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    return stop


def _print_ready(url: str, code: str) -> None:
    print(f"AsyncDock serves {url}", flush=True)
    print_login_link(url, code)
