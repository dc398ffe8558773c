"""Recipes: what there is to run, what a recipe may say, and whether one is sound."""

from __future__ import annotations

import asyncio
import json

from api.admittance import accept, stored_recipe, stored_recipes
from api.operations import operation
from api.problems import Problem
from api.schemas import (
    CheckedRecipe,
    RecipePath,
    RecipeSubmission,
    RecipeSummary,
    RecipesView,
    Schema,
    StoredRecipe,
    WholeRecipe,
)
from api.service import Service, Settings
from orchestration.planner import plan
from orchestration.recipe import Recipe, suggest

NAMED = "/v1/recipes/{name:(?!check$|schema$)[^/]+}"


@operation("GET", "/v1/recipes", scope="read", summary="The stored recipes", tag="recipes")
async def list_recipes(service: Service) -> RecipesView:
    def read() -> list[RecipeSummary]:
        found = ((name, stored_recipe(service.settings, name)) for name in stored_recipes(service.settings))
        return [RecipeSummary(name=name, description=str(data.get("description", ""))) for name, data in found]

    return RecipesView(recipes=await asyncio.to_thread(read))


@operation("GET", "/v1/recipes/schema", scope="read", summary="The JSON Schema of a recipe", tag="recipes")
async def recipe_schema(service: Service) -> Schema:
    """What a schema cannot say (how keys must fit together) POST /v1/recipes/check does."""
    return Schema(Recipe.model_json_schema())


@operation("GET", NAMED, scope="read", summary="A stored recipe", tag="recipes", errors=(404,))
async def get_recipe(service: Service, path: RecipePath) -> StoredRecipe:
    try:
        data = await asyncio.to_thread(stored_recipe, service.settings, path.name)
    except LookupError:
        raise _unknown(service.settings, path.name, 404, "path.name") from None
    return StoredRecipe(name=path.name, description=str(data.get("description", "")), recipe=data)


@operation("POST", "/v1/recipes/check", scope="read", summary="Whether a recipe is sound", tag="recipes")
async def check_recipe(service: Service, body: RecipeSubmission) -> CheckedRecipe:
    """Tells all that is wrong with it (422), or what follows from it. Nothing is started."""

    def check() -> CheckedRecipe:
        recipe = accepted(service.settings, body)
        return CheckedRecipe(recipe=json.loads(recipe.to_json()), plan=plan(recipe))

    return await asyncio.to_thread(check)


def accepted(settings: Settings, body: RecipeSubmission) -> Recipe:
    """The recipe that is submitted. Raises RecipeError, and a Problem when no stored one is called so."""
    given = body.root
    if isinstance(given, WholeRecipe):
        return accept(settings, given.recipe, given.overrides)
    try:
        data = stored_recipe(settings, given.recipe_name)
    except LookupError:
        raise _unknown(settings, given.recipe_name, 422, "recipe_name") from None
    return accept(settings, data, given.overrides)


def _unknown(settings: Settings, name: str, status: int, field: str) -> Problem:
    fix = suggest(name, list(stored_recipes(settings)))
    return Problem(status, "No stored recipe is called that.", kind="unknown-recipe", field=field, value=name, fix=fix)
