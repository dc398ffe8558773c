"""Process that checks recipes of requests for :mod:`api.server.recipe_checks`, one at a time, read from standard input.

request, submission ──▶ accept ──▶ plan ──▶ answer       {"recipe": …, "plan": …}, or {"problem": …}
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from api.schemas.runs import RecipeSubmission
from api.server.access.submission_policy import accept, stored_recipe, unknown_recipe
from api.server.problems import problem_of
from api.server.recipe_checks import SIZE_BYTES
from api.server.service import Settings
from orchestration import logs
from orchestration.recipe.planner import plan
from orchestration.recipe.schema import Recipe

LONGEST_SECONDS = 300  # of one check, after which the process ends; a server that still runs kills it long before


def answer(request: dict[str, Any], submission: bytes) -> dict[str, Any]:
    """Check the recipe in ``submission``, a request's body. ``request`` has the server's ``settings``, and whether to return
    the ``plan`` too."""
    try:
        submitted = RecipeSubmission.model_validate_json(submission, strict=True)
        recipe = accepted(Settings.model_validate(request["settings"]), **submitted.model_dump(exclude_unset=True))
        return {"recipe": recipe.to_json(), "plan": asdict(plan(recipe)) if request["plan"] else None}
    except Exception as error:
        return {"problem": problem_of(error).details.model_dump()}


def accepted(
    settings: Settings,
    *,
    recipe: dict[str, Any] | None = None,
    recipe_name: str = "",
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Recipe:
    """Return the recipe that is submitted. Raises RecipeError, and HTTPProblem when no stored recipe has its name."""
    if recipe is None:
        try:
            recipe = stored_recipe(settings, recipe_name)
        except LookupError:
            raise unknown_recipe(settings, recipe_name, 422, "recipe_name") from None
    return accept(settings, recipe, overrides)


def _read() -> bytes:
    """Read one message; empty at the end of the input."""
    return sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(SIZE_BYTES), "big"))


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # code that a recipe names may print, which must not mix with answers
    os.nice(5)  # gives way to the service on the same core
    logs.configure()
    while request := _read():
        submission = _read()
        signal.alarm(LONGEST_SECONDS)
        text = json.dumps(answer(json.loads(request), submission)).encode()
        signal.alarm(0)
        answers.write(len(text).to_bytes(SIZE_BYTES, "big") + text)
        answers.flush()


if __name__ == "__main__":
    main()
