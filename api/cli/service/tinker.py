"""``asyncdock tinker``: models for Tinker's clients.

options ──▶ Settings, base models ──▶ the server, with the calls below DIR/calls ──▶ URL and key on standard output
                                        └──▶ Ctrl-C: clients go on with the next server; nothing is lost
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from api.cli.common.output import refuse
from api.cli.service.calls import described_bases, training_calls
from api.cli.service.link import print_login_link
from api.cli.service.serve import parse_address, stopped_by_signals
from api.cli.service.token import tinker_key

if TYPE_CHECKING:
    from aiohttp import web

    from api.server.access.settings import Settings

DType = Literal["float32", "bfloat16"]
RATE = 5000  # requests of one address a second: a client sends thousands of samples at once
BODY_SECONDS = 60.0  # for a body of data to arrive


def tinker_command(
    models: Annotated[
        list[str],
        typer.Option(
            "--model",
            metavar="[NAME=]SOURCE",
            help="A folder as Hugging Face has it, smollm2, tiny, or FILE.toml: a recipe with "
            "[model], [train] and [rollout]. NAME: for clients. Repeatable.",
        ),
    ],
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Its folder: tokens, calls, checkpoints.")
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Port 0: any that is free.")
    ] = "127.0.0.1:8770",
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:1. Default: auto.")
    ] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Of the arithmetic. Default: float32.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=0, help="CPU threads of an engine. Default: 0, all.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Sequences that are sampled at once. Default: 64.")
    ] = None,
    max_models: Annotated[int, typer.Option(min=1, help="Models in memory, on each base.")] = 16,
    adapters_alone: Annotated[
        bool,
        typer.Option(
            "--adapters-alone",
            help="Checkpoints without the merged model: small, and no recipe begins with one.",
        ),
    ] = False,
    host_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="It is reached by through a proxy. Repeatable."),
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM")] = None,
) -> None:
    """Serve models to Tinker's clients: their training loops, on engines of this machine.

    Ctrl-C ends it. What is acknowledged is below DIR, and goes on with the next server.
    """
    from api.server.access.settings import Settings
    from api.server.app import ServeError
    from orchestration.calls.interface import CallOptions
    from orchestration.private_files import keep_from_others
    from pipeline.compat.extras import ExtraMissing

    keep_from_others()
    try:
        settings = Settings(
            **parse_address(listen),
            data=data,
            runs=0,
            runs_of="none",
            policies=0,
            rate=RATE,
            burst=2 * RATE,
            body_seconds=BODY_SECONDS,
            hosts=tuple(host_name or ()),
            tls_certificate=tls_certificate,
            tls_key=tls_key,
        )
        options = CallOptions(loaded_models=max_models, merged_checkpoints=not adapters_alone)
        bases = described_bases(
            models, data, device=device, dtype=dtype, threads=threads, max_rows=max_rows
        )
        names = [base.name for base in bases]
        asyncio.run(_serve(settings, names, training_calls(bases, data, options)))
    except (ExtraMissing, ServeError, ValueError) as error:
        refuse(f"tinker: {error}")


async def _serve(
    settings: Settings, names: list[str], calls: Callable[[web.Application, str], None]
) -> None:
    from api.server.app import serve
    from orchestration.service.own_services import read_authorization

    def ready(url: str, code: str) -> None:
        """Print what a client is given, and a person. A log, which others may read, gets no key."""
        print(f"AsyncDock serves {', '.join(names)} at {url}")
        key = f"$(asyncdock token show --tinker --data {settings.data})"
        if sys.stdout.isatty():
            key = tinker_key(read_authorization(settings.data))
        print(f"export TINKER_BASE_URL={url}\nexport TINKER_API_KEY={key}", flush=True)
        print_login_link(url, code)

    stop = stopped_by_signals("Closing; what was acknowledged is kept.")
    await serve(settings, stop, ready, calls)
