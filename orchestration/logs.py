"""Logs: structlog everywhere; readable on a terminal, one JSON object a line elsewhere, with what is bound on each line."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(*, terminal: bool | None = None) -> None:
    """Send logs to standard error. ``terminal`` chooses the form; by default it is looked up."""
    shown = sys.stderr.isatty() if terminal is None else terminal
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if shown else [structlog.processors.dict_tracebacks]),
            structlog.dev.ConsoleRenderer() if shown else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
