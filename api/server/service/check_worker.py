"""Process that checks recipes, and simulates runs, for :mod:`api.server.service.recipe_checks`, one at a
time.

a line of JSON on standard input ──▶ accept ──▶ plan ──▶ answer       {"recipe": …, "plan": …}, or {"problem": …}
                                 └─▶ what-if ──▶ {"now": …, "changed": …}
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from api.schemas.runs import ForecastView, ForkedRun, NamedRecipe, RecipeSubmission, TomlRecipe
from api.server.access.settings import Settings
from api.server.access.submission_policy import accept, stored_recipe, unknown_recipe
from api.server.http.problems import HTTPProblem, problem_of
from orchestration import logs
from orchestration.bounds import NotToml, read_toml
from orchestration.processes.confined import answer_questions
from orchestration.recipe.checks.examples import example_prompts, prompt_sources
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import plan
from orchestration.streams import open_outputs
from pipeline.problems import Problem

# of one check, after which the process ends; a server that still runs kills it long before
LONGEST_SECONDS = 300
MEMORY_BYTES = 2 << 30  # that one check may take
TOO_LARGE = {
    "problem": HTTPProblem(
        422,
        f"This needs more than {MEMORY_BYTES >> 20} MiB of memory.",
        kind="too-large",
        field="recipe",
        fix="give a smaller recipe, and templates and prompts that need less",
    ).details.model_dump()
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Check the recipe in the ``submission`` of ``request``, a body as text; or the ``recipe`` of a
    run in ``folder`` that goes on with the ``overrides``. Of a submission that forks a run,
    ``recipe`` has the tables with the weights of ``start``. The request also has the server's
    ``settings``, and whether to return the ``plan`` and example prompts too. With ``what_if``, the
    folder of a run, simulate that run as it is and with the ``overrides``."""
    try:
        if "what_if" in request:
            return _what_if(Path(request["what_if"]), request["overrides"])
        settings = Settings.model_validate(request["settings"])
        if "overrides" in request:
            recipe = accept(
                settings, request["recipe"], request["overrides"], resumed=Path(request["folder"])
            )
        else:
            recipe = accepted(settings, request)
        if not request["plan"]:
            return {"recipe": recipe.to_json()}
        examples = [asdict(example) for example in example_prompts(recipe)]
        prompts = prompt_sources(recipe)
        return {
            "recipe": recipe.to_json(),
            "plan": asdict(plan(recipe)),
            "prompts": prompts,
            "examples": examples,
        }
    except MemoryError:
        return TOO_LARGE
    except Exception as error:
        return {"problem": problem_of(error).details.model_dump()}


def _what_if(folder: Path, overrides: list[str]) -> dict[str, Any]:
    from orchestration.simulation.recorded import NotMeasured
    from orchestration.simulation.search import what_if

    try:
        now, changed = what_if(folder, overrides)
    except NotMeasured as error:
        fix = "ask again after some optimizer steps"
        [problem] = error.problems
        detail = f"{problem.wrong}; {problem.fix}"
        raise HTTPProblem(409, detail, kind="not-measured", fix=fix) from None
    views = {
        "now": ForecastView.model_validate(now),
        "changed": ForecastView.model_validate(changed),
    }
    return {name: view.model_dump(mode="json") for name, view in views.items()}


def accepted(settings: Settings, request: Mapping[str, Any]) -> Recipe:
    """Return the recipe that is submitted.

    Raises RecipeError, and HTTPProblem when no stored recipe has its name.
    """
    submitted = RecipeSubmission.model_validate_json(request["submission"], strict=True).root
    start = None
    match submitted:
        case ForkedRun():
            tables = request["recipe"]
            start = Path(request["start"])
        case TomlRecipe():
            try:
                tables = read_toml(submitted.toml)
            except NotToml as error:
                problem = Problem("toml", None, f"is not TOML: {error}", "mend that place")
                raise RecipeError("toml", [problem]) from None
        case NamedRecipe(recipe_name=name):
            try:
                tables = stored_recipe(settings, name)
            except LookupError:
                raise unknown_recipe(settings, name, 422, "recipe_name") from None
        case _:
            tables = submitted.recipe
    return accept(settings, tables, submitted.overrides, start=start)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # code that a recipe names may print, which must not mix with answers
    open_outputs()
    logs.configure()
    limits: dict[str, Any] = {
        "memory": MEMORY_BYTES,
        "seconds": LONGEST_SECONDS,
        "too_large": TOO_LARGE,
    }
    answer_questions(answer, sys.stdin.buffer, answers, **limits)


if __name__ == "__main__":
    main()
