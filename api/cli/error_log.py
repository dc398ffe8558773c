"""Unexpected errors of a command: a sentence for the person, the traceback in a file."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from api.cli.exit_codes import FAILED
from api.terminal.screen import complain
from orchestration.logs import TRACE_VARIABLE, errors_file, write_traceback


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """Turn any error into a sentence on standard error and exit code 1; its traceback goes to
    :func:`orchestration.logs.errors_file`. With ``ASYNCDOCK_TRACE`` set (``--trace``) the error passes as it is."""
    if os.environ.get(TRACE_VARIABLE):
        yield
        return
    # Errors that Python could only print, of threads and of destructors.
    threading.excepthook = lambda failed: _keep(failed.exc_value)
    sys.unraisablehook = lambda failed: _keep(failed.exc_value)
    try:
        yield
    except Exception as error:
        path = _keep(error)
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        shown = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        complain(f"error: {shown}\nThe traceback is in {path}; with --trace it is printed.")
        sys.exit(FAILED)


def _keep(error: BaseException | None) -> str:
    return "" if error is None else write_traceback(error, errors_file())
