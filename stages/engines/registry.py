"""Engines by name: built-in ones, those of installed packages, and any factory ``module:name``.

    built in     ─▶ made by orchestration.workers.engines
    module:name  ─▶ that attribute of that module  ┐
    another name ─▶ an entry point                 ┴─▶ a factory, a function or a class:

    [rollout]  factory(recipe, *, version, weights, **options) -> RolloutEngine
    [train]    factory(recipe, *, ranks, meeting, **options)   -> TrainEngine

``recipe``: the whole :class:`orchestration.recipe.schema.Recipe`. ``options``: its table
``rollout.options`` or ``train.options``. ``version``: the engine's first version, with the weights
of the checkpoint folder ``weights``, or of ``recipe.model`` when that is None. ``ranks``
(:class:`stages.parallel.layout.RankCoordinates`): which rank of the train engine this process is;
several ranks find each other in ``meeting``, a ``torch.distributed.Store``. A factory is called in
a thread, without an event loop. Recipes are checked without torch, so this module does not import
it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, Literal

from pipeline.problems import Fatal, Problem, ProblemError
from stages.user_code import CodeUnusable, imported

Side = Literal["rollout", "train"]

BUILT_IN: dict[Side, tuple[str, ...]] = {
    "rollout": ("torch", "vllm", "mock"),
    "train": ("torch", "mock"),
}
ENTRY_POINTS: dict[Side, str] = {
    "rollout": "asyncdock.rollout_engines",
    "train": "asyncdock.train_engines",
}
PARAMETERS: dict[Side, tuple[str, ...]] = {
    "rollout": ("version", "weights"),
    "train": ("ranks", "meeting"),
}


class EngineUnknown(Fatal, ProblemError, LookupError):
    """No engine has this name."""


def engine_names(side: Side) -> list[str]:
    """Return every name without a colon that ``rollout.engine`` or ``train.engine`` may have."""
    return sorted(
        {*BUILT_IN[side], *importlib.metadata.entry_points(group=ENTRY_POINTS[side]).names}
    )


def find_factory(side: Side, name: str) -> Callable[..., Any]:
    """Return the factory of the engine ``name``, which is not built in.

    Raises :class:`EngineUnknown`.
    """
    key = f"{side}.engine"
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS[side])
    if ":" not in name and name not in entries.names:
        fix = f"name a factory as 'module:factory', or use one of {engine_names(side)}"
        raise EngineUnknown(Problem(key, name, "is not known", fix))
    place = name if ":" in name else f"{entries[name].module}:{entries[name].attr}"
    try:
        factory = imported(place, key, name)
    except CodeUnusable as error:
        raise EngineUnknown(*error.problems) from error
    if not callable(factory):
        fix = "name a function or a class that makes an engine"
        raise EngineUnknown(Problem(key, name, f"is a {type(factory).__name__}", fix))
    return factory  # type: ignore[no-any-return]
