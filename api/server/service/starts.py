"""Checkpoints of a service's runs: what a run goes on from, and what a fork of it begins with.

POST …/resume ─▶ start_of ─▶ the checkpoint of that version
POST /v1/runs {"run": A} ─▶ fork_of ─▶ A's recipe with its weights ─▶ checked ─▶ begin_fork ─▶ own files, the queue
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.schemas.runs import ForkedRun, RecipeSubmission
from api.server.http.problems import HTTPProblem
from api.server.service.service import Service
from orchestration.checkpoints import checkpoint, recorded
from orchestration.checkpoints.forked import BASE, forked_recipe, take_over
from orchestration.checkpoints.held import held
from orchestration.private_files import write_private
from orchestration.recipe.schema import Recipe
from orchestration.state.lock import RunError
from orchestration.state.paths import RECIPE
from orchestration.state.registry import RunRecord, new_id

Submit = Callable[..., Awaitable[tuple[RunRecord, bool]]]


@dataclass(frozen=True)
class Fork:
    """A new run with the tables ``recipe``, which names models in ``start``.

    ``folder``: that of the run which is forked; the new one is beside it.
    """

    recipe: dict[str, Any]
    start: Path
    folder: Path


def start_of(
    folder: Path, url: str, version: int | None, field: str = "start_version"
) -> checkpoint.Checkpoint | None:
    """Return the checkpoint of ``version`` of the run in ``folder``, copied from ``url`` where only
    that has it; None without one, and for version 0. Raises HTTPProblem, which names ``field``."""
    try:
        if version is None:
            return checkpoint.latest(folder / "checkpoints")
        return recorded.of_version(folder / "checkpoints", url, version)
    except RunError as unknown:
        fix = "give a version of GET /v1/runs/{run}/checkpoints"
        raise HTTPProblem(
            409, str(unknown), kind="no-checkpoint", field=field, value=version, fix=fix
        ) from None
    except checkpoint.CheckpointUnusable as damaged:
        fix = f"go on from an older one, by {field}"
        raise HTTPProblem(409, str(damaged), kind="checkpoint-damaged", fix=fix) from None


@contextlib.asynccontextmanager
async def fork_of(service: Service, body: RecipeSubmission) -> AsyncIterator[Fork | None]:
    """Yield the fork that ``body`` asks for; None where it asks for none. Its run does not remove
    the checkpoint until the block ends. Raises UnknownRun and HTTPProblem."""
    asked = body.root
    if not isinstance(asked, ForkedRun):
        yield None
        return
    record = await service.registry.get(asked.run)
    folder = service.folder(record)
    if asked.version != 0 and record.started and not folder.is_dir():
        detail = f"The checkpoints of run {asked.run!r} are in {folder} on another machine."
        fix = "copy that folder to this service's machine, or give version 0, as that run began"
        raise HTTPProblem(
            409, detail, kind="no-checkpoint", field="version", value=asked.version, fix=fix
        )
    # a check, which asks for no more than reading, copies nothing from elsewhere
    choose = functools.partial(start_of, folder, "", asked.version, "version")
    with contextlib.ExitStack() as holding:
        start = await asyncio.to_thread(holding.enter_context, held(choose))
        path = start.path if start else None
        yield Fork(forked_recipe(record.recipe, path), path or folder / BASE, folder)


async def begin_fork(fork: Fork, recipe: Recipe, submit: Submit) -> tuple[RunRecord, bool]:
    """Put the run of ``fork`` into the queue, with its checked ``recipe`` and files of its own.

    Returns it as ``submit`` does, and leaves no files where that makes no new run.
    """
    folder = fork.folder.with_name(new_id(recipe.name))
    own = await asyncio.to_thread(_own_files, fork, recipe, folder)
    record, is_new = await submit(own, folder=folder)
    if not is_new:
        await asyncio.to_thread(shutil.rmtree, folder)
    return record, is_new


def _own_files(fork: Fork, recipe: Recipe, folder: Path) -> Recipe:
    """Make the ``folder`` of a new run, and return its recipe with the models there."""
    folder.mkdir(parents=True)
    try:
        tables = take_over(json.loads(recipe.to_json()), folder, fork.start)
        own = Recipe.from_json(json.dumps(tables))
        write_private(folder / RECIPE, own.to_json())
    except BaseException as error:
        shutil.rmtree(folder)
        if isinstance(error, FileNotFoundError | shutil.Error):
            detail = f"The checkpoint {fork.start.name} was removed meanwhile."
            fix = "fork the newest one"
            raise HTTPProblem(409, detail, kind="no-checkpoint", field="version", fix=fix) from None
        raise
    return own
