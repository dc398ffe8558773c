"""Terminal output of the commands; control characters in samples, logs and names are escaped.

text ──▶ write, complain ──▶ standard output, standard error        a picture, a table ──▶ safe_console ──▶ the same
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from orchestration.escapes import escaped

if TYPE_CHECKING:
    from rich.console import (
        Console,
        ConsoleOptions,
        ConsoleRenderable,
        RenderableType,
        RenderHook,
        RenderResult,
    )
    from rich.measure import Measurement
    from rich.table import Table

PIPE_WIDTH = 4096  # columns without a terminal: programs read whole lines


def write(text: str) -> None:
    """Print a line on standard output."""
    print(escaped(text), flush=True)


def complain(text: str) -> None:
    """Print a line on standard error."""
    print(escaped(text), file=sys.stderr, flush=True)


def safe_console(**options: Any) -> Console:
    """Return a Rich console that escapes control characters in everything it prints.

    Text is markup only where ``markup`` is given to it or to its ``print``. It is as wide as its
    terminal; without a terminal it does not wrap lines, and pads none.
    """
    from rich.console import Console

    stream = sys.stderr if options.get("stderr") else sys.stdout
    console = Console(
        **{"markup": False, "width": None if stream.isatty() else PIPE_WIDTH, **options}
    )
    console.push_render_hook(cast("RenderHook", _Escaping(pads=stream.isatty())))
    return console


def pairs_table(*rows: tuple[str, str], **options: Any) -> Table:
    """Return a table of names and values, without rows with an empty value."""
    from rich.table import Table

    table = Table(box=None, show_header=False, **options)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, value)
    return table


class Safe:
    """``renderable`` with its text escaped, for renderables that no render hook sees, such as those
    of a live view. ``pads``: its lines may end with spaces."""

    def __init__(self, renderable: RenderableType, *, pads: bool = True) -> None:
        self._renderable = renderable
        self._pads = pads

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        spaces: list[Segment] = []  # that nothing has followed yet in their line
        for segment in console.render(self._renderable, options):
            if segment.control:
                yield segment
            elif self._pads:
                yield Segment(escaped(segment.text), segment.style)
            elif not segment.text.strip():
                spaces = [] if "\n" in segment.text else [*spaces, segment]
                if not spaces:
                    yield Segment("\n" * segment.text.count("\n"))
            else:
                yield from spaces
                text = segment.text.rstrip(" ")
                spaces = [Segment(segment.text[len(text) :], segment.style)]
                yield Segment(escaped(text), segment.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement.get(console, options, self._renderable)


class _Escaping:
    def __init__(self, *, pads: bool) -> None:
        self._pads = pads

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Safe(renderable, pads=self._pads) for renderable in renderables]
