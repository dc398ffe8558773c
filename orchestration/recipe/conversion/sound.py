"""What the checks of a recipe say of a converted one: values that they refuse become remarks, and
sizes that follow from others are set.

No file is read, and nothing is imported that the settings name.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from orchestration.recipe.conversion.conversion import Conversion
from orchestration.recipe.field_problems import valid_part
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import arena_bytes
from pipeline.problems import Problem

ROUNDS = 10  # what is left out may have hidden another problem
STAND_INS = {"reward.functions": [{"name": "exact_number"}]}  # for code that the settings name
NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
OF_ENVIRONMENTS = "environment.max_turns"


def make_sound(done: Conversion) -> None:
    """Take out of ``done`` what a recipe would refuse, set the sizes that it would ask for, and
    remark what it lacks."""
    if "name" in done.recipe:
        done.recipe["name"] = NO_NAME.sub("-", str(done.recipe["name"])).strip("-._") or "run"
    if OF_ENVIRONMENTS in done.recipe and "environment.use" not in done.recipe:
        done.refuse(OF_ENVIRONMENTS, "has no effect without environment.use, which names one")
    for _ in range(ROUNDS):
        _fit(done)
        problems = _problems(done)
        refused = [problem for problem in problems if problem.key in done.recipe]
        for problem in refused:
            done.refuse(problem.key, str(problem))
        if not refused:
            break
    for problem in problems:
        done.remarks[f"({problem.key})"] = "; ".join(filter(None, (problem.wrong, problem.fix)))


def _fit(done: Conversion) -> None:
    """Set the sizes that follow from others, unless the settings had them."""
    recipe = _partial({"train.steps": 10**6, **done.recipe})
    longest = (recipe.prompts.max_prompt_tokens or 0) + recipe.longest_response
    if recipe.train.token_budget < longest and "train.token_budget" not in done.recipe:
        done.recipe["train.token_budget"] = longest
    needed = arena_bytes(recipe)
    if recipe.pipeline.arena < needed:
        done.recipe["pipeline.arena"] = f"{-(-needed // 2**20)}MiB"


def _partial(keys: dict[str, Any]) -> Recipe:
    data = _tables(keys)
    try:
        return Recipe.model_validate(data, strict=True)
    except ValidationError as error:
        return valid_part(data, error)[0]


def _problems(done: Conversion) -> list[Problem]:
    stand_ins = {key: value for key, value in STAND_INS.items() if key in done.recipe}
    keys = {key: value for key, value in done.recipe.items() if key != "environment.use"}
    try:
        parse_recipe(_tables({"name": "converted", **keys, **stand_ins}), files=False)
    except RecipeError as error:
        return [*error.problems]
    return []


def _tables(keys: dict[str, Any]) -> dict[str, Any]:
    return Conversion(keys).tables()
