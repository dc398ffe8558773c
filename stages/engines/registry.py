"""Engines by their names: the package's own, those of installed packages, and any factory ``module:name``.

    built in     ─▶ made by orchestration.run.engines
    module:name  ─▶ that attribute of that module  ┐
    another name ─▶ an entry point                 ┴─▶ a factory, a function or a class:

    [rollout]  factory(recipe, *, version, weights, **options) -> RolloutEngine
    [train]    factory(recipe, *, ranks, meeting, **options)   -> TrainEngine

``recipe`` is the whole :class:`orchestration.recipe.schema.Recipe`; ``options`` are its table ``rollout.options`` or
``train.options``. ``version`` is what the engine begins as, with the weights in the checkpoint folder ``weights``, or with
those of ``recipe.model`` where that is None. ``ranks`` (:class:`stages.engines.plans.Ranks`) says which of the ranks that
train together this process is; where there are several, they find each other by the file ``meeting``. A factory is called
in a thread, without an event loop. A recipe is checked without torch, so nothing here imports it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, Literal

from stages.user_code import imported

Side = Literal["rollout", "train"]

BUILT_IN: dict[Side, tuple[str, ...]] = {"rollout": ("torch", "vllm", "mock"), "train": ("torch", "mock")}
ENTRY_POINTS: dict[Side, str] = {"rollout": "asyncdock.rollout_engines", "train": "asyncdock.train_engines"}
TOLD: dict[Side, tuple[str, ...]] = {"rollout": ("version", "weights"), "train": ("ranks", "meeting")}


class EngineUnknown(LookupError):
    """Nothing that makes an engine has this name: the message says the field, its value and what to do."""


def engine_names(side: Side) -> list[str]:
    """Every name without a colon that ``rollout.engine`` or ``train.engine`` may have here."""
    return sorted({*BUILT_IN[side], *importlib.metadata.entry_points(group=ENTRY_POINTS[side]).names})


def find_factory(side: Side, name: str) -> Callable[..., Any]:
    """What makes the engine called ``name``, which is not a built-in one. Raises :class:`EngineUnknown`."""
    told = f"{side}.engine = {name!r}"
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS[side])
    if ":" not in name and name not in entries.names:
        raise EngineUnknown(
            f"{told} is not known; name a factory as 'module:factory', or use one of {engine_names(side)}"
        )
    try:
        found = imported(name if ":" in name else f"{entries[name].module}:{entries[name].attr}")
    except ImportError as error:
        raise EngineUnknown(f"{told} {error}") from error
    if not callable(found):
        raise EngineUnknown(f"{told} is a {type(found).__name__}; name a function or a class that makes an engine")
    return found  # type: ignore[no-any-return]
