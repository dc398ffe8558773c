"""``asyncdock sweep``: one recipe with several settings, each run once.

    RECIPE, --over ─▶ settings ─▶ all recipes checked ─▶ FOLDER/sweep.json ─▶ runs here, or of a service ─▶ comparison
    FOLDER ─────────────────────────────────────────────────▲    └ live table, or a line for each change

Ctrl-C stops the runs cleanly; the same command, or `asyncdock sweep FOLDER`, goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.common.exit_codes import FAILED, FINISHED, INTERRUPTED
from api.cli.common.options import JsonOption, PlainOption, SetOption
from api.cli.common.output import advised, print_json, refuse, refuse_folder, table
from api.cli.common.recipe_files import find
from api.cli.service.asking import ask
from api.terminal.screen import Safe, complain, safe_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from api.client import Client
    from orchestration.comparison.results import RunResult
    from orchestration.recipe.problems import RecipeError
    from orchestration.sweep.execution import Executor, SweepExecution
    from orchestration.sweep.record import Request, Sweep, SweepRun
    from orchestration.sweep.settings import Settings

REDRAWS_PER_SECOND = 2
LINES_BESIDE = 6  # of a live table: its head and foot


def sweep_command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FOLDER",
            help="A recipe, as for `asyncdock run`; or a sweep to go on with.",
        ),
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=VALUES",
            help="Values of a key, as train.learning_rate=1e-6,3e-6 or seed=0..4; with --search a "
            "range too, as train.learning_rate=1e-7..1e-5:log. Repeatable.",
        ),
    ] = None,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="The sweep's folder.")
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once",
            min=0,
            help="So many runs at the same time, where the memory is enough. 0: here one; of a "
            "service all, and with --search tpe one.",
        ),
    ] = 0,
    server: Annotated[
        str,
        typer.Option("--server", metavar="URL", help="Run them in the queue of this service."),
    ] = "",
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            help="What is compared: a number of steps, or of evaluations, as "
            "evaluation.reward_mean.",
        ),
    ] = "reward_mean",
    stop_below: Annotated[
        list[str] | None,
        typer.Option(
            "--stop-below",
            metavar="VALUE@STEP",
            help="Stop a run whose metric is worse at this step, as 0.2@50. Repeatable.",
        ),
    ] = None,
    search: Annotated[
        str, typer.Option("--search", help="Let Optuna choose the settings: random or tpe.")
    ] = "",
    trials: Annotated[int, typer.Option("--trials", min=0, help="Runs of a search.")] = 0,
    prune: Annotated[
        str,
        typer.Option(
            "--prune",
            help="Stop runs that are worse than others, by Optuna: median, halving, hyperband or "
            "none. Default: median in a search.",
        ),
    ] = "",
    seed: Annotated[int, typer.Option("--seed", help="Of the search.")] = 0,
    as_json: JsonOption = False,
    plain: PlainOption = False,
) -> None:
    """Run RECIPE with each combination of settings, each once, and compare them."""
    from orchestration.private_files import keep_from_others
    from orchestration.recipe.problems import RecipeError
    from orchestration.state.lock import RunError
    from orchestration.sweep.checks import begin
    from orchestration.sweep.record import SWEEP, Request, Sweep

    keep_from_others()
    try:
        if (Path(recipe) / SWEEP).is_file():
            if over or set_:
                refuse(f"--over: {recipe} is a sweep, with settings of its own; leave it out")
            sweep = Sweep.open(Path(recipe))
            asked = sweep.request
            sweep.request = replace(
                asked, at_once=at_once or asked.at_once, trials=trials or asked.trials
            )
        else:
            request = Request(
                recipe=_tables(find(recipe), set_ or []),
                begun_in=str(Path.cwd()),
                over=over or [],
                metric=metric,
                stop_below=stop_below or [],
                search=search,
                trials=trials,
                prune=prune or ("median" if search else ""),
                seed=seed,
                server=server.rstrip("/"),
                at_once=at_once,
            )
            try:
                sweep = begin(request, out, _refused_by_service)
            except OSError as error:
                refuse_folder("--out", error, out or Path())
        with contextlib.closing(sweep):
            raise typer.Exit(_execute(sweep, as_json=as_json, plain=plain))
    except (RecipeError, RunError) as error:
        refuse(error)


def _tables(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from orchestration.recipe.loading.load import read_recipe
    from orchestration.recipe.problems import RecipeError

    tables, problems = read_recipe(path, overrides)
    if problems:
        raise RecipeError(str(path), problems)
    return tables


def _refused_by_service(request: Request, checked: Sequence[Settings]) -> dict[int, RecipeError]:
    """Return what the service of ``request`` refuses, by the places of the settings."""
    from api.client import WrongInput
    from orchestration.recipe.problems import RecipeError
    from pipeline.problems import Problem

    async def check(client: Client) -> dict[int, RecipeError]:
        refused = {}
        for number, settings in enumerate(checked):
            try:
                await client.check(request.recipe, settings)
            except WrongInput as error:
                problems = [
                    Problem(one["field"], one.get("value"), one["wrong"], one.get("fix") or "")
                    for one in error.errors
                ]
                refused[number] = RecipeError(
                    "sweep", problems or [Problem("recipe", None, str(error))]
                )
        return refused

    return ask(request.server, check)


def _execute(sweep: Sweep, *, as_json: bool, plain: bool) -> int:
    """Execute ``sweep``, show it, print its comparison. Returns the exit code."""
    from orchestration.sweep.local import LocalRuns

    server = sweep.request.server
    screen = safe_console(stderr=as_json)
    shows_lines = plain or as_json or not screen.is_terminal

    async def here() -> Sequence[RunResult]:
        return await _watch(sweep, LocalRuns(sweep), screen, plain=shows_lines)

    async def there(client: Client) -> Sequence[RunResult]:
        from api.cli.results.sweep_service import PATIENCE, ServiceRuns

        client.patience = PATIENCE
        return await _watch(sweep, ServiceRuns(sweep, client), screen, plain=shows_lines)

    results = ask(server, there) if server else asyncio.run(here())
    if as_json:
        print_json({"id": sweep.id, "runs": [asdict(run) for run in sweep.runs]})
    elif results:
        from api.cli.results.compare import print_comparison
        from orchestration.comparison.compare import compare

        screen.print()
        try:
            print_comparison(compare(results, [sweep.request.metric]))
        except ValueError as error:
            command = advised(f"compare {sweep.folder} --metric NAME")
            refuse(f"{error}; `{command}` compares by another")
    if any(not run.is_over for run in sweep.runs):
        complain(f"Go on with: {advised(f'sweep {sweep.folder}')}")
        return INTERRUPTED
    return FAILED if any(run.state == "failed" for run in sweep.runs) else FINISHED


async def _watch(
    sweep: Sweep, executor: Executor, screen: Console, *, plain: bool
) -> Sequence[RunResult]:
    """Execute ``sweep`` while its runs are shown; return the results of those that are over."""
    from api.cli.service.serve import stopped_by_signals
    from orchestration.sweep.execution import SweepExecution

    stop = stopped_by_signals("Stopping the runs cleanly, with checkpoints.")
    shown: dict[str, str] = {}

    def show_line(run: SweepRun) -> None:
        if plain and shown.get(run.name) != run.state:
            shown[run.name] = run.state
            value = "" if run.value is None else f"  {run.value:.4g}"
            screen.print(f"{run.name}{value}  {_state_text(run)}", soft_wrap=True, highlight=False)

    execution = SweepExecution(sweep, executor, show=show_line)
    with _live(execution, screen) if not plain else contextlib.nullcontext():
        await execution.execute(stop)
    return await execution.results()


def _state_text(run: SweepRun) -> str:
    return run.state + (f": {run.reason}" if run.reason else "")


def _live(execution: SweepExecution, screen: Console) -> contextlib.AbstractContextManager[Any]:
    from rich.live import Live

    return Live(
        get_renderable=lambda: Safe(runs_table(execution, screen.height - LINES_BESIDE)),
        console=screen,
        refresh_per_second=REDRAWS_PER_SECOND,
    )


def runs_table(execution: SweepExecution, rows: int) -> Table:
    """Return at most ``rows`` runs of the sweep as they are now: those that run first."""
    from api.terminal.live import STATE_STYLES
    from api.terminal.numbers import number

    sweep = execution.sweep
    shown = sorted(sweep.runs, key=lambda run: (run.state != "running", not run.is_over))
    metric = sweep.request.metric
    grid = table("run", "step", metric, "state", right=("step", metric))
    count = max(len(sweep.runs), sweep.request.trials)
    grid.caption = f"{sum(run.is_over for run in sweep.runs)} of {count} are over"
    for run in shown[: max(1, rows)]:
        progress = execution.progress[run.name]
        value = progress.value if run.value is None else run.value
        step = str(progress.step or "")
        style = STATE_STYLES.get(run.state, "")
        grid.add_row(run.name, step, number(value, ".4g"), _state_text(run), style=style)
    return grid
