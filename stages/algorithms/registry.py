"""Algorithms by their names: built in, ``module:Class``, or an entry point of the group ``asyncdock.algorithms``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from stages.algorithms.grpo import GRPO
from stages.algorithms.interface import Algorithm
from stages.user_code import find

ENTRY_POINTS = "asyncdock.algorithms"
BUILT_IN: dict[str, type[Algorithm]] = {"grpo": GRPO}


def build_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm called ``name``; ``options`` are the fields of its class.

    Raises ValueError when the name is not known, or an option is unknown or out of range (all of them at once).
    """
    return algorithm_class(name)(**options)


def algorithm_class(name: str) -> type[Algorithm]:
    """The class behind ``name``. Raises ValueError with the reason and a fix."""
    found = find("algorithm:", name, BUILT_IN, lambda: importlib.metadata.entry_points(group=ENTRY_POINTS))
    if isinstance(found, type) and issubclass(found, Algorithm):
        return found
    if hasattr(found, "advantages"):
        fix = "write `credit` in place of `advantages`, and `scores` and `loss_reads` in place of `needs_reference`"
        raise ValueError(f"algorithm: {name!r} has the interface of an earlier version; {fix} (docs/flow.md)")
    raise ValueError(f"algorithm: {name!r} is not an algorithm; derive its class from stages.algorithms.Algorithm")
