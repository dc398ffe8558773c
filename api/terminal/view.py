"""The choice of a view for a run, local or of a service: a live picture, plain lines, or JSON.

a terminal ──▶ LiveView      --plain, or no terminal ──▶ PlainView      --json ──▶ JsonView
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from api.terminal.screen import Safe, write

if TYPE_CHECKING:
    from rich.console import Console

    from api.telemetry.progress import Progress
    from pipeline.events import Event

REDRAWS_PER_SECOND = 4


class View(Protocol):
    def event(self, event: Event) -> None: ...


class JsonView:
    """Prints each event as a line of JSON, as ``metrics.jsonl`` has it."""

    def event(self, event: Event) -> None:
        from orchestration.events_file import event_json

        write(event_json(event))


@contextlib.contextmanager
def viewing(
    progress: Progress, console: Console, *, json: bool, plain: bool
) -> Iterator[tuple[View, Callable[[str], None]]]:
    """A view of ``progress``, and a function that prints a line beside it."""
    from api.terminal.live import LiveView, PlainView

    if json:
        yield JsonView(), functools.partial(console.print, markup=False)
    elif plain or not console.is_terminal:
        yield PlainView(progress, console), functools.partial(console.print, markup=False)
    else:
        from rich.live import Live

        view = LiveView(progress, console)
        with Live(get_renderable=lambda: Safe(view.render()), console=console, refresh_per_second=REDRAWS_PER_SECOND):
            yield view, view.notify
