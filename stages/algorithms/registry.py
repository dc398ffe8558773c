"""Algorithms by their names: built in, ``module:Class``, or an entry point of the group
``asyncdock.algorithms``.

The product's own are the classes with a ``name`` in the modules of the folders beside this file: a
new one is a class there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.problems import Problem
from stages.algorithms.interface import Algorithm
from stages.user_code import CodeUnusable, find

ENTRY_POINTS = "asyncdock.algorithms"


@cache
def built_in() -> Mapping[str, type[Algorithm]]:
    """The product's own algorithms, by name."""
    found: dict[str, type[Algorithm]] = {}
    for folder in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not folder.ispkg:
            continue
        package = importlib.import_module(f"{__package__}.{folder.name}")
        for file in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{file.name}")
            own = [
                value
                for value in vars(module).values()
                if getattr(value, "__module__", "") == module.__name__
            ]
            named = [
                value for value in own if isinstance(value, type) and issubclass(value, Algorithm)
            ]
            found |= {algorithm.name: algorithm for algorithm in named if "name" in vars(algorithm)}
    return dict(sorted(found.items()))


def build_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm called ``name``; ``options`` are the fields of its class.

    Raises ValueError when the name is not known, or an option is unknown or out of range (all of
    them at once).
    """
    return algorithm_class(name)(**options)


def algorithm_class(name: str) -> type[Algorithm]:
    """The class behind ``name``. Raises CodeUnusable."""
    key = "algorithm.name"
    found = find(key, name, built_in(), lambda: importlib.metadata.entry_points(group=ENTRY_POINTS))
    if isinstance(found, type) and issubclass(found, Algorithm):
        return found
    fix = "derive its class from stages.algorithms.Algorithm"
    raise CodeUnusable(Problem(key, name, "is not an algorithm", fix))
