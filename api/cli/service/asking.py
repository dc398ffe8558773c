"""Calls of a service for the commands; every failure becomes a message and an exit code.

--server or ASYNCDOCK_SERVER, ASYNCDOCK_TOKEN or the kept token ──▶ api.client ──▶ result, or message and exit code
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer

from api.cli.common.error_log import say_errors
from api.cli.common.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, NO_SERVICE
from api.cli.common.output import advised, refuse
from api.cli.folder.foreign import refuse_unreadable
from api.client.credentials import (
    DEFAULT_SERVER,
    SERVER_VARIABLE,
    TOKEN_VARIABLE,
    KeyringError,
    token_source,
)
from api.terminal.screen import complain

if TYPE_CHECKING:
    from api.client import ApiProblem, Client, ServiceError
    from api.schemas.runs import RunView
    from pipeline.index.client import Index

T = TypeVar("T")

PATIENCE = 5.0  # seconds for which a command retries
WATCH_PATIENCE = 300.0  # seconds for which a view survives a service that does not answer
COMPLETION_SECONDS = 2.0  # for an answer to the TAB key
UNKNOWN_RUN = "urn:asyncdock:unknown-run"  # the problem's type, from api.server.http.problems
FOLDERS = "*/recipe.json"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

ServerOption = Annotated[
    str,
    typer.Option(
        "--server", envvar=SERVER_VARIABLE, metavar="URL", help="The service, as http://HOST:PORT."
    ),
]


def ask(
    server: str,
    work: Callable[[Client], Awaitable[T]],
    run: str = "",
    *,
    token: str = "",
    on_retry: Any = None,
) -> T:
    """Return what ``work`` returns with a client of ``server``.

    Any failure ends the command with a message and an exit code. ``run``: the run that it is about;
    ``token``: instead of the kept one.
    """
    from api.client import ApiProblem, NotShown, ServiceError

    refuse_no_folder(run)
    failures: list[str] = []  # of the server that shows a run in a folder

    async def asking() -> T:
        notice = on_retry or functools.partial(_print_retry, since=time.monotonic())
        options = {"patience": PATIENCE, "on_retry": notice}
        async with _client(server, token, run, options, failures) as client:
            try:
                return await work(client)
            except ApiProblem as problem:
                if problem.type == UNKNOWN_RUN:
                    problem.value = run
                    problem.fix = _meant(run, [view.id for view in await newest_runs(client)])
                raise

    try:
        return asyncio.run(asking())
    except ApiProblem as problem:
        if failures and problem.status >= 500:
            refuse(f"run: {run} cannot be shown: {failures[-1]}", FAILED)
        refuse(_describe(server, problem, token_given=bool(token)), _exit_code(problem))
    except NotShown as error:
        refuse(error, FAILED)
    except ServiceError as error:
        refuse(f"{error}{_unreachable_hint(server, error, run)}", NO_SERVICE)
    except (KeyringError, ValueError) as error:
        refuse(error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _client(
    server: str, token: str, run: str, options: dict[str, Any], failures: list[str]
) -> AbstractAsyncContextManager[Client]:
    """Return a client of ``server``, or of one that shows the run in the folder ``run``, whose
    errors go to ``failures``."""
    if run and is_run_folder(run):
        from api.client.folder import client_of_folder

        say_errors(failures.append)
        return client_of_folder(run, **options)
    from api.client import Client

    return Client(server, token or None, **options)


def is_run_folder(run: str) -> bool:
    """Return whether ``run`` is the folder of a run; end the command where its recipe may not be
    read."""
    refuse_unreadable(Path(run))
    return (Path(run) / "recipe.json").is_file()


def refuse_no_folder(run: str) -> None:
    """End the command where ``run`` is a path and not the folder of a run."""
    if run:
        refuse_unreadable(Path(run))
    recipe = Path(run) / "recipe.json"  # a pipe there is refused by its name, by who reads it
    if run and Path(run).is_dir() and not recipe.exists():
        refuse(f"run: {run} has no recipe.json; {_meant(run, [])}")
    if os.sep in run and not Path(run).exists():  # no id has one
        refuse(f"run: {run} does not exist; {_meant(run, [])}")


def split_step(run: str) -> tuple[str, int | None]:
    """Return the run and the step of ``RUN@STEP``; None for the step of ``RUN``.

    >>> split_step("runs/a@20"), split_step("runs/a@b")
    (('runs/a', 20), ('runs/a@b', None))
    """
    match = re.fullmatch(r"(.+)@([0-9]{1,18})", run)
    if match is None or is_run_folder(run):
        return run, None
    return match[1], int(match[2])


def ask_for_completion(server: Any, work: Callable[[Client], Awaitable[T]]) -> T | None:
    """Return what ``work`` returns, or None when the service does not answer soon: completion
    cannot show errors."""
    from api.client import Client, ServiceError

    address = str(server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER)

    async def asking() -> T:
        async with Client(address, timeout=COMPLETION_SECONDS, patience=0) as client:
            return await work(client)

    try:
        return asyncio.run(asking())
    except (ServiceError, KeyringError, ValueError):
        return None


def ask_here(
    run: str,
    work: Callable[[Index], Awaitable[T]],
    unreachable: str = "",
    *,
    ended: bool = False,
) -> tuple[str, T] | None:
    """Return the id of the run that `asyncdock run` executes in the folder ``run``, and what
    ``work`` returns with its index; None when ``run`` is not a run's folder, or with ``ended`` that
    of one that has ended. Any failure ends the command; ``unreachable``: what it means when the
    index does not answer."""
    if not is_run_folder(run):
        return None
    from orchestration.recipe.problems import RecipeError
    from orchestration.state.lifecycle import NoneAlive, ask_in_folder
    from orchestration.state.registry import WrongState

    try:
        return asyncio.run(ask_in_folder(Path(run).resolve(), work))
    except ConnectionError as error:
        refuse(f"{unreachable}{error}", NO_SERVICE if unreachable else FAILED)
    except NoneAlive as error:
        return None if ended else refuse(error, FAILED)
    except (LookupError, WrongState, RecipeError) as error:
        refuse(error, FAILED)


async def newest_runs(client: Client) -> list[RunView]:
    return [run async for run in client.runs(limit=100)]


def is_loopback(server: str) -> bool:
    return urlsplit(server).hostname in LOOPBACK


def _meant(run: str, ids: Sequence[str]) -> str:
    """Return what to write in place of ``run``: one of ``ids``, or the folder of a run."""
    close, folder = _near(run, ids)
    if close:
        return f"did you mean {close}?"
    return f"give an id from `{advised('runs list')}`, or {folder}"


def _near(run: str, ids: Sequence[str]) -> tuple[str, str]:
    """Return the most similar of ``ids`` and of the folders of runs near the working directory; and
    a folder of a run in words."""
    roots = [run, "runs", "."] if Path(run).is_dir() else ["runs", "."]
    folders = [str(path.parent) for root in roots for path in sorted(Path(root).glob(FOLDERS))]
    names = {os.path.basename(folder): folder for folder in reversed(folders)}
    names |= {name: name for name in (*folders, *ids)}
    close = difflib.get_close_matches(run, names, n=1)
    such_as = f", such as {folders[-1]}" if folders else ""
    return names[close[0]] if close else "", f"the folder of a run{such_as}"


def _exit_code(problem: ApiProblem) -> int:
    if problem.status == 409:
        return FAILED
    return NO_SERVICE if problem.status in (401, 403, 429) or problem.status >= 500 else BAD_INPUT


def _describe(server: str, problem: ApiProblem, *, token_given: bool) -> str:
    """Return the problem as text, with the source of the token when the problem is about the
    token."""
    source = token_source(server) if problem.status in (401, 403) else ""
    source = "the token that was just given" if token_given else source
    fix = f"set {TOKEN_VARIABLE}, or run `asyncdock login --server {server}`"
    match problem.status:
        case 401 if source:
            return f"{server} does not accept {source}: {problem.detail} Get another one and {fix}"
        case 401:
            ask_first = (
                "no service of yours is known there; ask who runs it for one, and "
                if is_loopback(server)
                else ""
            )
            return f"{server} needs a token: {ask_first}{fix}"
        case 403 if source:
            return f"{problem} (asked with {source})"
    return str(problem)


def _unreachable_hint(server: str, error: ServiceError, run: str) -> str:
    from api.client import Unreachable

    if not isinstance(error, Unreachable):
        return ""
    close, folder = _near(run, []) if run else ("", "")
    or_folder = f"; or did you mean {close}?" if close else f"; or give {folder}" if run else ""
    if is_loopback(server):
        return (
            "; start a service with `asyncdock serve`, or name another one with --server or "
            f"ASYNCDOCK_SERVER{or_folder}"
        )
    return (
        f"; see whether it runs there, and whether --server or ASYNCDOCK_SERVER is right{or_folder}"
    )


def _print_retry(failure: ServiceError, seconds: float, *, since: float) -> None:
    if time.monotonic() - since > 1.0:  # a short interruption is not reported
        complain(f"{failure}; trying again")
