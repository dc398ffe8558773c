"""The mock rollout engine, with a log of which responses it begins or continues, and after how many
tokens.

rollout.engine = "benchmarks.robustness.begun_engine:engine"   rollout.options = { log = "/path/of/a/file" }
a line: seconds since 1970, group, place, tokens that the response had
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from orchestration.recipe.schema import Recipe
from orchestration.workers.engines import rollout_engine
from stages.engines.protocols import Completion, GroupRequest


def engine(
    recipe: Recipe, *, version: int, weights: Path | None, log: str, time_scale: float = 0.1
) -> Any:
    mock = {"engine": "mock", "mock": {"time_scale": time_scale}, "options": {}}
    own = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=mock)})
    made = rollout_engine(own, version=version, weights=weights)
    generate = made.generate

    def logged(requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        lines = [
            f"{time.time():.3f} {request.group} {place} "
            f"{len(request.begun[place].token_ids) if place in request.begun else 0}\n"
            for request in requests
            for place in request.places
        ]
        with open(log, "a") as file:  # one write, so that lines of several processes do not mix
            file.write("".join(lines))
        return generate(requests)

    made.generate = logged  # type: ignore[method-assign]
    return made
