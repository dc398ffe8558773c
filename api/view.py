"""The view that a run is shown in, here and from afar: a live picture, plain lines, or JSON.

a terminal ──▶ LiveView      --plain, or no terminal ──▶ PlainView      --json ──▶ JsonView
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from api.progress import Event, Progress

REDRAWS_PER_SECOND = 4
PIPE_WIDTH = 4096  # columns where there is no terminal: a program reads lines, and no path is cut


def console(*, stderr: bool = False) -> Console:
    """Where a command prints: as wide as its terminal, and without a limit where there is none."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPE_WIDTH)


class View(Protocol):
    def event(self, event: Event) -> None: ...


class JsonView:
    """Prints each event as a line of JSON, as ``metrics.jsonl`` has it."""

    def event(self, event: Event) -> None:
        from orchestration.metrics import event_json

        print(event_json(event), flush=True)


@contextlib.contextmanager
def viewing(
    progress: Progress, console: Console, *, json: bool, plain: bool
) -> Iterator[tuple[View, Callable[[str], None]]]:
    """A view of what ``progress`` is told, and how to say a line beside it."""
    from api.terminal import LiveView, PlainView

    if json:
        yield JsonView(), console.print
    elif plain or not console.is_terminal:
        yield PlainView(progress, console), console.print
    else:
        from rich.live import Live

        view = LiveView(progress, console)
        with Live(get_renderable=view.render, console=console, refresh_per_second=REDRAWS_PER_SECOND):
            yield view, view.notify
