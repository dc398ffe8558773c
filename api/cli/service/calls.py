"""The service of training calls that a server is extended by: its base models, its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.cli.common.output import refuse

if TYPE_CHECKING:
    from aiohttp import web

    from orchestration.calls.interface import CallOptions

CALLS = "calls"  # in the server's folder


def training_calls(
    models: Sequence[str],
    data: Path,
    options: CallOptions | None = None,
    *,
    device: str = "auto",
    **engine: Any,
) -> Callable[[web.Application, str], None]:
    """Return what adds training calls of ``models`` ([NAME=]SOURCE), kept below ``data``, to a
    server. ``engine``: further options of its engines. Ends the command where they cannot be
    served."""
    from api.tinker.routes import add_routes
    from orchestration.calls.bases import describe_bases, parse_model
    from orchestration.calls.interface import CallOptions
    from orchestration.calls.service import open_service
    from pipeline.problems import Fatal

    try:
        bases = describe_bases(dict(map(parse_model, models)), data, device=device)
    except (Fatal, ValueError) as error:
        refuse(f"tinker: {error}")
    engine |= {"device": device} if device != "auto" else {}

    def open_calls() -> Any:
        return open_service(data / CALLS, bases, options or CallOptions(), engine_options=engine)

    return lambda app, _: add_routes(app, open_calls)
