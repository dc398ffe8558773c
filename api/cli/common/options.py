"""Options and arguments that several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EventsOption = Annotated[
    bool, typer.Option("--json", help="Print every event as one line of JSON.")
]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="Print one line a step, on a terminal too.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, as train.steps=10. Repeatable."
    ),
]
FromOption = Annotated[
    int | None,
    typer.Option(
        "--from",
        min=0,
        metavar="VERSION",
        help="Go on from the checkpoint of this version; newer ones are set aside. 0: from the "
        "beginning.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="Also where the folder is another user's: run what its recipe names."
    ),
]
DataOption = Annotated[
    Path,
    typer.Option("--data", metavar="DIR", help="The service's folder: its index and its runs."),
]
IndexOption = Annotated[
    str,
    typer.Option(
        "--index",
        metavar="URL",
        envvar="ASYNCDOCK_INDEX",
        help="The service's Redis or Valkey (redis://, rediss://, unix://). Default: its own below "
        "DIR. Prefer the environment variable: other users of the machine can read command "
        "lines.",
    ),
]
