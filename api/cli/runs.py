"""``asyncdock runs``, ``login`` and ``logout``: the runs of a service, from a shell.

    command ──▶ server (--server, ASYNCDOCK_SERVER), token (ASYNCDOCK_TOKEN, keyring) ──▶ api.client ──▶ a table, or JSON
    watch   ──▶ events ──▶ Progress ──▶ the view of a local run          Ctrl-C leaves the view; the run goes on

Standard output has what was asked for; what is said to people meanwhile, and errors, are on standard error.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import glob
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from api.cli.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, NO_SERVICE, OF_STATE
from api.client.credentials import (
    DEFAULT_SERVER,
    SERVER_VARIABLE,
    TOKEN_VARIABLE,
    KeyringError,
    find_token,
    forget,
    remember,
)
from api.terminal.screen import complain, safe_console, write
from orchestration.escapes import escaped

if TYPE_CHECKING:
    from rich.console import Console

    from api.client import ApiProblem, Client, ServiceError
    from api.schemas.runs import RunView, SampleView

T = TypeVar("T")

PATIENCE = 5.0  # seconds for which a command goes on trying: a person waits
WATCH_PATIENCE = 300.0  # seconds for which a view that has begun outlasts a service that is away
COMPLETION_SECONDS = 2.0  # the TAB key's
UNKNOWN_RUN = "urn:asyncdock:unknown-run"  # what api.server.problems calls it
LOOPBACK = ("127.0.0.1", "localhost", "::1")

runs_app = typer.Typer(help="Start, stop and watch the runs of a service.", no_args_is_help=True)


def recipe_files(incomplete: str) -> Iterator[tuple[str, str]]:
    """What a recipe's path may go on with: for completion."""
    for path in sorted(Path().glob(f"{glob.escape(incomplete)}*")):
        if path.is_dir():
            yield f"{path}{os.sep}", "folder"
        elif path.suffix == ".toml":
            yield str(path), "file"


def _completed(server: Any, found: Callable[[Client], Awaitable[T]]) -> T | None:
    """What ``server`` answers in a moment, or None: completion has no way to tell an error."""
    from api.client import Client, ServiceError

    address = str(server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER)

    async def asking() -> T:
        async with Client(address, find_token(address), timeout=COMPLETION_SECONDS, patience=0) as client:
            return await found(client)

    try:
        return asyncio.run(asking())
    except (ServiceError, KeyringError, ValueError):
        return None


def _complete_run(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    for run in _completed(ctx.params.get("server"), _newest) or ():
        if run.id.startswith(incomplete):
            yield run.id, f"{run.state}, step {run.steps_done} of {run.steps}"


def _complete_recipe(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    for recipe in _completed(ctx.params.get("server"), lambda client: client.recipes()) or ():
        if recipe.name.startswith(incomplete):
            yield recipe.name, escaped(recipe.description)
    yield from recipe_files(incomplete)


ServerOption = Annotated[
    str, typer.Option("--server", envvar=SERVER_VARIABLE, metavar="URL", help="The service, as http://HOST:PORT.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, from `asyncdock runs list`.", autocompletion=_complete_run)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Print one line a step, on a terminal too.")]


# ---------------------------------------------------------------------------------------------------------------------
# Commands


@runs_app.command("list")
def list_(
    state: Annotated[str, typer.Option(help="Only those in this state.")] = "",
    name: Annotated[str, typer.Option(help="Only those of recipes with this name.")] = "",
    owner: Annotated[str, typer.Option(help="Only those that this token's name submitted.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 20,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """List runs, newest first."""

    async def listed(client: Client) -> list[RunView]:
        return [run async for run in client.runs(state=state, name=name, owner=owner, limit=limit)]

    runs = _ask(server, listed)
    if as_json:
        write(json.dumps([run.model_dump(mode="json") for run in runs]))
    elif runs:
        safe_console().print(runs_table(runs, time.time()))
    else:
        which = " with these filters" if state or name or owner else ""
        _say(f"No runs{which} at {server}. Start one: asyncdock runs start mock --watch")


@runs_app.command()
def show(run: RunArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER) -> None:
    """Show one run."""
    _show(_ask(server, lambda client: client.run(run), run), as_json)


@runs_app.command()
def start(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A TOML file here, or a recipe's name there.", autocompletion=_complete_recipe
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as train.steps=10. Repeatable."),
    ] = None,
    key: Annotated[
        str, typer.Option(help="An idempotency key: the same one again gives the run that it made, and no second.")
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Then watch it.")] = False,
    as_json: JsonOption = False,
    plain: PlainOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Start a run of RECIPE, or queue it. With --watch, Ctrl-C leaves the view and not the run."""
    given, overrides = _recipe(recipe, set_ or [])
    view = _ask(server, lambda client: client.submit(given, overrides, key=key or None))
    if watch:
        _say(f"Started {view.id}")
        _watch(server, view.id, as_json=as_json, plain=plain)
    elif as_json:
        write(view.model_dump_json())
    else:
        queued = f"; it is number {view.position} in the queue" if view.position else ""
        write(view.id)
        _say(f"Started{queued}. Watch it: asyncdock runs watch {view.id}")


@runs_app.command()
def stop(
    run: RunArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Come back once it has ended.")] = False,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Ask for a clean end, with a checkpoint. A run that still waits is stopped at once."""

    async def stopped(client: Client) -> RunView:
        view = await client.stop(run)
        if wait:
            client.patience = WATCH_PATIENCE
            view = await client.wait_until_ended(run)
        return view

    _moved(_ask(server, stopped, run), as_json)


@runs_app.command()
def pause(run: RunArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER) -> None:
    """Let no more samples begin; what is in flight ends."""
    _moved(_ask(server, lambda client: client.pause(run), run), as_json)


@runs_app.command()
def resume(run: RunArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER) -> None:
    """Go on after a pause."""
    _moved(_ask(server, lambda client: client.resume(run), run), as_json)


@runs_app.command()
def checkpoint(run: RunArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER) -> None:
    """Ask for a checkpoint after the next step."""
    _moved(_ask(server, lambda client: client.checkpoint(run), run), as_json)


@runs_app.command()
def watch(
    run: RunArgument, as_json: JsonOption = False, plain: PlainOption = False, server: ServerOption = DEFAULT_SERVER
) -> None:
    """Watch a run until it ends, from its beginning. Ctrl-C leaves the view and not the run."""
    _watch(server, run, as_json=as_json, plain=plain)


@runs_app.command()
def logs(
    run: RunArgument,
    worker: Annotated[str, typer.Option(help="Of this worker alone, as rollout-0.")] = "",
    lines: Annotated[int, typer.Option(min=1, help="So many, the last ones.")] = 200,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Print the last lines of a run's logs."""
    text = _ask(server, lambda client: client.logs(run, worker=worker, lines=lines), run)
    write(json.dumps({"run": run, "worker": worker, "lines": text.splitlines()}) if as_json else text.rstrip("\n"))


@runs_app.command()
def samples(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Only those trained in this step.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="Only those with at least this reward.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Only those with at most this reward.")] = None,
    staleness_min: Annotated[int | None, typer.Option(min=0, help="Only those at least so stale.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 10,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Look at prompts, responses and what they were rewarded."""

    async def found(client: Client) -> list[SampleView]:
        asked = client.samples(
            run, step=step, reward_min=reward_min, reward_max=reward_max, staleness_min=staleness_min, limit=limit
        )
        return [sample async for sample in asked]

    told = _ask(server, found, run)
    if as_json:
        write(json.dumps([sample.model_dump(mode="json") for sample in told]))
        return
    shown = safe_console()
    for sample in told:
        _print_sample(sample, shown)
    if not told:
        _say("No trained samples fit.")


@runs_app.command()
def delete(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Remove an ended run, its data and its files, for good."""
    if not yes:
        if not sys.stdin.isatty():
            _end("delete: nobody is there to be asked; add --yes", BAD_INPUT)
        if not typer.confirm(f"Remove {run} with its checkpoints and logs, for good?", err=True):
            _end("Nothing was removed.", FAILED)
    _ask(server, lambda client: client.delete(run), run)
    write(json.dumps({"deleted": run})) if as_json else _say(f"Removed {run}.")


def login(server: ServerOption = DEFAULT_SERVER) -> None:
    """Keep a token for a service, in a file that only you can read. It is asked for, or read from standard input."""
    if sys.stdin.isatty():
        token = typer.prompt(f"Token for {server}", hide_input=True, err=True).strip()
    else:
        token = sys.stdin.readline().strip()
    if not token:
        _end("token: is empty; `asyncdock token create`, beside the service, makes one", BAD_INPUT)

    async def tried(client: Client) -> None:
        async for _ in client.runs(limit=1):
            break

    _ask(server, tried, token=token)
    try:
        file = remember(server, token)
    except KeyringError as error:
        _end(str(error), BAD_INPUT)
    _say(f"Kept in {file}. Commands for {server} use it unless {TOKEN_VARIABLE} is set.")
    if server.startswith("http://") and not _loopback(server):
        _say("This address has no TLS: the token can be read on its way there. Use https:// where there is one.")


def logout(server: ServerOption = DEFAULT_SERVER) -> None:
    """Forget the token that `asyncdock login` kept for a service. It stays valid until it is revoked."""
    try:
        known = forget(server)
    except KeyringError as error:
        _end(str(error), BAD_INPUT)
    _say(f"Forgotten, for {server}." if known else f"No token was kept for {server}.")


# ---------------------------------------------------------------------------------------------------------------------
# Asking the service


def _ask(server: str, work: Callable[[Client], Awaitable[T]], run: str = "", *, token: str = "", say: Any = None) -> T:
    """What ``work`` gets from ``server``; whatever goes wrong ends the command, with what is wrong and its exit code."""
    from api.client import ApiProblem, Client, ServiceError

    async def asking() -> T:
        notice = say or functools.partial(_notice, since=time.monotonic())
        async with Client(server, token or find_token(server), patience=PATIENCE, on_retry=notice) as client:
            try:
                return await work(client)
            except ApiProblem as problem:
                if problem.type == UNKNOWN_RUN:
                    problem.value, problem.fix = run, _did_you_mean(run, await _newest(client))
                raise

    try:
        return asyncio.run(asking())
    except ApiProblem as problem:
        _end(_refused(server, problem, given=bool(token)), _code(problem))
    except ServiceError as error:
        _end(f"{error}{_nobody_there(server, error)}", NO_SERVICE)
    except (KeyringError, ValueError) as error:
        _end(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


async def _newest(client: Client) -> list[RunView]:
    return [run async for run in client.runs(limit=100)]


def _did_you_mean(run: str, there: Sequence[RunView]) -> str:
    close = difflib.get_close_matches(run, [one.id for one in there], n=1)
    return f"did you mean {close[0]}?" if close else "`asyncdock runs list` shows those that there are"


def _code(problem: ApiProblem) -> int:
    match problem.status:
        case 409:
            return FAILED
        case 401 | 403 | 429:
            return NO_SERVICE
        case status if status < 500:
            return BAD_INPUT
    return NO_SERVICE


def _refused(server: str, problem: ApiProblem, *, given: bool) -> str:
    """The problem; where it is about a token, also where that one came from: people have several."""
    if given:
        source = "the token that was just given"
    elif os.environ.get(TOKEN_VARIABLE):
        source = f"the token in {TOKEN_VARIABLE}"
    elif problem.status in (401, 403) and find_token(server):
        source = "the token that `asyncdock login` kept"
    else:
        source = ""
    fix = f"set {TOKEN_VARIABLE}, or run `asyncdock login --server {server}`"
    match problem.status:
        case 401 if source:
            return f"{server} does not accept {source}: {problem.detail} Get another one and {fix}"
        case 401:
            return f"{server} needs a token: {fix}"
        case 403 if source:
            return f"{problem} (asked with {source})"
    return str(problem)


def _nobody_there(server: str, error: ServiceError) -> str:
    from api.client import Unreachable

    if not isinstance(error, Unreachable):
        return ""
    if _loopback(server):
        return "; start a service with `asyncdock serve`, or name another one with --server or ASYNCDOCK_SERVER"
    return "; see whether it runs there, and whether --server or ASYNCDOCK_SERVER is right"


def _loopback(server: str) -> bool:
    from urllib.parse import urlsplit

    return urlsplit(server).hostname in LOOPBACK


def _notice(failure: ServiceError, seconds: float, *, since: float) -> None:
    if time.monotonic() - since > 1.0:  # a first hiccup is not worth a word
        _say(f"{failure}; trying again")


def _recipe(recipe: str, sets: Sequence[str]) -> tuple[str | dict[str, Any], dict[str, Any] | None]:
    """A file's tables with the overrides in them, or a name and the overrides for the service."""
    path = Path(recipe)
    from orchestration.recipe.load import read_recipe, toml_value
    from orchestration.recipe.problems import RecipeError

    if path.is_file() or path.suffix == ".toml" or os.sep in recipe:
        try:
            data, problems = read_recipe(path, sets)
        except RecipeError as error:
            _end(str(error), BAD_INPUT)
        if problems:
            _end("\n".join(map(str, problems)), BAD_INPUT)
        return data, None
    overrides = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            _end(f"--set = {text!r}: is not key=value; write for example --set train.steps=10", BAD_INPUT)
        overrides[key.strip()] = toml_value(value)
    return recipe, overrides


# ---------------------------------------------------------------------------------------------------------------------
# Watching


def _watch(server: str, run: str, *, as_json: bool, plain: bool) -> NoReturn:
    """Show ``run`` until it ends, and end with the exit code of how it did."""
    screen = safe_console(stderr=as_json)
    shown: list[Callable[[str], None]] = [_say]

    def say(failure: ServiceError, seconds: float) -> None:
        shown[-1](f"{failure}; trying again in {seconds:.0f} s")

    async def watching(client: Client) -> RunView:
        try:
            return await watch_run(client, run, screen, json=as_json, plain=plain, shown=shown)
        except asyncio.CancelledError:
            _say(f"\nThe run goes on. Watch it again: asyncdock runs watch {run}   Stop it: asyncdock runs stop {run}")
            raise

    view = _ask(server, watching, run, say=say)
    if not as_json:
        reason = f" ({view.reason})" if view.reason else ""
        screen.print(f"{view.id}: {view.state}{reason}", markup=False, highlight=False, soft_wrap=True)
    if view.state == "failed":
        _say(f"See what its workers said: asyncdock runs logs {view.id}")
    raise typer.Exit(OF_STATE[view.state])


async def watch_run(
    client: Client, run: str, console: Console, *, json: bool, plain: bool, shown: list[Callable[[str], None]]
) -> RunView:
    """Show ``run`` until it has ended. The way to say a line beside the view is put on ``shown`` while there is one."""
    from api.telemetry.progress import Progress
    from api.terminal.view import viewing

    about = await client.run(run)
    client.patience = WATCH_PATIENCE
    progress = Progress(about.name, about.steps, about.recipe["pipeline"]["staleness"])
    with viewing(progress, console, json=json, plain=plain) as (view, say):
        shown.append(say)
        if about.position:
            say(f"{run} waits: number {about.position} in the queue")
        async for event in client.events(run):
            progress.apply(event)
            view.event(event)
        shown.pop()
    return await client.wait_until_ended(run)


# ---------------------------------------------------------------------------------------------------------------------
# What people see


def runs_table(runs: Sequence[RunView], now: float) -> Table:
    """Runs as ``list`` prints them at Unix time ``now``."""
    from api.terminal.live import STATE_STYLES, number

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", no_wrap=True, min_width=max((len(run.id) for run in runs), default=0))  # it is copied
    for column in ("state", "steps", "reward", "took", "created", "owner"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("steps", "reward", "took") else "left")
    for run in runs:
        state = f"queued {run.position}" if run.position else run.state
        table.add_row(
            run.id,
            Text(state, style=STATE_STYLES.get(run.state, "")),
            f"{run.steps_done}/{run.steps}",
            number(run.reward, ".3f"),
            _took(run, now),
            _when(run.created),
            run.owner,
        )
    return table


def run_table(run: RunView, now: float) -> Table:
    """One run as ``show`` prints it at Unix time ``now``."""
    from api.terminal.live import number

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    pairs = {
        "run": run.id,
        "state": run.state + (f": {run.reason}" if run.reason else ""),
        "queue": f"number {run.position}" if run.position else "",
        "steps": f"{run.steps_done} of {run.steps}",
        "reward": number(run.reward, ".3f"),
        "created": _when(run.created) + (f" by {run.owner}" if run.owner else ""),
        "started": _when(run.started),
        "ended": _when(run.ended),
        "took": _took(run, now),
        "runner": f"{run.agent}, attempt {run.attempts}" if run.agent else "",
        "folder": run.folder,
    }
    for name, value in pairs.items():
        if value:
            table.add_row(name, value)
    return table


def _print_sample(sample: SampleView, console: Console) -> None:
    from api.terminal.live import number

    versions = " ".join(f"v{version}×{tokens}" for version, tokens in sample.versions)
    console.rule(
        f"group {sample.group} #{sample.place}  step {sample.step}  reward {number(sample.reward, '.3f')}  "
        f"advantage {number(sample.advantage, '.3f')}  staleness {sample.staleness}  {versions}",
        style="dim",
        align="left",
    )
    console.print(sample.prompt, style="dim", markup=False, highlight=False, soft_wrap=True)
    console.print(sample.response + (" …" if sample.truncated else ""), markup=False, highlight=False, soft_wrap=True)


def _show(view: RunView, as_json: bool) -> None:
    if as_json:
        write(view.model_dump_json())
    else:
        safe_console().print(run_table(view, time.time()), markup=False, highlight=False)


def _moved(view: RunView, as_json: bool) -> None:
    write(view.model_dump_json()) if as_json else _say(f"{view.id}: {view.state}")


def _when(unix: float | None) -> str:
    return "" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _took(run: RunView, now: float) -> str:
    from api.terminal.live import duration

    return duration((run.ended or now) - run.started) if run.started else ""


def _say(text: str) -> None:
    """A line to the person, on standard error: standard output is for what was asked."""
    complain(text)


def _end(text: str, code: int) -> NoReturn:
    _say(f"error: {text}" if code else text)
    raise typer.Exit(code)
