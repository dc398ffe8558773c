"""The service of training calls that a server is extended by: its base models, its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.cli.common.output import refuse

if TYPE_CHECKING:
    from aiohttp import web

    from orchestration.calls.interface import CallOptions
    from stages.calls.interface import ServedBase

CALLS = "calls"  # in the server's folder


def described_bases(models: Sequence[str], data: Path, **options: Any) -> list[ServedBase]:
    """Return the base models of ``models`` ([NAME=]SOURCE), served from the folder ``data``.
    ``options``: of :func:`~orchestration.calls.bases.describe_bases`; None: not given. Ends the
    command where they cannot be served."""
    from orchestration.calls.bases import describe_bases
    from pipeline.problems import Fatal

    set_options = {name: value for name, value in options.items() if value is not None}
    try:
        return describe_bases(models, data, set_options)
    except (Fatal, ValueError) as error:
        refuse(f"tinker: {error}")


def training_calls(
    bases: Sequence[ServedBase], data: Path, options: CallOptions | None = None
) -> Callable[[web.Application, str], None]:
    """Return what adds training calls of ``bases``, kept below ``data``, to a server."""
    from api.tinker.routes import add_routes
    from orchestration.calls.interface import CallOptions
    from orchestration.calls.service import open_service

    def open_calls() -> Any:
        return open_service(data / CALLS, bases, options or CallOptions())

    return lambda app, _: add_routes(app, open_calls)
