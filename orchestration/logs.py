"""Logs: structlog everywhere; readable on a terminal, one JSON object a line elsewhere, with what is bound on each line."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TextIO

import structlog
import structlog.tracebacks

from orchestration.escapes import escaped

LIMITED = ("warning", "error", "exception", "critical")
MOST_KINDS = 1000  # of lines that are counted
TRACE_VARIABLE = "ASYNCDOCK_TRACE"  # set: tracebacks are printed
ERRORS = "errors.log"
ERRORS_BYTES = 1 << 20  # a larger file is put aside for a new one

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


class Repeats:
    """Writes at most ``burst`` equal warnings or errors in each ``window`` of seconds: what clients cause a million times
    fills no disk. The first one of the next window says how many were left out."""

    def __init__(self, burst: int = 20, window: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.burst, self.window, self._clock = burst, window, clock
        self._seen: OrderedDict[object, tuple[float, int]] = OrderedDict()  # when the window began, and how many came

    def count(self, key: object) -> int:
        """Count one more. Returns how many like it were left out until now, or -1 when this one is to be left out."""
        now = self._clock()
        began, came = self._seen.pop(key, (now, 0))
        left_out = 0
        if now - began >= self.window:
            left_out, began, came = max(0, came - self.burst), now, 0
        self._seen[key] = began, came + 1
        while len(self._seen) > MOST_KINDS:
            self._seen.popitem(last=False)
        return left_out if came < self.burst else -1

    def __call__(self, logger: Any, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """As a processor of structlog."""
        if name in LIMITED:
            if (left_out := self.count(event.get("event"))) < 0:
                raise structlog.DropEvent
            if left_out:
                event["left_out"] = left_out
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """As a filter of the standard library's loggers."""
        if record.levelno >= logging.WARNING:
            if (left_out := self.count(record.msg)) < 0:
                return False
            if left_out:
                record.msg = f"{record.msg} ({left_out} more were left out)"
        return True


def limit_repeats() -> None:
    """In a process that answers others: write the same warning or error only so often."""
    repeats, configured = Repeats(), structlog.get_config()["processors"]
    if not any(isinstance(processor, Repeats) for processor in configured):
        structlog.configure(processors=[repeats, *configured])
        for library in ("asyncio", "aiohttp.server"):
            logging.getLogger(library).addFilter(repeats)


class _Tracebacks:
    """A structlog processor that writes an error's traceback to the file ``path``; the line has its name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        error = event.pop("exc_info", None)
        if error is True:
            error = sys.exc_info()[1]
        elif isinstance(error, tuple):
            error = error[1]
        if isinstance(error, BaseException):
            event.setdefault("error", f"{type(error).__name__}: {error}")
            event["traceback"] = write_traceback(error, self._path)
        return event


class _Forward(logging.Handler):
    """Sends what a library logs to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def errors_file() -> Path:
    """Where the tracebacks of commands go that have no folder of their own."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "asyncdock" / ERRORS


def write_traceback(error: BaseException, path: Path) -> str:
    """Add the traceback of ``error`` to the file ``path``, or to one in the temporary directory; returns its path."""
    written = "".join(traceback.format_exception(error))
    command = " ".join(sys.argv[1:2])  # without its options: one of them may be a secret
    entry = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {command}\n{written}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > ERRORS_BYTES:
            os.replace(path, path.with_suffix(".old.log"))
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", errors="replace") as file:
            file.write(entry)
        return str(path)
    except OSError:  # a disk that is full, a folder that may not be written to
        with (
            contextlib.suppress(OSError),
            tempfile.NamedTemporaryFile(
                "w", prefix="asyncdock-error-", suffix=".log", delete=False, errors="replace"
            ) as spare,
        ):
            spare.write(entry)
            return spare.name
    return "(nowhere: no file can be written)"


def _escape(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Text from others, with control characters escaped for a terminal."""
    return {key: escaped(value) if isinstance(value, str) else value for key, value in event.items()}


def _plain_traceback(out: TextIO, error: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    out.write(escaped(text.getvalue()))


def configure(*, terminal: bool | None = None, errors: Path | None = None) -> None:
    """Send logs to standard error. ``terminal`` chooses the form; by default it is looked up. Tracebacks go to the file
    ``errors`` (on a terminal by default :func:`errors_file`), unless ``ASYNCDOCK_TRACE`` is set."""
    # tensordict sets off a deprecation notice of torch's own in every process; there is nothing a user could do about it.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    logging.getLogger("asyncio").handlers = [_Forward()]
    logging.getLogger("asyncio").propagate = False
    shown = sys.stderr.isatty() if terminal is None else terminal
    errors = None if os.environ.get(TRACE_VARIABLE) else errors or (errors_file() if shown else None)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([_Tracebacks(errors)] if errors else []),
            *([_escape] if shown else [structlog.processors.ExceptionRenderer(_TRACEBACKS)]),
            structlog.dev.ConsoleRenderer(exception_formatter=_plain_traceback)
            if shown
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
