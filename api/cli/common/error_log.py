"""Unexpected errors of a command: one sentence on standard error, the traceback in a file."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from api.cli.common.exit_codes import FAILED
from api.terminal.screen import complain
from orchestration.logs import TRACE_VARIABLE, errors_file, write_traceback
from pipeline.compat.extras import ExtraMissing
from stages.device_names import PLUGIN_FAILED, SOURCE_CANN

if TYPE_CHECKING:
    import structlog


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """Turn any error into a sentence on standard error and exit code 1.

    Its traceback is written to :func:`orchestration.logs.errors_file`; with ``ASYNCDOCK_TRACE`` set
    (``--trace``) the error is raised unchanged.
    """
    if os.environ.get(TRACE_VARIABLE):
        yield
        return
    # Errors in threads and destructors, which cannot be raised.
    threading.excepthook = lambda failed: _keep(failed.exc_value)
    sys.unraisablehook = lambda failed: _keep(failed.exc_value)
    try:
        yield
    except ExtraMissing as error:
        complain(f"error: {error}")
        sys.exit(FAILED)
    except Exception as error:
        path = _keep(error)
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if PLUGIN_FAILED in text:  # at an import of torch
            text = f"{text} Cause: {error.__cause__}; {SOURCE_CANN}"
        complain(f"error: {text}\nThe traceback is in {path}; with --trace it is printed.")
        sys.exit(FAILED)


def say_errors(say: Callable[[str], None], level: int = logging.ERROR) -> None:
    """Call ``say`` with one line for each event that a server in this command logs at ``level`` or
    above. No log lines are printed meanwhile; tracebacks go to
    :func:`orchestration.logs.errors_file`. With ``ASYNCDOCK_TRACE`` set nothing changes."""
    if os.environ.get(TRACE_VARIABLE):
        return
    import structlog

    def process(_: object, __: str, event: structlog.typing.EventDict) -> NoReturn:
        error = event.get("exc_info")
        error = sys.exc_info()[1] if error is True else error
        text = str(event["event"])
        if isinstance(error, BaseException):
            text += f" ({type(error).__name__}: {error}); the traceback is in {_keep(error)}"
        elif reason := event.get("reason") or event.get("error"):
            text += f" ({reason})"
        say(text)
        raise structlog.DropEvent

    structlog.configure(
        processors=[process], wrapper_class=structlog.make_filtering_bound_logger(level)
    )


def _keep(error: BaseException | None) -> str:
    return "" if error is None else write_traceback(error, errors_file())
