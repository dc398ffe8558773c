"""Routes about recipes: the stored ones, their JSON Schema, and the check of one."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import structlog
from aiohttp import web

from api.schemas.runs import (
    CheckedRecipe,
    RecipePath,
    RecipeSubmission,
    RecipeSummary,
    RecipesView,
    Schema,
    StoredRecipe,
)
from api.server.access.submission_policy import stored_recipe, stored_recipes, unknown_recipe
from api.server.http.problems import HTTPProblem
from api.server.service.operations import operation, while_wanted
from api.server.service.service import PRINCIPAL, Service
from api.server.service.starts import Fork, fork_of
from orchestration.processes.confined import Lost
from orchestration.recipe.schema import Recipe

log = structlog.get_logger()

NAMED = "/v1/recipes/{name:(?!check$|schema$)[^/]+}"


@operation("GET", "/v1/recipes", scope="read", summary="The stored recipes", tag="recipes")
async def list_recipes(service: Service) -> RecipesView:
    def read() -> list[RecipeSummary]:
        recipes = (
            (name, stored_recipe(service.settings, name))
            for name in stored_recipes(service.settings)
        )
        return [
            RecipeSummary(name=name, description=str(data.get("description", "")))
            for name, data in recipes
        ]

    return RecipesView(recipes=await asyncio.to_thread(read))


@operation(
    "GET", "/v1/recipes/schema", scope="read", summary="The JSON Schema of a recipe", tag="recipes"
)
async def recipe_schema(service: Service) -> Schema:
    """What a schema cannot say (how keys must fit together) POST /v1/recipes/check does."""
    return Schema(await asyncio.to_thread(_schema))


@functools.cache
def _schema() -> dict[str, Any]:
    return Recipe.model_json_schema()


@operation("GET", NAMED, scope="read", summary="A stored recipe", tag="recipes", errors=(404,))
async def get_recipe(service: Service, path: RecipePath) -> StoredRecipe:
    try:
        data = await asyncio.to_thread(stored_recipe, service.settings, path.name)
    except LookupError:
        raise unknown_recipe(service.settings, path.name, 404, "path.name") from None
    return StoredRecipe(name=path.name, description=str(data.get("description", "")), recipe=data)


@operation(
    "POST",
    "/v1/recipes/check",
    scope="read",
    summary="Whether a recipe is sound",
    tag="recipes",
    errors=(404,),
)
async def check_recipe(
    service: Service, request: web.Request, body: RecipeSubmission, raw: bytes
) -> CheckedRecipe:
    """Answers with every problem of the recipe (422), or with what follows from it.

    Nothing is started.
    """
    async with fork_of(service, body) as fork:
        answer = await checked(service, request, **question(raw, fork), plan=True)
    return CheckedRecipe(**answer | {"recipe": json.loads(answer["recipe"])})


def question(raw: bytes, fork: Fork | None) -> dict[str, Any]:
    """Return what is asked about the body ``raw``, which forks a run where ``fork`` is not None."""
    asked = {"submission": raw.decode()}
    return asked | {"recipe": fork.recipe, "start": str(fork.start)} if fork else asked


async def checked(
    service: Service, request: web.Request, *, plan: bool, **given: Any
) -> dict[str, Any]:
    """Return a checked recipe: that of a body, by its :func:`question`, or the ``recipe`` of a run
    that goes on with the ``overrides``.

    The result has it as ``recipe``, with all defaults, and if ``plan`` is true its ``plan``,
    ``prompts`` and ``examples``, all as JSON. Raises an HTTPProblem with every error of the recipe.
    """
    return await asked_apart(service, request, {"plan": plan, **given})


async def asked_apart(
    service: Service, request: web.Request, question: dict[str, Any]
) -> dict[str, Any]:
    """Return the answer of :mod:`api.server.service.check_worker` to ``question``, as long as the client is
    there. Raises an HTTPProblem."""
    question = {"settings": service.settings.model_dump(mode="json"), **question}
    try:
        answer = await while_wanted(request, service.checks.ask(question, request[PRINCIPAL].id))
    except Lost as error:
        log.error("the process of a check was lost", reason=str(error))
        detail = "The recipe could not be checked: the process that does it ended."
        retry = {"Retry-After": "5"}
        raise HTTPProblem(503, detail, kind="check-lost", fix="try again", headers=retry) from None
    if "problem" in answer:
        raise HTTPProblem.from_details(answer["problem"])
    return answer
