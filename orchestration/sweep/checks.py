"""The check of a whole sweep, before its first run: every recipe as ``asyncdock check`` does it.

tables + settings ──▶ recipe_of ──▶ a Recipe, or its problems ──▶ all problems, each with the settings that have it
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestration.recipe.loading.load import override, parse_recipe, shorten_warmup
from orchestration.recipe.problems import RecipeError, suggest
from orchestration.recipe.schema import Recipe
from orchestration.sweep.record import PRUNERS, SAMPLERS, SWEEP, Request, Sweep
from orchestration.sweep.settings import (
    EXAMPLE,
    MOST_RUNS,
    Range,
    Settings,
    Values,
    grid,
    settings_text,
)
from orchestration.sweep.stopping import parse_stops
from pipeline.compat.extras import install, is_installed
from pipeline.problems import Problem

SEED = "seed"  # changes nothing that files and machine are compared with
MOST_NAMED = 3  # settings beside a problem


def recipe_of(
    tables: Mapping[str, Any], settings: Settings, folder: Path, *, files: bool = True
) -> Recipe:
    """Return the recipe ``tables`` with ``settings``, for a run below ``folder``.

    ``files``: see :func:`orchestration.recipe.loading.load.parse_recipe`. Raises RecipeError.
    """
    data = copy.deepcopy(dict(tables))
    refused = [
        override(data, key, value, "--over", f"{key}={value}") for key, value in settings.items()
    ]
    shorten_warmup(data, settings)
    problems = [problem for problem in refused if problem]
    return parse_recipe(data, "sweep", problems, folder=folder, files=files)


def begin(
    request: Request,
    folder: Path | None,
    refused: Callable[[Request, Sequence[Settings]], Mapping[int, RecipeError]] | None = None,
) -> Sweep:
    """Return the sweep of ``request`` in ``folder``: a new one once all of its recipes are right, or
    the one that is there.

    ``folder`` None is refused, after everything else was judged. ``refused`` returns what the
    service of the request refuses, by the places of the settings. Raises RecipeError with all
    problems, and RunError.
    """
    over = _checked_over(request)
    settings = [] if request.search else grid(over)
    if folder is None or not (folder / SWEEP).exists():
        checked = settings or corners(over)
        _check_all(
            request,
            folder or Path("sweep"),
            checked,
            refused(request, checked) if request.server and refused else {},
        )
    if folder is None:
        missing = Problem("--out", None, "is missing", "give the folder by which the sweep goes on")
        raise RecipeError("sweep", [missing])
    return Sweep.open(folder, request, settings)


def _checked_over(request: Request) -> list[Values | Range]:
    """Return what is swept over. Raises RecipeError with all that is wrong with the options."""
    over: list[Values | Range] = []
    problems: list[Problem] = []
    for option, value, names in (
        ("--search", request.search, SAMPLERS),
        ("--prune", request.prune, PRUNERS),
    ):
        if value and value not in names:
            problems.append(Problem(option, value, "is unknown", suggest(value, names)))
    if bool(request.search) != (0 < request.trials <= MOST_RUNS):
        fix = f"give both, or none, as --search tpe --trials 20; at most {MOST_RUNS:,}"
        problems.append(
            Problem("--trials", request.trials, "is the number of runs of a search", fix)
        )
    if request.has_study and not is_installed("optuna"):
        fix = f"{install('sweep')}, or leave --search and --prune out"
        problems.append(Problem("--search", request.search, "needs Optuna, which is missing", fix))
    if not request.over:
        problems.append(Problem("--over", None, "is missing", EXAMPLE))
    try:
        over = request.parsed_over()
    except RecipeError as error:
        problems += error.problems
    try:
        parse_stops(request)
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise RecipeError("sweep", problems)
    return over


def _check_all(
    request: Request,
    folder: Path,
    settings: Sequence[Settings],
    refused: Mapping[int, RecipeError],
) -> None:
    problems: dict[str, tuple[Problem, list[Settings]]] = {}
    compared: list[Settings] = []  # with files and machine
    for number, one in enumerate(settings):
        others = {key: value for key, value in one.items() if key != SEED}
        files = not request.server and others not in compared
        compared.append(others)
        try:
            recipe_of(request.recipe, one, folder, files=files)
            if number in refused:
                raise refused[number]
        except RecipeError as error:
            for problem in error.problems:
                problems.setdefault(str(problem), (problem, []))[1].append(one)
    if problems:
        raise RecipeError("sweep", [_with_settings(*each, settings) for each in problems.values()])


def _with_settings(
    problem: Problem, having: Sequence[Settings], settings: Sequence[Settings]
) -> Problem:
    """Return ``problem`` with the settings that have it: by one value that they alone have, where
    there is one."""
    alone = [
        {key: value}
        for key, value in having[0].items()
        if [one for one in settings if one[key] == value] == list(having)
    ]
    shown = alone[:1] or having[:MOST_NAMED]
    where = "every run" if len(having) == len(settings) else ", ".join(map(settings_text, shown))
    more = "" if alone or len(having) <= MOST_NAMED else f" and {len(having) - MOST_NAMED} more"
    return Problem(problem.key, problem.value, f"{problem.wrong} [{where}{more}]", problem.fix)


def corners(over: Sequence[Values | Range]) -> list[Settings]:
    """Return settings that have each value, and both ends of each range, at least once."""
    ends = {one.key: one.values if isinstance(one, Values) else (one.low, one.high) for one in over}
    most = max(map(len, ends.values()), default=0)
    return [
        {key: values[min(number, len(values) - 1)] for key, values in ends.items()}
        for number in range(most)
    ]
