"""Process that checks recipes of requests for :mod:`api.server.recipe_checks`, one at a time, read from standard input.

a line of JSON ──▶ accept ──▶ plan ──▶ answer       {"recipe": …, "plan": …}, or {"problem": …}
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from api.schemas.runs import NamedRecipe, RecipeSubmission, WholeRecipe
from api.server.access.submission_policy import accept, stored_recipe, unknown_recipe
from api.server.problems import problem_of
from api.server.service import Settings
from orchestration import logs
from orchestration.recipe.checks.examples import example_prompts, prompt_sources
from orchestration.recipe.planner import plan
from orchestration.recipe.schema import Recipe
from orchestration.streams import open_outputs

LONGEST_SECONDS = 300  # of one check, after which the process ends; a server that still runs kills it long before


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Check the recipe in the ``submission`` of ``request``, a body as text; or the ``recipe`` of a run in ``folder`` that
    goes on with the ``overrides``. The request also has the server's ``settings``, and whether to return the ``plan`` and
    example prompts too."""
    try:
        settings = Settings.model_validate(request["settings"])
        if "overrides" in request:
            recipe = accept(settings, request["recipe"], request["overrides"], resumed=Path(request["folder"]))
        else:
            submitted = RecipeSubmission.model_validate_json(request["submission"], strict=True).root
            recipe = accepted(settings, submitted)
        if not request["plan"]:
            return {"recipe": recipe.to_json()}
        examples = [asdict(example) for example in example_prompts(recipe)]
        prompts = prompt_sources(recipe)
        return {"recipe": recipe.to_json(), "plan": asdict(plan(recipe)), "prompts": prompts, "examples": examples}
    except Exception as error:
        return {"problem": problem_of(error).details.model_dump()}


def accepted(settings: Settings, submitted: WholeRecipe | NamedRecipe) -> Recipe:
    """Return the recipe that is submitted. Raises RecipeError, and HTTPProblem when no stored recipe has its name."""
    if isinstance(submitted, WholeRecipe):
        recipe = submitted.recipe
    else:
        try:
            recipe = stored_recipe(settings, submitted.recipe_name)
        except LookupError:
            raise unknown_recipe(settings, submitted.recipe_name, 422, "recipe_name") from None
    return accept(settings, recipe, submitted.overrides)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # code that a recipe names may print, which must not mix with answers
    os.nice(5)  # gives way to the service on the same core
    open_outputs()
    logs.configure()
    for request in sys.stdin.buffer:
        signal.alarm(LONGEST_SECONDS)
        text = json.dumps(answer(json.loads(request)))
        signal.alarm(0)
        answers.write(text.encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
