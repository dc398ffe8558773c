"""Logs: structlog everywhere; readable on a terminal, one JSON object a line elsewhere, with what is bound on each line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import structlog
import structlog.tracebacks

# Without the values of variables, which structlog's own choice writes down: a password may be among them.
_TRACEBACKS = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)


class Current:
    """A value that is looked up when a line is written: bound once, it shows what holds then."""

    def __init__(self, look_up: Callable[[], object]) -> None:
        self._look_up = look_up

    def __structlog__(self) -> object:  # JSONRenderer asks for this
        return self._look_up()

    def __repr__(self) -> str:
        return repr(self._look_up())


def configure(*, terminal: bool | None = None) -> None:
    """Send logs to standard error. ``terminal`` chooses the form; by default it is looked up."""
    # tensordict sets off a deprecation notice of torch's own in every process; there is nothing a user could do about it.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    shown = sys.stderr.isatty() if terminal is None else terminal
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if shown else [structlog.processors.ExceptionRenderer(_TRACEBACKS)]),
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
            if shown
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
