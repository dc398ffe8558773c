"""Logs with structlog: readable lines on a terminal, elsewhere one JSON object a line; tracebacks
go to a file."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import structlog
import structlog.tracebacks
from platformdirs.unix import Unix

from orchestration.escapes import escaped

LIMITED = ("warning", "error", "exception", "critical")
MOST_KINDS = 1000  # of lines that are counted
TRACE_VARIABLE = "ASYNCDOCK_TRACE"  # if set, tracebacks are printed
NO_BARS_VARIABLE = "HF_HUB_DISABLE_PROGRESS_BARS"  # of huggingface_hub, and transformers' own bars
ERRORS = "errors.log"
RUN_LOG = "run.log"  # in the folder logs of a run: what its command could say nowhere else
ERRORS_BYTES = 1 << 20  # a larger file is renamed and a new one begun

# Without the values of local variables, which structlog adds by default: one may be a password.
_TRACEBACKS = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)


class Current:
    """A value that is computed when a log line is written, although it is bound once."""

    def __init__(self, compute: Callable[[], object]) -> None:
        self._compute = compute

    def __structlog__(self) -> object:  # called by JSONRenderer
        return self._compute()

    def __repr__(self) -> str:
        return repr(self._compute())


class Repeats:
    """Limits equal warnings and errors to ``burst`` per ``window`` of seconds, so that clients
    cannot fill the disk. The first one of the next window contains the number of dropped ones."""

    def __init__(
        self, burst: int = 20, window: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.burst = burst
        self.window = window
        self._clock = clock
        # kind → begin of its window, lines in it
        self._kinds: OrderedDict[object, tuple[float, int]] = OrderedDict()

    def count(self, kind: object) -> int:
        """Count a line.

        Returns how many of its kind were dropped in the previous window, or -1 when it is to be
        dropped.
        """
        now = self._clock()
        began, lines = self._kinds.pop(kind, (now, 0))
        dropped = 0
        if now - began >= self.window:
            dropped = max(0, lines - self.burst)
            began = now
            lines = 0
        self._kinds[kind] = began, lines + 1
        while len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)
        return dropped if lines < self.burst else -1

    def __call__(
        self, logger: Any, name: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Apply the limit as a structlog processor."""
        if name in LIMITED:
            if (dropped := self.count(event.get("event"))) < 0:
                raise structlog.DropEvent
            if dropped:
                event["left_out"] = dropped
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """Apply the limit as a filter of the standard library's loggers."""
        if record.levelno >= logging.WARNING:
            if (dropped := self.count(record.msg)) < 0:
                return False
            if dropped:
                record.msg = f"{record.msg} ({dropped} more were left out)"
        return True


def limit_repeats() -> None:
    """Limit equal warnings and errors in this process, also those of asyncio and aiohttp."""
    repeats = Repeats()
    configured = structlog.get_config()["processors"]
    if not any(isinstance(processor, Repeats) for processor in configured):
        structlog.configure(processors=[repeats, *configured])
        for library in ("asyncio", "aiohttp.server"):
            logging.getLogger(library).addFilter(repeats)


def _tracebacks(path: Path) -> structlog.typing.Processor:
    """Return a structlog processor that writes tracebacks to the file ``path`` and names the file
    in the line."""

    def process(
        logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        error = event.pop("exc_info", None)
        if error is True or isinstance(error, tuple):
            error = (sys.exc_info() if error is True else error)[1]
        if isinstance(error, BaseException):
            event.setdefault("error", f"{type(error).__name__}: {error}")
            event["traceback"] = write_traceback(error, path)
        return event

    return process


class _Forward(logging.Handler):
    """A handler that sends a library's log records to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def errors_file() -> Path:
    """Return the file for tracebacks of commands without a folder of their own:
    ``$XDG_STATE_HOME/asyncdock/errors.log``, by default below ``~/.local/state``."""
    return Unix("asyncdock").user_state_path / ERRORS


def write_traceback(error: BaseException, path: Path) -> str:
    """Append the traceback of ``error`` to the file ``path``, or to a temporary file.

    Returns the path that was written.
    """
    written = "".join(traceback.format_exception(error))
    command = " ".join(sys.argv[1:2])  # without its options, which may contain a secret
    entry = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {command}\n{written}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > ERRORS_BYTES:
            os.replace(path, path.with_suffix(".old.log"))
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", errors="replace"
        ) as file:
            file.write(entry)
        return str(path)
    except OSError:  # a full disk, a read-only folder
        with contextlib.suppress(OSError):
            handle, name = tempfile.mkstemp(prefix="asyncdock-error-", suffix=".log")
            with open(handle, "w", errors="replace") as file:
                file.write(entry)
            return name
    return "(nowhere: no file can be written)"


def append_line(path: Path, event: str, **fields: object) -> None:
    """Append a line as workers' logs have them to the file ``path``.

    A disk that refuses it is ignored.
    """
    time_of_day = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    line = json.dumps(
        {"event": event, "level": "warning", "timestamp": time_of_day, **fields}, default=str
    )
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _escape(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {
        key: escaped(value) if isinstance(value, str) else value for key, value in event.items()
    }


def _plain_traceback(out: TextIO, error: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    out.write(escaped(text.getvalue()))


def _hide_progress_bars() -> None:
    """Have transformers show none: one for each checkpoint fills a log, and breaks a run's display.
    A user who has set the variable decides."""
    is_ours = os.environ.setdefault(NO_BARS_VARIABLE, "1") == "1"
    loaded = sys.modules.get("transformers.utils.logging")  # it has read the variable on import
    if is_ours and loaded is not None:
        loaded.disable_progress_bar()


def configure(*, terminal: bool | None = None, errors: Path | None = None) -> None:
    """Send logs to standard error.

    ``terminal``: the form of lines; by default that of standard error. Tracebacks go to the file
    ``errors`` (on a terminal by default :func:`errors_file`), unless ``ASYNCDOCK_TRACE`` is set.
    """
    # tensordict triggers a deprecation warning of torch in every process; users cannot avoid it.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    _hide_progress_bars()
    logging.getLogger("asyncio").handlers = [_Forward()]
    logging.getLogger("asyncio").propagate = False
    readable = sys.stderr.isatty() if terminal is None else terminal
    errors = (
        None if os.environ.get(TRACE_VARIABLE) else errors or (errors_file() if readable else None)
    )
    last: list[structlog.typing.Processor]
    if readable:
        last = [_escape, structlog.dev.ConsoleRenderer(exception_formatter=_plain_traceback)]
    else:
        last = [
            structlog.processors.ExceptionRenderer(_TRACEBACKS),
            structlog.processors.JSONRenderer(),
        ]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([_tracebacks(errors)] if errors else []),
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
