"""Imports of a process that calls user code, and the sandbox that it gets on this machine.

Code is named as ``module:object``, a user's own, or by the name that an installed package registers
in an entry point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from orchestration.sandbox.kernel import SandboxRefused
from orchestration.sandbox.sandbox import WAY_OUT, Available, Sandbox, available

log = structlog.get_logger()

PACKAGES = Path(__file__).resolve().parents[2]  # the folder of our packages


def import_path(names: Sequence[str]) -> list[str]:
    """Return the path of imports of a process that calls ``names``, absolute: it may work in
    another folder. The working folder is not part of it where all of them are installed."""
    here = os.getcwd()
    path = [
        os.path.abspath(entry) if not entry or os.path.exists(entry) else entry
        for entry in sys.path
    ]
    calls_user_code = any(":" in name for name in names)
    return [entry for entry in path if calls_user_code or entry != here or entry == str(PACKAGES)]


def as_given(sandbox: Sandbox, found: Available, names: Sequence[str], group: str) -> Sandbox:
    """Return ``sandbox`` by the mechanism that was ``found`` here, in which the code ``names`` can
    be imported. ``group``: of the entry points that register such code."""
    read = (*sandbox.read, *(place for name in names for place in _places(name, group)))
    modules = (*import_path(names), str(PACKAGES))
    return dataclasses.replace(sandbox, read=read, modules=modules, mechanism=found.mechanism)


def found_sandbox(sandbox: Sandbox, names: Sequence[str], group: str) -> Sandbox:
    """Return ``sandbox`` as this machine gives it to the code ``names``, as :func:`as_given`.

    Raises SandboxRefused where it gives none.
    """
    support = available()
    if not support.mechanism:
        raise SandboxRefused(f"{support.shortfall}; {WAY_OUT}")
    if support.shortfall:
        log.warning("code runs in a weaker sandbox", code=names, reason=support.shortfall)
    return as_given(sandbox, support, names, group)


def readable(paths: Sequence[str]) -> tuple[str, ...]:
    """Return ``paths`` of a recipe, absolute."""
    return tuple(os.path.abspath(os.path.expanduser(path)) for path in paths)


def _places(name: str, group: str) -> Iterator[str]:
    """Yield the file or the folders of the module of ``name``, wherever it is installed; none for
    code of ours."""
    module = name.partition(":")[0]
    if ":" not in name:
        entries = importlib.metadata.entry_points(group=group)
        module = entries[name].module if name in entries.names else ""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module.partition(".")[0])
        if spec is not None:
            folders = (
                [*spec.submodule_search_locations]
                if spec.submodule_search_locations
                else [spec.origin or ""]
            )
            yield from (folder for folder in folders if os.path.exists(folder))
