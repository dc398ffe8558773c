"""``asyncdock token``: creates, lists and revokes the bearer tokens of a service. Its server need
not be running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from api.cli.common.exit_codes import FAILED, NO_SERVICE
from api.cli.common.options import IndexOption, JsonOption
from api.cli.common.output import advised, fitting_table, local_time, print_json, refuse
from api.cli.service.asking import ServerOption
from api.client.credentials import DEFAULT_SERVER, KeyringError, find_token
from api.terminal.screen import complain, safe_console, write

if TYPE_CHECKING:
    from api.server.access.tokens import Scope, Token, Tokens

T = TypeVar("T")
DAY = 86400.0

token_app = typer.Typer(
    help="Bearer tokens: who may use a service, and for what.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(help="Whose it is; runs are owned by this name.")]
ScopeOption = Annotated[
    str, typer.Option("--scope", help="read, run or admin; each may do what those before it may.")
]
TinkerOption = Annotated[
    bool, typer.Option("--tinker", help="As a key of Tinker's clients: tml- before it.")
]
OptionalDataOption = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="The service's folder.")
]


@token_app.command()
def create(
    name: NameArgument,
    scope: ScopeOption,
    days: Annotated[
        float | None, typer.Option(help="Valid for so long. Default: until revoked.")
    ] = None,
    data: OptionalDataOption = None,
    index: IndexOption = "",
    as_json: JsonOption = False,
    tinker: TinkerOption = False,
) -> None:
    """Make a token and print it, once: only a hash of it is kept."""
    seconds = None if days is None else days * DAY
    token, text = _with_tokens(
        data, index, lambda tokens: tokens.create(name, _scope(scope), seconds=seconds)
    )
    text = tinker_key(text) if tinker else text
    if as_json:
        return print_json({**asdict(token), "token": text})
    print(text)
    complain(f"id {token.id}, scope {token.scope}; it is not shown again")


@token_app.command()
def adopt(
    name: NameArgument,
    file: Annotated[Path, typer.Option(help="What it is in; other users can read command lines.")],
    scope: ScopeOption,
    data: OptionalDataOption = None,
    index: IndexOption = "",
) -> None:
    """Let a token that lies in a file already open the service, as a deployment needs it.

    Harmless when repeated; one that was revoked stays revoked (exit code 1).
    """
    from api.server.access.tokens import TokenRevoked
    from orchestration.private_files import read_by_others

    if open_to_all := read_by_others(file):
        complain(f"warning: {open_to_all}")

    async def keep(tokens: Tokens) -> Token:
        return await tokens.adopt(file.read_text().strip(), name, _scope(scope))

    try:
        token = _with_tokens(data, index, keep)
    except TokenRevoked as error:
        refuse(f"{error}, and put it into {file}", FAILED)
    complain(f"id {token.id}, scope {token.scope}")


@token_app.command()
def show(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="The service's folder; in place of --server."),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    tinker: TinkerOption = False,
) -> None:
    """Print the token with which your own commands ask a service: it may do everything there."""
    from orchestration.service.own_services import read_authorization

    try:
        token = find_token(server) if data is None else read_authorization(data)
    except FileNotFoundError:
        refuse(f"token: {data} has none; `asyncdock serve --data {data}` makes it")
    except (KeyringError, OSError, ValueError) as error:
        refuse(error)
    if token is None:
        refuse(
            f"token: there is none for {server}; start a service of yours there, or `asyncdock "
            f"login`",
            NO_SERVICE,
        )
    write(tinker_key(token) if tinker else token)


@token_app.command("list")
def list_(
    data: OptionalDataOption = None, index: IndexOption = "", as_json: JsonOption = False
) -> None:
    """Tokens that were not revoked."""
    stored_tokens = _with_tokens(data, index, lambda tokens: tokens.list())
    if as_json:
        return print_json([asdict(token) for token in stored_tokens])
    columns = ("id", "name", "scope", "created", "expires")
    rows = [
        (
            each.id,
            each.name,
            each.scope,
            local_time(each.created),
            local_time(each.expires, "never"),
        )
        for each in stored_tokens
    ]
    console = safe_console()
    console.print(fitting_table(console, columns, rows, ("created",)))


@token_app.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="As `asyncdock token list` shows it.")],
    data: OptionalDataOption = None,
    index: IndexOption = "",
) -> None:
    """A token opens nothing any more, at once and for ever."""
    if not _with_tokens(data, index, lambda tokens: tokens.revoke(token)):
        refuse(f"token: there is none with id {token!r}; see `{advised('token list')}`")


def tinker_key(token: str) -> str:
    """Return ``token`` as a key that Tinker's clients take."""
    from api.server.access.authorization import TINKER_PREFIX

    return f"{TINKER_PREFIX}{token}"


def token_id(data: Path, name: str) -> str:
    """Return the id of the newest valid token of ``name`` of the service in ``data``; "": of its
    user's own one. Ends the command where there is none."""
    from api.server.access.tokens import OWN

    tokens = _with_tokens(data, "", lambda tokens: tokens.list())
    valid = [token for token in tokens if token.name == (name or OWN) and not token.expired]
    if not valid:
        names = ", ".join(sorted({token.name for token in tokens})) or "none"
        refuse(f"--token: {name or OWN!r} has no token in {data}; it has those of: {names}")
    return max(valid, key=lambda token: token.created).id


def _with_tokens(data: Path | None, index: str, work: Callable[[Tokens], Awaitable[T]]) -> T:
    """Return what ``work`` returns with the tokens of the service.

    Ends the command when the index does not answer.
    """
    from api.server.access.tokens import Tokens
    from pipeline.index.client import IndexUnreachable

    async def working(url: str) -> T:
        tokens = Tokens(url)
        try:
            return await work(tokens)
        finally:
            await tokens.close()

    try:
        with _index(data, index) as url:
            return asyncio.run(working(url))
    except IndexUnreachable as error:
        refuse(error, NO_SERVICE)
    except (ValueError, OSError, RuntimeError) as error:
        refuse(error)


@contextlib.contextmanager
def _index(data: Path | None, index: str) -> Iterator[str]:
    """Yield the URL of the service's index.

    One below ``data`` that is not running is started for the duration.
    """
    if index:
        yield index
        return
    if data is None:
        refuse("token: no service is given; use --data DIR, or --index URL")
    from orchestration.service.index_server import FILE, ServiceIndex

    server = ServiceIndex(data)
    was_up = (data / FILE).exists()
    url = server.start()  # what lies in a folder that is refused is not touched
    try:
        yield url
    finally:
        if not was_up:
            server.stop()


def _scope(text: str) -> Scope:
    if text not in ("read", "run", "admin"):
        raise ValueError(f"scope: {text!r} is not known; use read, run or admin")
    return cast("Scope", text)
