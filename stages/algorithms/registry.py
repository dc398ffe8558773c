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
    """Return the product's own algorithms, by name."""
    algorithms: dict[str, type[Algorithm]] = {}
    for folder in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not folder.ispkg:
            continue
        package = importlib.import_module(f"{__package__}.{folder.name}")
        for file in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{file.name}")
            definitions = [
                value
                for value in vars(module).values()
                if getattr(value, "__module__", "") == module.__name__
            ]
            classes = [
                value
                for value in definitions
                if isinstance(value, type) and issubclass(value, Algorithm)
            ]
            algorithms |= {
                algorithm.name: algorithm for algorithm in classes if "name" in vars(algorithm)
            }
    return dict(sorted(algorithms.items()))


def build_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm called ``name``; ``options`` are the fields of its class.

    Raises ValueError when the name is not known, or an option is unknown or out of range (all of
    them at once).
    """
    return algorithm_class(name)(**options)


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class behind ``name``. Raises CodeUnusable."""
    key = "algorithm.name"
    candidate = find(
        key, name, built_in(), lambda: importlib.metadata.entry_points(group=ENTRY_POINTS)
    )
    if isinstance(candidate, type) and issubclass(candidate, Algorithm):
        return candidate
    fix = "derive its class from stages.algorithms.Algorithm"
    raise CodeUnusable(Problem(key, name, "is not an algorithm", fix))
