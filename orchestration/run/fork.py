"""A new run in a folder of its own, which begins with the weights of a checkpoint of another one.

RUN/recipe.json, checkpoints/step-…/ ─▶ forked ─▶ the new recipe, checked ─▶ create ─▶ OUT/recipe.json, base/
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestration.checkpoints import checkpoint, recorded
from orchestration.checkpoints.forked import BASE, forked_recipe, take_over
from orchestration.checkpoints.held import held
from orchestration.private_files import write_private
from orchestration.recipe.loading.load import (
    override,
    parse_recipe,
    recorded_recipe,
    shorten_warmup,
)
from orchestration.recipe.schema import Recipe
from orchestration.run.folder import RunFolder
from orchestration.state.lock import RunError
from orchestration.state.paths import RECIPE, store_url


@dataclass(frozen=True)
class Fork:
    """A new run of ``recipe``, which names models in ``start``: a checkpoint, or the files that the
    other run began with."""

    recipe: Recipe
    start: Path

    def create(self, out: Path) -> RunFolder:
        """Make the new run's folder ``out``, with files of its own. Raises RunError and OSError."""
        folder = RunFolder.create(self.recipe, out)
        try:
            tables = take_over(json.loads(folder.recipe.to_json()), folder.path, self.start)
            folder.recipe = Recipe.from_json(json.dumps(tables))
            write_private(folder.path / RECIPE, folder.recipe.to_json())
        except BaseException as error:
            folder.close()
            shutil.rmtree(out)
            if isinstance(error, FileNotFoundError | shutil.Error):
                raise RunError(
                    f"run: {self.start} was removed meanwhile; fork the newest checkpoint"
                ) from None
            raise
        return folder


@contextlib.contextmanager
def forked(
    run: Path, version: int | None, overrides: Mapping[str, Any], room: Path
) -> Iterator[Fork]:
    """Yield the fork of the run in the folder ``run``, live or ended, with ``overrides`` of its
    recipe by dotted key. The run does not remove the checkpoint until the block ends.

    ``version``: of its checkpoint, 0: as it began itself; None: the newest. ``room``: where the new
    run's folder will lie. Raises RunError and RecipeError.
    """
    run = run.resolve()
    recipe = recorded_recipe(run / RECIPE)
    with _held_start(run, store_url(recipe, run), version) as start:
        tables = forked_recipe(json.loads(recipe.to_json()), start)
        refused = [
            override(tables, key, value, "--set", f"{key}={value}")
            for key, value in overrides.items()
        ]
        shorten_warmup(tables, overrides.keys())
        problems = [problem for problem in refused if problem]
        yield Fork(parse_recipe(tables, "fork", problems, folder=room), start or run / BASE)


@contextlib.contextmanager
def _held_start(run: Path, url: str, version: int | None) -> Iterator[Path | None]:
    folder = run / "checkpoints"

    def choose() -> checkpoint.Checkpoint | None:
        if version is None:
            return checkpoint.newest(folder, url)
        return recorded.of_version(folder, url, version)

    with contextlib.ExitStack() as stack:
        try:
            start = stack.enter_context(held(choose))
            if start is not None:
                start.verify()
        except checkpoint.CheckpointUnusable as damaged:
            raise RunError(f"{damaged}; or fork an older one, as {run}@STEP") from None
        if start is None and version is None:
            raise RunError(
                f"run: {run} has no checkpoint yet; wait for one (checkpoint.every), ask for one "
                f"with `asyncdock runs checkpoint {run}`, or fork {run}@0, the run as it began "
                f"itself"
            )
        yield start.path if start else None
