"""The command ``asyncdock``.

    run, resume ──▶ Run.execute
                      └─ events ──▶ metrics.jsonl, the terminal ──at the end──▶ summary, plot, samples
    check       ──▶ the recipe's problems, or its derived numbers
    recipes     ──▶ what there is to run
    agent       ──▶ executes a service's runs on this machine (api.agent_cli)
    dock        ──▶ a look into a run's samples (api.dock)
    track       ──▶ a run's events to TensorBoard, MLflow or W&B (api.track_cli)
    plan reshard ─▶ what moves between two layouts of the recipe's model, and what it takes (api.reshard)
    runs, login ──▶ runs of a service, over REST (api.runs_cli)

Exit codes are in api.exits, and for people in docs/cli.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.metadata
import json
import os
import signal
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol

import typer
from rich.table import Table

from api.agent_cli import agent_command
from api.dock import dock_app
from api.exits import BAD_INPUT, FINISHED, INTERRUPTED, OF_STATE
from api.runs_cli import login, logout, recipe_files, runs_app
from api.serve_cli import serve_command
from api.token_cli import token_app
from api.track_cli import track_command
from api.view import console as new_console
from api.view import viewing

if TYPE_CHECKING:
    from rich.console import Console

    from api.progress import Event
    from orchestration.forkserver import ForkServer
    from orchestration.recipe import Recipe
    from orchestration.run import RunResult

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
    yield from ((name, _description(path)) for name, path in _recipes().items() if name.startswith(incomplete))
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
    """What a view needs of a run; :class:`orchestration.run.Run` has it."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def out_dir(self) -> Path: ...

    async def execute(self, stop: asyncio.Event | None = None) -> RunResult: ...
    def events(self, after: str = "0") -> AsyncIterator[Event]: ...


# ---------------------------------------------------------------------------------------------------------------------
# Commands


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
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
        loaded = _load(path, set_)
        from orchestration.run import Run, RunError

        folder = here / (out or Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            made = Run.create(loaded, folder)
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
        from orchestration.run import Run, RunError

        try:
            made = Run.resume(run_dir, set_ or [])
        except (RunError, OSError, ValueError) as error:
            _refuse(str(error))
        made.forks = forks
        raise typer.Exit(_show(made, json=json, plain=plain))


@contextlib.contextmanager
def _standing(run_dir: Path) -> Iterator[None]:
    """Work in the folder in which the run in ``run_dir`` was begun, so that its modules and files are found; where there is
    no run, or its folder is gone, stay."""
    from orchestration.run import BEGUN_IN

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
    from orchestration.forkserver import ForkServer, ForkServerDied

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
    from orchestration.planner import plan

    follows = plan(loaded)
    if as_json:  # as POST /v1/recipes/check answers
        print(json.dumps({"recipe": json.loads(loaded.to_json()), "plan": asdict(follows)}))
        return
    from api.report import plan_table

    new_console().print(plan_table(loaded, follows))


@app.command()
def recipes(as_json: DocumentOption = False) -> None:
    """List the recipes that can be run by name."""
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
    new_console().print(table)


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
    loaded = _load(_find(recipe), set_)
    from api.reshard import PlanRefused, reshard_report, reshard_view

    try:
        report = reshard_report(loaded, train, rollout, bucket=bucket, ranks_per_node=ranks_per_node)
    except PlanRefused as error:
        _refuse(f"error: {error}")
    if as_json:
        print(json.dumps(report))
    else:
        new_console().print(reshard_view(report))


app.command()(login)
app.command()(logout)

# ---------------------------------------------------------------------------------------------------------------------
# Finding and loading recipes


def _recipe_folders() -> list[Path]:
    """Where a bare name is looked up: the present directory's recipes first, then those that came with the source."""
    return [Path.cwd() / "recipes", Path(__file__).resolve().parent.parent / "recipes"]


def _recipes() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in _recipe_folders():
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def _description(path: Path) -> str:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
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


def _load(path: Path, overrides: list[str] | None) -> Recipe:
    from orchestration.recipe import RecipeError, load_recipe

    try:
        return load_recipe(path, overrides or [])
    except RecipeError as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    """End with the exit code of wrong input, and say why."""
    print(message, file=sys.stderr)
    raise typer.Exit(BAD_INPUT)


# ---------------------------------------------------------------------------------------------------------------------
# Showing a run


def _show(made: RunLike, *, json: bool, plain: bool) -> int:
    """Execute ``made`` in front of a person, report what came out, and return the exit code."""
    console = new_console(stderr=json)
    outcome = asyncio.run(show(made, console, json=json, plain=plain))
    if outcome is None:
        console.print(f"Ended at once. Go on with: asyncdock resume {made.out_dir}", soft_wrap=True, markup=False)
        return INTERRUPTED
    _report(made, outcome, console)
    return OF_STATE[outcome.state]


async def show(made: RunLike, console: Console, *, json: bool, plain: bool) -> RunResult | None:
    """Execute ``made`` while a view follows its events; they also go to its ``metrics.jsonl``. Returns None when it was
    ended at once."""
    from api.progress import Progress
    from orchestration import logs
    from orchestration.metrics import METRICS, MetricsFile

    progress = Progress(made.recipe.name, made.recipe.train.steps, made.recipe.pipeline.staleness)
    with contextlib.ExitStack() as stack:
        view, say = stack.enter_context(viewing(progress, console, json=json, plain=plain))
        logs.configure()  # now: a live view prints what goes to standard error above itself
        metrics = stack.enter_context(MetricsFile(made.out_dir / METRICS))

        async def follow() -> None:
            async for event in made.events():
                metrics.event(event)
                progress.apply(event)
                view.event(event)

        return await _until_over(made, follow, say)


async def _until_over(made: RunLike, follow: Callable[[], Any], say: Callable[[str], None]) -> RunResult | None:
    """Execute ``made`` and ``follow`` it. The first interrupt asks it to stop, the second cancels it."""
    stop = asyncio.Event()
    reading = asyncio.create_task(follow())
    executing = asyncio.create_task(made.execute(stop))

    def interrupt() -> None:
        if stop.is_set():
            say("Ending at once.")
            executing.cancel()
        else:
            say("Stopping cleanly; Ctrl-C once more ends it at once.")
            stop.set()

    loop = asyncio.get_running_loop()
    caught = [signal.SIGINT, signal.SIGTERM]
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
    from api.report import log_of, summary_table, write_report

    model = outcome.checkpoint.model if outcome.checkpoint else None
    report = write_report(made.out_dir, made.recipe, seconds=outcome.seconds, checkpoint=model)
    told = {} if console.stderr else {"reason": ""}  # the view has said it; events on standard output are for programs
    console.print()
    console.print(summary_table(report.summary | told))
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
    app(prog_name="asyncdock")


if __name__ == "__main__":
    main()
