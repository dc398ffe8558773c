"""``asyncdock compare``: runs beside each other.

folder, folder of runs ─▶ read_run ─┐
id of a service ─▶ recipe, metrics ─┴▶ compare ─▶ a table, JSON, --plot FILE, --html FILE
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.table import Table

from api.cli.common.options import JsonOption
from api.cli.common.output import print_json, refuse, table
from api.cli.folder.foreign import refuse_unreadable
from api.cli.service.asking import ServerOption, ask, is_run_folder
from api.client.credentials import DEFAULT_SERVER
from api.terminal.numbers import count, number
from api.terminal.screen import complain, safe_console, write

if TYPE_CHECKING:
    from rich.console import Console

    from api.client import Client
    from orchestration.comparison.compare import Comparison
    from orchestration.comparison.curves import Estimate
    from orchestration.comparison.results import RunResult

Axis = Literal["step", "tokens", "hours"]
AT_ONCE = 8  # runs of a service that are asked for
VALUE_WIDTH = 28  # characters of a value in a table
MOST_NAMED = 3  # runs of a setting


def compare_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, folders with such folders in them, and ids of a service.",
        ),
    ],
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            help="A number of steps, as loss, or of evaluations, as evaluation.reward_mean. "
            "Repeatable. Default: the reward, also the held-out one.",
        ),
    ] = None,
    by: Annotated[str, typer.Option(metavar="step|tokens|hours", help="What curves go over.")] = (
        "step"
    ),
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves: .png, .svg or .pdf.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page that needs nothing else: tables, curves."),
    ] = None,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Compare runs: keys that differ, results with seeds folded, curves over each other."""
    from orchestration.comparison.compare import compare

    if by not in get_args(Axis):
        refuse(f"--by: {by!r} is no axis; use step, tokens or hours")
    axis: Any = by
    try:
        comparison = compare(results_of(runs, server), metrics or [])
    except ValueError as error:
        refuse(error)
    if plot is not None:
        _plot(plot, comparison, axis)
    if html is not None:
        from api.cli.results.comparison_page import comparison_html

        _written(html, lambda: html.write_text(comparison_html(comparison, axis), encoding="utf-8"))
    if as_json:
        from orchestration.comparison.view import as_tables

        print_json(as_tables(comparison))
    else:
        print_comparison(comparison)


def results_of(runs: Sequence[str], server: str) -> list[RunResult]:
    """Return the results of ``runs``, folders and ids of the service at ``server``, each once.

    A failure ends the command.
    """
    from orchestration.comparison.results import read_run
    from orchestration.service.run_folders import RunFolders

    results: dict[str, RunResult] = {}
    for run in dict.fromkeys(runs):
        path = Path(run)
        refuse_unreadable(path)
        if not path.is_dir():
            result = ask(server, lambda client, run=run: result_of(client, run), run)  # type: ignore[misc]
            results[result.folder] = result
            continue
        folders = RunFolders([path]).by_id()
        if not folders and not is_run_folder(run):
            refuse(f"RUN: no run is in {run}; give a folder in which `asyncdock run` wrote")
        for run_id, folder in folders.items():
            try:
                results[str(folder)] = replace(read_run(folder), id=run_id)
            except (OSError, ValueError) as error:
                complain(f"{folder} is left out: {error}")
    if not results:
        refuse("RUN: nothing to compare")
    return [*results.values()]


async def result_of(client: Client, run: str) -> RunResult:
    """Return the result of ``run``, an id of a service. Raises ServiceError."""
    import numpy as np

    from orchestration.comparison.keys import flattened
    from orchestration.comparison.results import RunResult, in_order
    from orchestration.state.labels import Labels

    view, metrics = await asyncio.gather(
        client.run(run), client.metrics(run, every=0, names=("step", "evaluation"))
    )
    steps, evaluations = (
        in_order(
            {
                name: np.array(values, dtype=np.float64)
                for name, values in metrics.series.get(kind, {}).items()
            }
        )
        for kind in ("step", "evaluation")
    )
    return RunResult(
        id=view.id,
        name=view.name,
        state=view.state,
        folder=f"{client.server} {view.id}",
        recipe=flattened(view.recipe),
        steps=steps,
        evaluations=evaluations,
        labels=Labels(tuple(view.tags), view.notes),
    )


# ── tables ──


def print_comparison(comparison: Comparison) -> None:
    """Print the results of all settings, the keys by which they differ, as wide as the terminal,
    and their runs."""
    console = safe_console()
    _print_results(console, comparison)
    console.print()
    for at, setting in enumerate(comparison.settings, start=1):
        ids = [comparison.runs[place].id for place in setting.runs]
        more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
        write(f"{at}  {', '.join(ids[:MOST_NAMED])}{more}")


def _print_results(console: Console, comparison: Comparison) -> None:
    whole = _results(comparison, comparison.metrics, comparison.keys)
    if _fits(console, whole):
        console.print(whole)
        return
    results = [_results(comparison, comparison.metrics)]
    if not _fits(console, results[0]):
        results = [_results(comparison, [metric]) for metric in comparison.metrics]
    for grid in results:
        for column in ("tokens", "hours", "steps"):
            if not _fits(console, grid):
                grid.columns = [each for each in grid.columns if each.header != column]
        console.print(grid)
    settings = [*range(len(comparison.settings))]
    while settings:
        shown = len(settings)
        while shown > 1 and not _fits(console, _keys(comparison, settings[:shown])):
            shown -= 1
        console.print()
        console.print(_keys(comparison, settings[:shown]))
        settings = settings[shown:]


def _results(comparison: Comparison, metrics: Sequence[str], keys: Sequence[str] = ()) -> Table:
    """Return the results by ``metrics``, a row for each setting, with its values of ``keys``."""
    is_single = len(metrics) == 1
    names = [""] if is_single else [f"{metric} " for metric in metrics]
    heads = [f"{name}{which}" for name in names for which in ("end", "best")]
    columns = ["", *keys, "runs", *heads, "steps", "hours", "tokens"]
    right = (*heads, "runs", "steps", "hours", "tokens")
    title = metrics[0] if is_single else None
    grid = table(*columns, right=right, title=title, title_justify="left")
    for at, setting in enumerate(comparison.settings, start=1):
        results = [
            _text(which[metric]) for metric in metrics for which in (setting.end, setting.best)
        ]
        tokens = "–" if setting.tokens is None else count(round(setting.tokens.mean))
        states = {comparison.runs[place].state for place in setting.runs}
        ended_badly = "" if states == {"finished"} else f" {', '.join(sorted(states))}"
        grid.add_row(
            str(at),
            *(_value(setting.keys[key]) for key in keys),
            f"{len(setting.runs)}{ended_badly}",
            *results,
            number(setting.steps and setting.steps.mean, ".4g"),
            number(setting.hours and setting.hours.mean, ".3g"),
            tokens,
        )
    return grid


def _keys(comparison: Comparison, settings: Sequence[int]) -> Table:
    """Return the keys that differ, a row each, with their values in ``settings``."""
    grid = table("key", *(str(at + 1) for at in settings))
    for key in comparison.keys:
        values = [comparison.settings[at].keys[key] for at in settings]
        grid.add_row(key, *map(_value, values))
    return grid


def _fits(console: Console, grid: Table) -> bool:
    from rich.measure import Measurement

    options = console.options.update(width=100_000, max_width=100_000)
    return Measurement.get(console, options, grid).maximum <= console.width


def _text(known: Estimate | None) -> str:
    if known is None:
        return "–"
    half = "" if known.half is None else f" ± {known.half:.2g}"
    return f"{known.mean:.4g}{half}"


def _value(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= VALUE_WIDTH else f"…{text[1 - VALUE_WIDTH :]}"


# ── files ──


def _plot(path: Path, comparison: Comparison, by: Axis) -> None:
    from api.terminal.comparison_plot import write_comparison_plot
    from pipeline.compat.extras import ExtraMissing

    if path.suffix not in (".png", ".svg", ".pdf"):
        refuse(f"--plot: {path} has no form that is drawn; name it .png, .svg or .pdf")
    try:
        _written(path, lambda: write_comparison_plot(path, comparison, by))
    except ExtraMissing as error:
        refuse(f"--plot: {error}")


def _written(path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        refuse(f"{path} cannot be written: {error.strerror or error}")
    complain(f"Wrote {path}")
