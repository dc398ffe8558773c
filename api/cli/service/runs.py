"""``asyncdock runs``, ``login`` and ``logout``: the runs of a service.

    command ──▶ api.cli.service.asking.ask ──▶ a table, or JSON
    watch   ──▶ events ──▶ Progress ──▶ the view of a local run          Ctrl-C closes the view; the run goes on

Results are printed on standard output; messages and errors on standard error.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from api.cli.common.exit_codes import FAILED, NO_READER, OF_STATE
from api.cli.common.options import (
    EventsOption,
    FromOption,
    JsonOption,
    PlainOption,
    SetOption,
)
from api.cli.common.output import advised, fitting_table, local_time, print_json, refuse
from api.cli.common.recipe_files import complete_path
from api.cli.service.asking import (
    WATCH_PATIENCE,
    ServerOption,
    ask,
    ask_for_completion,
    ask_here,
    is_loopback,
    is_run_folder,
    newest_runs,
)
from api.cli.service.keeping import archive, confirm, delete_folder, disk
from api.cli.service.labels import note, tag
from api.client.credentials import DEFAULT_SERVER, TOKEN_VARIABLE, KeyringError, forget, remember
from api.terminal.screen import complain, pairs_table, safe_console, write
from orchestration.escapes import escaped
from orchestration.streams import output_is_gone
from pipeline.data.events import ENDED

if TYPE_CHECKING:
    from rich.console import Console

    from api.client import Client, ServiceError
    from api.schemas.runs import CheckpointView, RunView, StagesView
    from orchestration.state.registry import Ask, RunRecord
    from pipeline.index.client import Index

LOOK_SECONDS = 0.5  # until it is seen again whether a checkpoint is written

runs_app = typer.Typer(help="Start, stop and watch the runs of a service.", no_args_is_help=True)
runs_app.command()(archive)
runs_app.command()(disk)


def complete_run(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    for run in ask_for_completion(ctx.params.get("server"), newest_runs) or ():
        if run.id.startswith(incomplete):
            yield run.id, f"{run.state}, step {run.steps_done} of {run.steps}"


def _complete_recipe(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    for recipe in (
        ask_for_completion(ctx.params.get("server"), lambda client: client.recipes()) or ()
    ):
        if recipe.name.startswith(incomplete):
            yield recipe.name, escaped(recipe.description)
    yield from complete_path(incomplete)


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's id, from `asyncdock runs list`, or its folder.",
        autocompletion=complete_run,
    ),
]
LiveArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's id, from `asyncdock runs list`; or the folder of one that `asyncdock run` "
        "executes.",
        autocompletion=complete_run,
    ),
]


runs_app.command(context_settings={"ignore_unknown_options": True})(tag)  # -TAG is none
runs_app.command()(note)


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

    runs = ask(server, listed)
    if as_json:
        print_json([run.model_dump(mode="json") for run in runs])
    elif runs:
        console = safe_console()
        console.print(runs_table(runs, time.time(), console))
    else:
        filters = " with these filters" if state or name or owner else ""
        complain(f"No runs{filters} at {server}. Start one: {advised('runs start mock --watch')}")


@runs_app.command()
def show(
    run: RunArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER
) -> None:
    """Show one run."""

    async def asked(client: Client) -> tuple[RunView, StagesView | None]:
        return await client.run(run), None if as_json else await client.stages(run)

    view, stages = ask(server, asked, run)
    if stages is None:
        print_json(view.model_dump_json())
    else:
        safe_console().print(run_table(view, time.time(), stages), markup=False, highlight=False)


@runs_app.command()
def start(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A TOML file here, or a recipe's name there.",
            autocompletion=_complete_recipe,
        ),
    ],
    set_: SetOption = None,
    key: Annotated[
        str,
        typer.Option(
            help="An idempotency key: the same one again gives the run that it made, and no second."
        ),
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Then watch it.")] = False,
    as_json: JsonOption = False,
    plain: PlainOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Start a run of RECIPE, or queue it. With --watch, Ctrl-C leaves the view and not the run."""
    recipe_or_name, overrides = _submission(recipe, set_ or [])
    view = ask(server, lambda client: client.submit(recipe_or_name, overrides, key=key or None))
    started(server, view, watch=watch, as_json=as_json, plain=plain)


def started(server: str, view: RunView, *, watch: bool, as_json: bool, plain: bool) -> None:
    """Print the run ``view`` that a command has started, or with ``watch`` watch it."""
    if watch:
        complain(f"Started {view.id}")
        _watch(server, view.id, as_json=as_json, plain=plain)
    elif as_json:
        print_json(view.model_dump_json())
    else:
        queued = f"; it is number {view.position} in the queue" if view.position else ""
        write(view.id)
        complain(f"Started{queued}. Watch it: {advised(f'runs watch {view.id}')}")


@runs_app.command()
def stop(
    run: LiveArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Come back once it has ended.")] = False,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Ask for a clean end, with a checkpoint. A run that still waits is stopped at once."""

    async def stopped(client: Client) -> tuple[RunView, str]:
        view = await client.stop(run)
        if wait:
            client.patience = WATCH_PATIENCE
            view = await client.wait_until_ended(run)
        return view, ""

    _request(run, server, as_json, None if wait else _active("stop"), stopped)


@runs_app.command()
def pause(
    run: LiveArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER
) -> None:
    """Let no more samples begin; what is in flight ends."""

    async def paused(client: Client) -> tuple[RunView, str]:
        return await client.pause(run), ""

    _request(run, server, as_json, _active("pause"), paused)


@runs_app.command()
def resume(
    run: LiveArgument,
    set_: SetOption = None,
    start_version: FromOption = None,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Go on after a pause; or, when it has ended, from its newest checkpoint, with the keys that
    --set changes."""
    overrides = set_values(set_ or [])
    local_request = None if overrides or start_version is not None else _active("resume")

    async def resumed(client: Client) -> tuple[RunView, str]:
        return await client.resume(run, overrides, start_version=start_version), ""

    _request(run, server, as_json, local_request, resumed)


@runs_app.command()
def checkpoint(
    run: LiveArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Come back once it is written.")] = False,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Ask for a checkpoint after the next step."""
    if wait:
        return _write_checkpoint(run, server, as_json=as_json)

    def done(steps: int, folder: str) -> str:
        to = os.path.join(folder, "checkpoints")
        return f"; step {steps} is done, a checkpoint of the next comes to {to}"

    async def here(index: Index) -> tuple[str, str]:
        from orchestration.state.registry import ask_active

        state = await ask_active(index, "checkpoint")
        return state, done((await index.status()).trained, run)

    async def there(client: Client) -> tuple[RunView, str]:
        view = await client.checkpoint(run)
        return view, done(view.steps_done, view.folder)

    _request(run, server, as_json, here, there)


def _write_checkpoint(run: str, server: str, *, as_json: bool) -> None:
    async def written(client: Client) -> tuple[RunView, CheckpointView | None]:
        client.patience = WATCH_PATIENCE
        before = {saved.version for saved in await client.checkpoints(run)}
        view = await client.checkpoint(run)
        while True:
            later = [one for one in await client.checkpoints(run) if one.version not in before]
            if later or view.state in ENDED:
                return view, later[-1] if later else None
            await asyncio.sleep(LOOK_SECONDS)
            view = await client.run(run)

    view, saved = ask(server, written, run)
    if saved is None:
        refuse(f"run: {view.id} has {view.state} without a further checkpoint", FAILED)
    if as_json:
        facts = {"id": view.id, "state": view.state, "checkpoint": saved.model_dump(mode="json")}
        return print_json(facts)
    complain(f"{view.id}: {view.state}; checkpoint of step {saved.version} in {saved.path}")


@runs_app.command()
def scale(
    run: LiveArgument,
    workers: Annotated[
        str, typer.Argument(metavar="rollout=N", help="How many rollout workers it is to have.")
    ],
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Ask for another number of rollout workers while the run goes on.

    Those that leave park what they hold.
    """
    kind, _, number = workers.partition("=")
    if kind != "rollout" or not number.isdecimal() or not int(number):
        refuse(
            f"workers = {workers!r}: is not a number of rollout workers; write for example "
            f"rollout=4"
        )

    def done(before: int | None) -> str:
        return f"; rollout workers from {before} to {number}" if before else ""

    async def here(index: Index) -> tuple[str, str]:
        from orchestration.supervise.scale import request_scale

        state, before = await request_scale(index, int(number))
        return state, done(before)

    async def there(client: Client) -> tuple[RunView, str]:
        view = await client.scale(run, int(number))
        return view, done(view.rollouts_before)

    _request(run, server, as_json, here, there)


@runs_app.command()
def watch(
    run: RunArgument,
    as_json: EventsOption = False,
    plain: PlainOption = False,
    server: ServerOption = DEFAULT_SERVER,
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
    text = ask(server, lambda client: client.logs(run, worker=worker, lines=lines), run)
    if as_json:
        print_json({"run": run, "worker": worker, "lines": text.splitlines()})
    else:
        write(text.rstrip("\n"))


@runs_app.command()
def delete(
    run: RunArgument,
    old_checkpoints: Annotated[
        bool,
        typer.Option("--old-checkpoints", help="Only checkpoints but the newest; of a folder."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Remove an ended run, its data and its files, for good."""
    if is_run_folder(run):
        return delete_folder(run, old_checkpoints=old_checkpoints, yes=yes, as_json=as_json)
    if old_checkpoints:
        refuse("--old-checkpoints: is for runs in folders; give the run's folder")
    confirm(f"Remove {run} with its checkpoints and logs, for good?", yes=yes)
    ask(server, lambda client: client.delete(run), run)
    print_json({"deleted": run}) if as_json else complain(f"Removed {run}.")


def login(server: ServerOption = DEFAULT_SERVER) -> None:
    """Keep a token for a service, in a file that only you can read.

    It is asked for, or read from standard input.
    """
    if sys.stdin.isatty():
        token = typer.prompt(f"Token for {server}", hide_input=True, err=True).strip()
    else:
        token = sys.stdin.readline().strip()
    if not token:
        refuse("token: is empty; `asyncdock token create`, beside the service, makes one")

    async def check(client: Client) -> None:
        async for _ in client.runs(limit=1):
            break

    ask(server, check, token=token)
    try:
        file = remember(server, token)
    except KeyringError as error:
        refuse(error)
    complain(f"Kept in {file}. Commands for {server} use it unless {TOKEN_VARIABLE} is set.")
    if server.startswith("http://") and not is_loopback(server):
        complain(
            "This address has no TLS: the token can be read on its way there. Use https:// "
            "where there is one."
        )


def logout(server: ServerOption = DEFAULT_SERVER) -> None:
    """Forget the token that `asyncdock login` kept for a service.

    It stays valid until it is revoked.
    """
    try:
        had_token = forget(server)
    except KeyringError as error:
        refuse(error)
    complain(f"Forgotten, for {server}." if had_token else f"No token was kept for {server}.")


def _submission(
    recipe: str, sets: Sequence[str]
) -> tuple[str | dict[str, Any], dict[str, Any] | None]:
    """Return what to submit: the tables of a file with the overrides applied, or a name and the
    overrides."""
    from orchestration.recipe.loading.load import read_recipe
    from orchestration.recipe.problems import RecipeError

    path = Path(recipe)
    if path.is_file() or path.suffix == ".toml" or os.sep in recipe:
        try:
            data, problems = read_recipe(path, sets)
        except RecipeError as error:
            refuse(error)
        if problems:
            refuse("\n".join(map(str, problems)))
        return data, None
    return recipe, set_values(sets)


def set_values(sets: Sequence[str]) -> dict[str, Any]:
    """Return the values of options --set by key."""
    from orchestration.recipe.loading.load import toml_value

    overrides = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            refuse(f"--set = {text!r}: is not key=value; write for example --set train.steps=10")
        overrides[key.strip()] = toml_value(value)
    return overrides


def _watch(server: str, run: str, *, as_json: bool, plain: bool) -> NoReturn:
    """Show ``run`` until it ends, then end the command with the exit code of its state."""
    screen = safe_console(stderr=as_json)
    say: list[Callable[[str], None]] = [complain]

    def on_retry(failure: ServiceError, seconds: float) -> None:
        say[-1](f"{failure}; trying again in {seconds:.0f} s")

    async def watching(client: Client) -> RunView:
        try:
            return await watch_run(client, run, screen, json=as_json, plain=plain, say=say)
        except asyncio.CancelledError:
            watch_command = advised(f"runs watch {run}")
            stop_command = advised(f"runs stop {run}")
            complain(
                f"\nThe run goes on. Watch it again: {watch_command}   Stop it: {stop_command}"
            )
            raise

    view = ask(server, watching, run, on_retry=on_retry)
    if not as_json:
        reason = f" ({view.reason})" if view.reason else ""
        screen.print(
            f"{view.id}: {view.state}{reason}", markup=False, highlight=False, soft_wrap=True
        )
    if view.state == "failed":
        complain(f"See the logs of its workers: {advised(f'runs logs {view.id}')}")
    raise typer.Exit(OF_STATE[view.state])


async def watch_run(
    client: Client,
    run: str,
    console: Console,
    *,
    json: bool,
    plain: bool,
    say: list[Callable[[str], None]],
) -> RunView:
    """Show ``run`` until it has ended.

    While there is a view, the last element of ``say`` prints a line beside it.
    """
    from api.telemetry.progress import Progress
    from api.terminal.view import viewing

    about = await client.run(run)
    client.patience = WATCH_PATIENCE
    progress = Progress(
        about.name, about.steps, about.recipe["pipeline"]["staleness"], about.devices
    )
    with viewing(progress, console, json=json, plain=plain) as (show, say_beside):
        say.append(say_beside)
        if about.position:
            say_beside(f"{run} waits: number {about.position} in the queue")
        async for event in client.events(run):
            show(event)
            if output_is_gone():
                raise typer.Exit(NO_READER)
        say.pop()
    return await client.wait_until_ended(run)


def runs_table(runs: Sequence[RunView], now: float, console: Console) -> Table:
    """Return the table that ``list`` prints at Unix time ``now``; run, state and steps are always in
    it."""
    from api.terminal.live import STATE_STYLES
    from api.terminal.numbers import number

    columns = ("run", "state", "steps", "reward", "took", "created", "owner")
    rows = list[tuple[str | Text, ...]]()
    for run in runs:
        state = Text(
            f"queued {run.position}" if run.position else run.state,
            style=STATE_STYLES.get(run.state, ""),
        )
        rows.append(
            (
                run.id,
                state,
                f"{run.steps_done}/{run.steps}",
                number(run.reward, ".3f"),
                ran(run, now),
                local_time(run.created),
                run.owner,
            )
        )
    leave = ("created", "took", "owner", "reward")
    right = ("steps", "reward", "took")
    return fitting_table(console, columns, rows, leave, right=right, header_style="dim")


def run_table(run: RunView, now: float, stages: StagesView) -> Table:
    """Return the table that ``show`` prints at Unix time ``now``."""
    from api.terminal.numbers import number
    from api.terminal.report import dropped_text

    dropped = {
        reason: (groups, stages.dropped_tokens[reason]) for reason, groups in stages.dropped.items()
    }

    return pairs_table(
        ("run", run.id),
        ("state", run.state + (f": {run.reason}" if run.reason else "")),
        ("queue", f"number {run.position}" if run.position else ""),
        ("steps", f"{run.steps_done} of {run.steps}"),
        ("reward", number(run.reward, ".3f")),
        ("dropped", dropped_text(dropped)),
        ("created", local_time(run.created) + (f" by {run.owner}" if run.owner else "")),
        ("started", local_time(run.started)),
        ("ended", local_time(run.ended)),
        ("took", ran(run, now)),
        ("runner", f"{run.agent}, attempt {run.attempts}" if run.agent else ""),
        ("folder", run.folder),
        ("tags", " ".join(run.tags)),
        ("notes", run.notes),
        pad_edge=False,
    )


def _request(
    run: str,
    server: str,
    as_json: bool,
    here: Callable[[Index], Awaitable[tuple[str, str]]] | None,
    there: Callable[[Client], Awaitable[tuple[RunView, str]]],
) -> None:
    """Ask a run for something, ``here`` by its index when ``run`` is the folder of one of
    `asyncdock run`, else ``there`` by its service, and print its state then, with what both return
    beside it: what was done. ``here`` None: only a service can be asked."""
    if here is not None and (answer := ask_here(run, here)):
        name, (state, done) = answer
        print_json({"id": name, "state": state}) if as_json else complain(f"{name}: {state}{done}")
    else:
        view, done = ask(server, there, run)
        if as_json:
            return print_json(view.model_dump_json())
        complain(f"{view.id}: {view.state}{done}")


def _active(what: Ask) -> Callable[[Index], Awaitable[tuple[str, str]]]:
    async def asked(index: Index) -> tuple[str, str]:
        from orchestration.state.registry import ask_active

        return await ask_active(index, what), ""

    return asked


def ran(run: RunView | RunRecord, now: float) -> str:
    """Return how long ``run`` has run, over all its resumes; "" before it began."""
    from api.terminal.numbers import duration

    if run.started is None:
        return duration(run.former_seconds) if run.former_seconds else ""
    return duration(run.former_seconds + (run.ended or now) - run.started)
