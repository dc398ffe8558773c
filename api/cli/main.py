"""The command ``asyncdock``.

    run, resume ──▶ Run.execute
                      └─ events ──▶ metrics.jsonl, the terminal ──at the end──▶ summary, plot, samples
    check       ──▶ the recipe's problems, or its derived numbers
    recipes     ──▶ what there is to run
    agent       ──▶ executes a service's runs on this machine (api.cli.agent)
    dock        ──▶ a look into a run's samples (api.cli.dock)
    track       ──▶ a run's events to TensorBoard, MLflow or W&B (api.cli.track)
    plan reshard ─▶ what moves between two layouts of the recipe's model, and what it takes (api.cli.reshard)
    runs, login ──▶ runs of a service, over REST (api.cli.runs)

Exit codes are in api.cli.exit_codes, and for people in docs/cli.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.metadata
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol

import typer
from rich.markup import escape
from rich.table import Table

from api.cli.agent import agent_command
from api.cli.dock import dock_app
from api.cli.error_log import errors_in_words
from api.cli.exit_codes import BAD_INPUT, FAILED, FINISHED, INTERRUPTED, OF_STATE
from api.cli.runs import login, logout, recipe_files, runs_app
from api.cli.serve import serve_command
from api.cli.token import token_app
from api.cli.track import track_command
from api.terminal.screen import complain, safe_console
from api.terminal.view import viewing
from orchestration.escapes import escaped
from orchestration.logs import ERRORS, TRACE_VARIABLE

if TYPE_CHECKING:
    from rich.console import Console

    from api.telemetry.progress import Event
    from orchestration.processes.forkserver import ForkServer
    from orchestration.recipe.schema import Recipe
    from orchestration.run.run import RunResult

READERS_SECONDS = 5.0  # how long the last events may take to arrive once a run is over

app = typer.Typer(
    help="Asynchronous RL post-training of language models.",
    epilog="Exit codes: 0 done or finished, 1 failed, 2 wrong input, 3 no service or not allowed, 130 stopped.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut long messages
)

app.command("agent")(agent_command)
app.command("track")(track_command)
app.add_typer(dock_app, name="dock")
app.add_typer(runs_app, name="runs")
app.add_typer(token_app, name="token")
app.command("serve")(serve_command)
plan_app = typer.Typer(help="Derive what a run would do, without running anything.", no_args_is_help=True)
app.add_typer(plan_app, name="plan")


def _complete_recipe(incomplete: str) -> Iterator[tuple[str, str]]:
    yield from ((name, escaped(_description(path))) for name, path in _recipes().items() if name.startswith(incomplete))
    yield from recipe_files(incomplete)


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A TOML file, the recipe.json of a run, or a name from `asyncdock recipes`.",
        autocompletion=_complete_recipe,
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as train.steps=10. Repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print every event as one line of JSON.")]
DocumentOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Print one line a step, on a terminal too.")]


class RunLike(Protocol):
    """What a view needs of a run; :class:`orchestration.run.run.Run` has it."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def out_dir(self) -> Path: ...
    @property
    def begins(self) -> int: ...

    async def execute(self, stop: asyncio.Event | None = None) -> RunResult: ...
    def events(self, after: str = "0") -> AsyncIterator[Event]: ...


# ---------------------------------------------------------------------------------------------------------------------
# Commands


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print the traceback of an error. Any command takes it.")
    ] = False,
) -> None:
    if trace:
        os.environ[TRACE_VARIABLE] = "1"
    if version:
        print(f"asyncdock {importlib.metadata.version('asyncdock')}")
        raise typer.Exit(FINISHED)
    from orchestration import logs

    logs.configure()  # on standard error, whatever the command: standard output is for what was asked


@app.command()
def run(
    recipe: RecipeArgument,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="A new folder. Default: runs/NAME-TIME.")] = None,
    json: JsonOption = False,
    plain: PlainOption = False,
) -> None:
    """Train as RECIPE says, and show it live. Ctrl-C stops cleanly, a second one at once."""
    path, here = _find(recipe).resolve(), Path.cwd()
    with _standing(path.parent), _forks() as forks:
        loaded = _load(path, set_, here / (out or "runs"))
        from orchestration.run.run import Run, RunError, RunLocked

        try:
            made = Run.create(loaded, here / out if out else _new_folder(here / "runs", loaded.name))
        except RunLocked as locked:
            _refuse(str(locked), FAILED)
        except (RunError, OSError) as error:
            _refuse(str(error))
        made.forks = forks
        raise typer.Exit(_show(made, json=json, plain=plain))


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run that did not finish.")],
    set_: SetOption = None,
    json: JsonOption = False,
    plain: PlainOption = False,
) -> None:
    """Go on from the newest checkpoint of the run in RUN_DIR, on other devices or ranks if --set says so."""
    run_dir = run_dir.resolve()
    run_dir = run_dir.parent if run_dir.name == "recipe.json" else run_dir
    with _standing(run_dir), _forks() as forks:
        from orchestration.run.run import Run, RunError, RunLocked

        try:
            made = Run.resume(run_dir, set_ or [])
        except RunLocked as locked:
            _refuse(str(locked), FAILED)
        except (RunError, OSError, ValueError) as error:
            _refuse(str(error))
        made.forks = forks
        raise typer.Exit(_show(made, json=json, plain=plain))


def _new_folder(runs: Path, name: str) -> Path:
    """A new folder below ``runs``, of this run alone: another one of this second has another name."""
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not folder.is_dir():  # `runs` itself is a file
                raise
    raise AssertionError("there is always another number")


@contextlib.contextmanager
def _standing(run_dir: Path) -> Iterator[None]:
    """Work in the folder in which the run in ``run_dir`` was begun, so that its modules and files are found; where there is
    no run, or its folder is gone, stay."""
    from orchestration.run.run import BEGUN_IN

    begun = run_dir / BEGUN_IN
    folder = Path(begun.read_text()) if begun.is_file() else None
    if folder is None or not folder.is_dir():
        yield
        return
    with contextlib.chdir(folder):
        sys.path.append(str(folder))
        yield


@contextlib.contextmanager
def _forks() -> Iterator[ForkServer | None]:
    """What a run's workers come from. It imports what they need while this process does."""
    from orchestration.processes.forkserver import ForkServer, ForkServerDied

    try:
        server = ForkServer.start()
    except ForkServerDied:
        yield None
        return
    with contextlib.closing(server):
        yield server


@app.command()
def check(recipe: RecipeArgument, set_: SetOption = None, as_json: DocumentOption = False) -> None:
    """Validate RECIPE without running it, and print what follows from it."""
    loaded = _load(_find(recipe), set_)
    from orchestration.recipe.planner import plan

    follows = plan(loaded)
    if as_json:  # as POST /v1/recipes/check answers
        print(json.dumps({"recipe": json.loads(loaded.to_json()), "plan": asdict(follows)}))
        return
    from api.terminal.report import plan_table

    safe_console().print(plan_table(loaded, follows))


@app.command()
def recipes(
    keys: Annotated[bool, typer.Option("--keys", help="Print the reference of a recipe's keys instead.")] = False,
    section: Annotated[
        str | None, typer.Argument(metavar="[SECTION]", help="With --keys: only of this section, as rollout.vllm.")
    ] = None,
    as_json: DocumentOption = False,
) -> None:
    """List the recipes that can be run by name, or with --keys what a recipe may say."""
    if section and not keys:
        _refuse(f"recipes: {section!r} is given without --keys; write `asyncdock recipes --keys {section}`")
    if keys:
        _print_keys(section or "", as_json=as_json)
        return
    if as_json:
        found = _recipes().items()
        print(
            json.dumps([{"name": name, "description": _description(path), "path": str(path)} for name, path in found])
        )
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, path in _recipes().items():
        table.add_row(name, _description(path))
    safe_console().print(table)


def _print_keys(section: str, *, as_json: bool) -> None:
    from orchestration.recipe.keys import sections
    from orchestration.recipe.problems import suggest

    known = [key for part in sections() for key in part.keys]
    wanted = [key for key in known if f"{key.key}.".startswith(f"{section}." if section else "")]
    if not wanted:
        _refuse(f"recipes: {section!r} is no section of a recipe; {suggest(section, [s.name for s in sections()][1:])}")
    if as_json:
        print(json.dumps([asdict(key) for key in wanted]))
        return
    screen = safe_console(markup=True, highlight=False, soft_wrap=True)
    for key in wanted:
        kind = f"{key.type}, in {key.unit}" if key.unit else key.type
        default = f"default {key.default}" if key.default not in ("", "required") else key.default
        screen.print(f"[bold]{key.key}[/]  {escape('; '.join(filter(None, (kind, default))))}")
        screen.print(f"    {escape(key.meaning)}")


@plan_app.command("reshard")
def plan_reshard(
    recipe: RecipeArgument,
    train: Annotated[
        str | None,
        typer.Option(
            "--train", metavar="LAYOUT", help="As 'dp=2,tp=2'; dp shards as FSDP2 does. Default: the recipe's."
        ),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(
            "--rollout", metavar="LAYOUT", help="As 'dp=4,tp=1'; dp are replicas. Default: the recipe's engines."
        ),
    ] = None,
    set_: SetOption = None,
    bucket: Annotated[
        str | None,
        typer.Option("--bucket", metavar="SIZE", help="Bytes of one of the two buckets. Default: sync.bucket."),
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", help="Default: all are on one node.")
    ] = None,
    as_json: DocumentOption = False,
) -> None:
    """Plan the allgather-swap of RECIPE's model from its training layout to its rollout layout."""
    loaded = _load(_find(recipe), set_, files=False)  # a config is enough: no weights need be here
    from api.cli.reshard import PlanRefused, reshard_report, reshard_view

    try:
        report = reshard_report(loaded, train, rollout, bucket=bucket, ranks_per_node=ranks_per_node)
    except PlanRefused as error:
        _refuse(f"error: {error}")
    if as_json:
        print(json.dumps(report))
    else:
        safe_console().print(reshard_view(report))


app.command()(login)
app.command()(logout)

# ---------------------------------------------------------------------------------------------------------------------
# Finding and loading recipes


def _recipe_folders() -> list[Path]:
    """Where a bare name is looked up: the present directory's recipes first, then those that came with the source."""
    return [Path.cwd() / "recipes", Path(__file__).resolve().parents[2] / "recipes"]


def _recipes() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in _recipe_folders():
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def _description(path: Path) -> str:
    from orchestration.recipe.bounds import read_toml

    try:
        data = read_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"(cannot be read: {error})"
    return str(data.get("description", ""))


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if (path / "recipe.json").is_file():
        _refuse(
            f"recipe: {name!r} is the folder of a run; go on with `asyncdock resume {name}`, or begin one like it with "
            f"`asyncdock run {path / 'recipe.json'}`"
        )
    known = _recipes()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(path.stem, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"use a path, or one of: {', '.join(known) or '(none found)'}"
    _refuse(f"recipe: {name!r} is neither a file nor a known name; {hint}")


def _load(path: Path, overrides: list[str] | None, folder: Path | None = None, *, files: bool = True) -> Recipe:
    """The recipe at ``path`` for a run in ``folder``. ``files``: see :func:`orchestration.recipe.load.parse_recipe`."""
    from orchestration.recipe.load import load_recipe
    from orchestration.recipe.problems import RecipeError

    try:
        return load_recipe(path, overrides or [], folder, files=files)
    except RecipeError as error:
        _refuse(str(error))


def _refuse(message: str, code: int = BAD_INPUT) -> NoReturn:
    """End with the exit code of wrong input, or another one, and say why."""
    complain(message)
    raise typer.Exit(code)


# ---------------------------------------------------------------------------------------------------------------------
# Showing a run


def _show(made: RunLike, *, json: bool, plain: bool) -> int:
    """Execute ``made`` in front of a person, report what came out, and return the exit code."""
    screen = safe_console(stderr=json)
    outcome = asyncio.run(show(made, screen, json=json, plain=plain))
    if outcome is None:
        from api.terminal.report import resume_text
        from orchestration.run.checkpoint import latest

        newest = latest(made.out_dir / "checkpoints")
        begins = resume_text(newest.version if newest else 0, made.recipe.train.steps)
        screen.print(f"[bold yellow]Ended at once.[/] Go on {begins} with:", markup=True, highlight=False)
        screen.print(f"  asyncdock resume {made.out_dir}", highlight=False, markup=False, soft_wrap=True)
        return INTERRUPTED
    _report(made, outcome, screen)
    return OF_STATE[outcome.state]


async def show(made: RunLike, console: Console, *, json: bool, plain: bool) -> RunResult | None:
    """Execute ``made`` while a view follows its events; they also go to its ``metrics.jsonl``. Returns None when it was
    ended at once."""
    from api.telemetry.progress import Progress
    from orchestration import logs
    from orchestration.events_file import METRICS, MetricsFile, Recorded

    progress = Progress(made.recipe.name, made.recipe.train.steps, made.recipe.pipeline.staleness)
    with contextlib.ExitStack() as stack:
        view, say = stack.enter_context(viewing(progress, console, json=json, plain=plain))
        # Now: a live view prints what goes to standard error above itself.
        logs.configure(errors=made.out_dir / "logs" / ERRORS)
        metrics = stack.enter_context(MetricsFile(made.out_dir / METRICS))
        metrics.rewind(made.begins)

        def show_event(event: Event) -> None:
            metrics.event(event)
            progress.apply(event)
            view.event(event)

        async def follow() -> None:
            async for event in made.events():
                show_event(event)

        outcome = await _until_over(made, follow, say)
        if outcome is not None and not progress.ended:  # its index did not record its end
            now = time.time()
            ended = {"state": outcome.state, "reason": outcome.reason}
            show_event(Recorded(f"{int(now * 1000)}-0", now, "state", ended))
        return outcome


async def _until_over(made: RunLike, follow: Callable[[], Any], say: Callable[[str], None]) -> RunResult | None:
    """Execute ``made`` and ``follow`` it. The first interrupt asks it to stop, the second cancels it."""
    stop = asyncio.Event()
    reading = asyncio.create_task(follow())
    executing = asyncio.create_task(made.execute(stop))

    def interrupt() -> None:
        if not stop.is_set():
            stop.set()
            seconds = made.recipe.launch.stop_timeout
            say(f"Stopping cleanly, with a checkpoint, within {seconds:.0f} s; Ctrl-C once more ends it at once.")
        elif not executing.cancelling():  # cancelled twice, it could not clean up
            executing.cancel()
            say("Ending at once.")

    loop = asyncio.get_running_loop()
    # Also when the terminal is closed, unless the command was started with nohup.
    caught = [
        signal.SIGINT,
        signal.SIGTERM,
        *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []),
    ]
    for number in caught:
        loop.add_signal_handler(number, interrupt)
    try:
        return await executing
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        return None
    finally:
        # A view that fails ends the run's display, not the run; what it raised is told once the run is over.
        _, late = await asyncio.wait([reading], timeout=READERS_SECONDS)
        for task in late:
            task.cancel()
        for number in caught:
            loop.remove_signal_handler(number)
        failed = (await asyncio.gather(reading, return_exceptions=True))[0]
        if isinstance(failed, Exception) and not executing.cancelled():
            say(f"The view of the run failed: {type(failed).__name__}: {failed}")


def _report(made: RunLike, outcome: RunResult, console: Console) -> None:
    from api.terminal.report import log_of, summary_table, write_report

    model = outcome.checkpoint.model if outcome.checkpoint else None
    saved = outcome.checkpoint.version if outcome.checkpoint else 0
    report = write_report(made.out_dir, made.recipe, seconds=outcome.seconds, checkpoint=model, saved=saved)
    shown_before = {} if console.stderr else {"reason": ""}  # by the view; events on standard output are for programs
    console.print()
    console.print(summary_table(report.summary | shown_before), markup=False)
    for line in report.notes:
        console.print(f"  {line}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    log = log_of(made.out_dir, outcome.reason)
    if outcome.state == "failed" and log is not None:
        console.print(f"  log: {log}", highlight=False, markup=False, soft_wrap=True)
    if model is not None:
        console.print(f"  model: {model}", highlight=False, markup=False, soft_wrap=True)
    for path in report.files:
        console.print(f"  {path}", highlight=False, markup=False, soft_wrap=True)
    for line in report.missing:
        console.print(f"  {line}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if outcome.state != "finished":
        console.print(f"Go on with: asyncdock resume {made.out_dir}", highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """The entry point. Modules where the caller stands can be named in recipes, as ``my_reward:exact``."""
    sys.path.append(os.getcwd())  # last, so that nothing is shadowed
    arguments = sys.argv[1:]
    own = arguments.index("--") if "--" in arguments else len(arguments)
    if "--trace" in arguments[:own]:  # of any command
        os.environ[TRACE_VARIABLE] = "1"
        arguments = [text for text in arguments[:own] if text != "--trace"] + arguments[own:]
    with errors_in_words():
        try:
            app(args=arguments, prog_name="asyncdock")
        except SystemExit as end:
            if any(thread.name == "imports" for thread in threading.enumerate()):
                # One that is importing must not be torn down in the middle of it.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise


if __name__ == "__main__":
    main()
