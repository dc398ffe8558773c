"""Output of the commands: errors, JSON, tables, sizes and times."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from api.cli.common.exit_codes import BAD_INPUT
from api.terminal.screen import PIPE_WIDTH, complain, write


def refuse(message: object, code: int = BAD_INPUT) -> NoReturn:
    """Print ``message`` on standard error and end the command with ``code``."""
    complain(f"error: {message}")
    raise typer.Exit(code)


def refuse_folder(what: str, error: OSError, fallback: object = "") -> NoReturn:
    """End the command as a folder cannot be written: that of ``error``, or ``fallback``. ``what``:
    the option or argument that names it."""
    folder = str(error.filename or fallback)
    refuse(
        f"{what} = {folder!r}: cannot be written ({error.strerror or error}); give a folder with "
        f"room and permission"
    )


def advised(arguments: str) -> str:
    """Return the ``asyncdock`` command with these arguments as the reader has to type it.

    In a container this is not what the program was called with: ``ASYNCDOCK_COMMAND`` is then what
    runs it there.

    >>> advised("runs list")
    'asyncdock runs list'
    """
    return f"{os.environ.get('ASYNCDOCK_COMMAND') or 'asyncdock'} {arguments}"


def print_json(value: Any) -> None:
    """Print ``value``, or a text that is JSON already, on standard output."""
    write(value if isinstance(value, str) else json.dumps(value))


def table(*columns: str, right: tuple[str, ...] = (), **options: Any) -> Table:
    """Return a table without borders.

    No column but the last is broken into lines; those in ``right`` are aligned right. Columns
    without names have no row of names.
    """
    grid = Table(box=None, show_header=any(columns), pad_edge=False, show_edge=False, **options)
    for column in columns:
        justify = "right" if column in right else "left"
        no_wrap = column != columns[-1]
        grid.add_column(column, justify=justify, no_wrap=no_wrap, overflow="fold")  # type: ignore[arg-type]
    return grid


def fitting_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[RenderableType]],
    leave: Sequence[str],
    **options: Any,
) -> Table:
    """Return :func:`table` of ``rows`` without as many columns of ``leave``, in this order, as it
    takes to fit ``console``. Where it is too wide even so, the first column breaks into lines."""
    unlimited = console.options.update(width=PIPE_WIDTH)
    for count in range(len(leave) + 1):
        places = [at for at, name in enumerate(columns) if name not in leave[:count]]
        fitted = table(*(columns[at] for at in places), **options)
        fitted.columns[0].no_wrap = False
        for row in rows:
            fitted.add_row(*(row[at] for at in places))
        if console.measure(fitted, options=unlimited).maximum <= console.width:
            break
    return fitted


def local_time(unix: float | None, absent: str = "") -> str:
    """Return Unix seconds as a date and time of this time zone, and ``absent`` for None."""
    return absent if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
