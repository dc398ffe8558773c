"""Code of a user, named as ``module:attribute``: imports it, and reports where its errors come
from."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import operator
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from asyncdock_command import PACKAGES, way_out
from pipeline.problems import Problem, ProblemError


class CodeUnusable(ProblemError, ValueError):
    """There is no code of this name, or it cannot be imported."""


def find(
    key: str,
    name: str,
    built_in: Mapping[str, str],
    installed: Callable[[], importlib.metadata.EntryPoints],
    form: str = "module:Class",
) -> Any:
    """Return the object that the recipe's ``key`` calls ``name``: one of ``built_in``, by name the
    ``module:attribute`` that is imported, an ``installed`` entry point, or ``module:attribute``.
    Raises CodeUnusable."""
    if name in built_in:
        return pkgutil.resolve_name(built_in[name])
    place = name
    if ":" not in name:
        entries = installed()
        if name not in entries.names:
            names = sorted({*built_in, *entries.names})
            close = difflib.get_close_matches(name, names, n=1)
            guess = f"did you mean {close[0]!r}? Or " if close else ""
            fix = f"{guess}use {form!r} or one of {names}"
            raise CodeUnusable(Problem(key, name, "is not known", fix))
        place = f"{entries[name].module}:{entries[name].attr}"
    return imported(place, key, name)


def imported(place: str, key: str, name: str) -> Any:
    """Return the attribute at ``place``, ``module:attribute``, which the recipe's ``key`` calls
    ``name``.

    Raises CodeUnusable with the reason and the line.
    """
    module, _, attribute = place.partition(":")
    try:
        namespace = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        fix = "put its directory on PYTHONPATH, or correct the name"
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        # it was found, and failed
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            fix = f"correct {module}, or install what it needs"
        reason = f"cannot be imported: {_shown(error)}"
        raise CodeUnusable(Problem(key, name, reason, _hidden(error) or fix)) from error
    try:
        return operator.attrgetter(attribute)(namespace)
    except AttributeError as error:
        names = [known for known in vars(namespace) if not known.startswith("_")]
        close = difflib.get_close_matches(attribute, names, n=1)
        fix = f"did you mean {f'{module}:{close[0]}'!r}?" if close else f"use one of {names[:20]}"
        reason = f"cannot be imported: {module} has no attribute {attribute!r}"
        raise CodeUnusable(Problem(key, name, reason, _hidden(error) or fix)) from None


def _hidden(error: BaseException) -> str:
    """Return the way out, when ``error`` shows that a module of the user's was meant where Python
    finds one of PACKAGES."""
    module = None
    if isinstance(error, ImportError):
        module = error.name
    elif isinstance(error, AttributeError):
        module = getattr(error.obj, "__name__", None)
    name = str(module).partition(".")[0]
    if name not in PACKAGES:
        return ""
    ours = Path(__file__).resolve().parents[1] / name
    for folder in sys.path:
        for place in (Path(folder).resolve() / name, Path(folder).resolve() / f"{name}.py"):
            if place.exists() and place != ours:
                return f"{place} is hidden by asyncdock's: {way_out(name, str(place))}"
    return ""


def _shown(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({_named(str(error.filename), error.lineno)})"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame
        for frame in frames
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    return f"{error!r}" + (
        f" ({_named(user_frames[-1].filename, user_frames[-1].lineno)})" if user_frames else ""
    )


def shown(value: Any) -> str:
    """Return ``value`` in an error message: a tensor or an array by its type and shape, anything
    else by its beginning."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = str(value.dtype).removeprefix("torch.")
        return (f"a {type(value).__name__.lower()} of {kind} {[*map(str, value.shape)]}").replace(
            "'", ""
        )
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {shown(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple) and value and hasattr(value[0], "dtype"):
        return f"a {type(value).__name__} of {len(value)}, the first {shown(value[0])}"
    return f"{value!r:.200}"


def place_in(frame: FrameType | None, function: Callable[..., Any]) -> str:
    """Return the file and line at which ``frame``, of a call of ``function`` that has not ended, is
    in the file of ``function``."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    frames = traceback.extract_stack(frame) if frame is not None else []
    lines = [
        each.lineno for each in frames if code is not None and each.filename == code.co_filename
    ]
    return (
        _named(code.co_filename, lines[-1] if lines else code.co_firstlineno)
        if code is not None
        else "unknown place"
    )


def place_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the file and line at which ``error`` left the file of ``function``; the line where
    ``function`` begins when the error was raised before it, as with wrong arguments. Then the way
    out, where a module of ours hides one that was meant."""
    hidden = _hidden(error)
    place = _line_of(error, function)
    return f"{place}; {hidden}" if hidden else place


def _line_of(error: BaseException, function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    if code is not None:
        lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
        return _named(code.co_filename, lines[-1] if lines else code.co_firstlineno)
    return _named(frames[-1].filename, frames[-1].lineno) if frames else "unknown place"


def _named(file: str, line: int | None) -> str:
    return f"{os.path.abspath(file)}, line {line}"
