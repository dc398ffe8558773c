"""Unexpected errors of a command: one sentence on standard error, the traceback in a file."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from api.cli.common.exit_codes import FAILED
from api.terminal.screen import complain
from orchestration.logs import TRACE_VARIABLE, errors_file, write_traceback
from pipeline.compat.extras import ExtraMissing
from stages.device_names import PLUGIN_FAILED, SOURCE_CANN


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


def _keep(error: BaseException | None) -> str:
    return "" if error is None else write_traceback(error, errors_file())
