"""``asyncdock token``: make, list and revoke the bearer tokens of a service, whose server need not be up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.table import Table

from api.cli.exit_codes import BAD_INPUT, FAILED, NO_SERVICE
from api.terminal.screen import complain, safe_console

if TYPE_CHECKING:
    from api.server.access.tokens import Scope, Token, Tokens

T = TypeVar("T")
DAY = 86400.0

token_app = typer.Typer(help="Bearer tokens: who may use a service, and for what.", no_args_is_help=True)

DataOption = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="The service's folder.")]
IndexOption = Annotated[
    str, typer.Option("--index", metavar="URL", envvar="ASYNCDOCK_INDEX", help="Its index, if it is not below DIR.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@token_app.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose it is; runs are owned by this name.")],
    scope: Annotated[str, typer.Option("--scope", help="read, run or admin; each may do what those before it may.")],
    days: Annotated[float | None, typer.Option("--days", help="Valid for so long. Default: until revoked.")] = None,
    data: DataOption = None,
    index: IndexOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make a token and print it, once: only a hash of it is kept."""

    async def make(tokens: Tokens) -> tuple[Token, str]:
        return await tokens.create(name, _scope(scope), seconds=None if days is None else days * DAY)

    token, text = _with_tokens(data, index, make)
    if as_json:
        print(json.dumps({**asdict(token), "token": text}))
    else:
        print(text)
        print(f"id {token.id}, scope {token.scope}; it is not shown again", file=sys.stderr)


@token_app.command()
def adopt(
    name: Annotated[str, typer.Argument(help="Whose it is; runs are owned by this name.")],
    file: Annotated[Path, typer.Option("--file", help="What it is in; anybody can read a command line.")],
    scope: Annotated[str, typer.Option("--scope", help="read, run or admin; each may do what those before it may.")],
    data: DataOption = None,
    index: IndexOption = "",
) -> None:
    """Let a token that lies in a file already open the service, as a deployment needs it. Harmless when repeated; one that
    was revoked stays revoked (exit code 1)."""
    from api.server.access.tokens import TokenRevoked
    from orchestration.private_files import read_by_others

    if open_to_all := read_by_others(file):
        print(f"warning: {open_to_all}", file=sys.stderr)

    async def keep(tokens: Tokens) -> Token:
        return await tokens.adopt(file.read_text().strip(), name, _scope(scope))

    try:
        token = _with_tokens(data, index, keep)
    except TokenRevoked as revoked:
        _refuse(f"{revoked}, and put it into {file}", FAILED)
    print(f"id {token.id}, scope {token.scope}", file=sys.stderr)


@token_app.command("list")
def list_(data: DataOption = None, index: IndexOption = "", as_json: JsonOption = False) -> None:
    """Tokens that were not revoked."""
    found = _with_tokens(data, index, lambda tokens: tokens.list())
    if as_json:
        print(json.dumps([asdict(token) for token in found]))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("id", "name", "scope", "created", "expires"):
        table.add_column(column)
    for token in found:
        table.add_row(token.id, token.name, token.scope, _when(token.created), _when(token.expires))
    safe_console().print(table)


@token_app.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="As `asyncdock token list` shows it.")],
    data: DataOption = None,
    index: IndexOption = "",
) -> None:
    """A token opens nothing any more, at once and for ever."""
    if not _with_tokens(data, index, lambda tokens: tokens.revoke(token)):
        _refuse(f"token: there is none with id {token!r}; see `asyncdock token list`")


def _with_tokens(data: Path | None, index: str, do: Callable[[Tokens], Awaitable[T]]) -> T:
    from api.server.access.tokens import Tokens
    from pipeline.index.client import IndexUnreachable

    async def doing(url: str) -> T:
        tokens = Tokens(url)
        try:
            return await do(tokens)
        finally:
            await tokens.close()

    try:
        with _index(data, index) as url:
            return asyncio.run(doing(url))
    except IndexUnreachable as error:
        _refuse(str(error), NO_SERVICE)
    except (ValueError, OSError, RuntimeError) as error:
        _refuse(str(error))


@contextlib.contextmanager
def _index(data: Path | None, index: str) -> Iterator[str]:
    """The service's index; one below ``data`` that is not up is started for as long as this takes."""
    if index:
        yield index
        return
    if data is None:
        _refuse("token: say which service: --data DIR, or --index URL")
    from orchestration.service.index_server import FILE, ServiceIndex

    server, was_up = ServiceIndex(data), (data / FILE).exists()
    try:
        yield server.start()
    finally:
        if not was_up:
            server.stop()


def _scope(text: str) -> Scope:
    if text not in ("read", "run", "admin"):
        raise ValueError(f"scope: {text!r} is not known; use read, run or admin")
    return text  # type: ignore[return-value]


def _when(seconds: float | None) -> str:
    return "never" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _refuse(message: str, code: int = BAD_INPUT) -> NoReturn:
    complain(message)
    raise typer.Exit(code)
