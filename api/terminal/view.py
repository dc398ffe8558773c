"""The choice of a view for a run, local or of a service: a live picture, plain lines, or JSON.

a terminal ──▶ LiveView      --plain, or no terminal ──▶ PlainView      --json ──▶ lines as in metrics.jsonl
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from api.terminal.screen import Safe, write

if TYPE_CHECKING:
    from rich.console import Console

    from api.telemetry.progress import Progress
    from pipeline.data.events import Event

REDRAWS_PER_SECOND = 4


@contextlib.contextmanager
def viewing(
    progress: Progress, console: Console, *, json: bool, plain: bool
) -> Iterator[tuple[Callable[[Event], object], Callable[[str], None]]]:
    """Yield two functions: one applies an event to ``progress`` and shows it, the other prints a
    line beside the view."""
    from orchestration.history.lines import event_json

    def print_json(event: Event) -> None:
        progress.apply(event)
        write(event_json(event))

    if json or plain or not console.is_terminal:
        from api.terminal.plain import PlainView

        yield (
            print_json if json else PlainView(progress, console).event,
            functools.partial(console.print, markup=False),
        )
    else:
        from rich.live import Live

        from api.terminal.live import LiveView

        view = LiveView(progress, console)
        with Live(
            get_renderable=lambda: Safe(view.render()),
            console=console,
            refresh_per_second=REDRAWS_PER_SECOND,
        ):
            yield progress.apply, view.notify
