"""Views of a run in a terminal: a live picture, or plain lines where the output is not a terminal.

Event ──▶ Progress ──▶ LiveView   redrawn four times a second by Rich
                  └──▶ PlainView  one line a step
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.telemetry.progress import Progress
from api.telemetry.trajectories import summarize_trajectories, trajectories_text
from api.terminal.numbers import (
    count,
    duration,
    lost_text,
    number,
    percent,
    short_seconds,
    unscored,
)
from orchestration.history.totals import SHARES, shares
from orchestration.units import format_size
from pipeline.data.events import StepEvent

SPARKS = "▁▂▃▄▅▆▇█"
# Each share of time has its own glyph and its own colour; either of them identifies it.
GLYPHS = {
    "busy": ("█", "cyan"),
    "waiting_input": ("▒", "yellow"),
    "waiting_room": ("▚", "magenta"),
    "other": ("·", "dim"),
}
WORDS = {
    "busy": "busy",
    "waiting_input": "waiting for input",
    "waiting_room": "waiting for room",
    "other": "other",
}
STATE_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "failed": "bold red",
    "stopped": "bold yellow",
}
WIDE = 100  # columns from which a wider table is shown
NARROW = 80  # below, one column of figures
RULER = Console(width=1000)  # by which the width of a table is known
# Of the table of stages, the widest first: glyphs of the bar, and shares of its time in numbers.
STAGE_COLUMNS = (
    (36, ("busy", "input", "room", "other")),
    (18, ("busy", "input")),
    (0, ("busy", "input")),
)
STARTING = "starting the workers (the first start of a model takes a while)"


def weighted_mean(values: Sequence[float], counts: Sequence[int]) -> float:
    """Return the mean of the finite ones of ``values``, each as often as its count says; NaN: of
    none."""
    pairs = zip(values, counts, strict=True)
    finite = [(value, count) for value, count in pairs if math.isfinite(value)]
    if not finite:
        return math.nan
    return sum(value * count for value, count in finite) / sum(count for _, count in finite)


def sparkline(values: Sequence[float], width: int, counts: Sequence[int] = ()) -> str:
    """Return ``values`` as at most ``width`` bars between their least and greatest; more values are
    averaged in buckets. ``counts``: for how many values each of them stands; default: one.

    >>> sparkline([0.0, 0.5, 1.0], width=8)
    '▁▅█'
    >>> sparkline([0.0, 0.5, 1.0], width=2, counts=[8, 4, 4])
    '▁█'
    """
    if len(values) > width:
        values = _averaged(values, counts or [1] * len(values), width)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low = min(finite)
    high = max(finite)
    top = len(SPARKS) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(
        SPARKS[round((value - low) * scale + 1e-9)] if math.isfinite(value) else " "
        for value in values
    )


def _averaged(values: Sequence[float], counts: Sequence[int], width: int) -> list[float]:
    """Return the means of ``values`` in ``width`` buckets of about as many counts; NaN where no
    value of a bucket is finite."""
    begins = list(itertools.accumulate(counts, initial=0))
    edges = [bisect.bisect_left(begins, round(i * begins[-1] / width)) for i in range(width + 1)]
    return [weighted_mean(values[a:b], counts[a:b]) for a, b in itertools.pairwise(edges)]


def share_bar(shares: dict[str, float], width: int) -> Text:
    """Return a bar of ``width`` glyphs with the shares of time.

    Its inner edges are rounded, so that the shares fill it.
    """
    edges = [
        round(edge * width)
        for edge in itertools.accumulate((shares[name] for name in SHARES), initial=0.0)
    ]
    bar = Text()
    for name, (begin, end) in zip(SHARES, itertools.pairwise(edges), strict=True):
        glyph, style = GLYPHS[name]
        bar.append(glyph * (end - begin), style=style)
    bar.append(" " * (width - len(bar)))
    return bar


# --------------------------------------------------------------------------------------------------
# The live view


class LiveView:
    """A picture of ``progress`` at the console's width. Used as
    ``Live(get_renderable=view.render)``."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self.progress = progress
        self.console = console
        self.notice = ""  # one line for the user, such as what Ctrl-C does

    def notify(self, notice: str) -> None:
        self.notice = notice

    def render(self) -> RenderableType:
        progress = self.progress
        width = self.console.width
        parts: list[RenderableType] = [_header(progress), _learning(progress, width)]
        if progress.workers:
            parts.append(_stages(progress, width))
        for message in progress.messages:
            text, reason = message  # the reason of a failed run may repeat that of a death
            if progress.state != "failed" or not reason:
                parts.append(Text(text, style="yellow", no_wrap=True, overflow="ellipsis"))
            elif reason == progress.reason or reason not in progress.reason:
                # whole: nothing else shows it
                parts.append(Text(text, style="yellow", overflow="fold"))
        if self.notice:
            parts.append(Text(self.notice, style="bold yellow"))
        return Group(*parts)


def _header(progress: Progress) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    name = Text.assemble(
        (progress.name, "bold"),
        "  ",
        (progress.state, STATE_STYLES.get(progress.state, "bold cyan")),
    )
    if progress.last or progress.state not in ("created", "starting"):
        name.append(f"  step {progress.steps_done}/{progress.steps}")
        time_left = "" if progress.ended else f", {duration(progress.seconds_left)} left"
        bar = ProgressBar(total=progress.steps, completed=progress.steps_done)
        grid.add_row(name, bar, f"{duration(progress.elapsed)} elapsed{time_left}")
    else:
        grid.add_row(
            name,
            Text(STARTING, style="dim", no_wrap=True, overflow="ellipsis"),
            duration(progress.elapsed),
        )
    return grid


def _learning(progress: Progress, width: int) -> RenderableType:
    """Return two columns of pairs: learning on the left, the flow of samples on the right; one below
    the other where it is narrow."""
    step = progress.last
    measured = step.metrics if step else {}
    rate = number(measured.get("learning_rate"), ".2g")
    reward = Text(number(step and step.reward_mean, ".3f"), style="bold")
    if step:
        reward.append(f" ±{number(step.reward_std, '.2f')} ", style="dim")
        counts = [point.steps for point in progress.history]
        bars = sparkline(progress.rewards(), 24 if width >= WIDE else 12, counts)
        reward.append(bars, style="green")
        reward.append(unscored(step.reward_failed, step.reward_absent))
    left_rows = [
        ("reward", reward),
        ("held out", _held_out(progress)),
        (
            "loss",
            Text(f"{number(step and step.loss, '.4f')}   grad {number(measured.get('grad_norm'))}"),
        ),
        (
            "KL",
            Text(
                f"{number(measured.get('kl_behaviour'), '.2g')}   clipped "
                f"{percent(measured.get('clip_fraction'))}"
            ),
        ),
        ("entropy", Text(f"{number(measured.get('entropy'), '.3f')} nats")),
        ("effective", Text(f"{percent(measured.get('ess'))} of tokens   lr {rate}")),
        ("equal", Text(f"rewards in {percent(measured.get('equal_groups'))} of groups")),
    ]
    right_rows = [
        ("tokens/s", _speed(progress, width)),
        ("tokens", _tokens(progress)),
        ("staleness", _staleness(progress)),
        ("weights", _weights(progress, width)),
        ("swap", _swap(progress)),
        ("truncated", Text(f"{percent(measured.get('truncated'))} of responses")),
        (
            "length",
            Text(
                f"{number(step and step.response_length_mean)}  "
                f"▲ {number(measured.get('response_length_above'))}  "
                f"▼ {number(measured.get('response_length_below'))}"
            ),
        ),
    ]
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    if width < NARROW:
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for pair in (*left_rows, *right_rows):
            grid.add_row(*pair)
    else:
        grid.add_column(no_wrap=True, overflow="ellipsis", min_width=40 if width >= WIDE else 26)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for left, right in zip(left_rows, right_rows, strict=True):
            grid.add_row(*left, *right)
    return Panel(grid, box=box.ROUNDED, border_style="dim", padding=(0, 1))


def _held_out(progress: Progress) -> Text:
    points = progress.evaluated.points
    if not points:
        return Text("–")
    newest = points[-1].event
    text = Text(number(points[0].event.reward_mean, ".3f"))
    if len(points) > 1:
        text.append(" → ")
        text.append(number(newest.reward_mean, ".3f"), style="bold")
    text.append(f"  v{newest.version} greedy", style="dim")
    return text.append(unscored(newest.failed, newest.absent))


def _speed(progress: Progress, width: int) -> Text:
    """Return tokens/s of the run and of each device, and the stage that sets the pace."""
    rate = progress.tokens_per_second
    text = Text(number(rate, ",.0f"), style="bold")
    if rate is not None:
        text.append(f"  {number(rate / progress.devices, ',.0f')} a device", style="not bold")
    if width >= WIDE and (busiest := progress.busiest()):
        text.append(f"  {busiest[0]} busy {percent(busiest[1])}", style="not bold dim")
    return text


def _staleness(progress: Progress) -> Text:
    step = progress.last
    if step is None:
        return Text(f"bound {progress.bound}")
    text = Text(
        f"{number(step.staleness_mean, '.2f')} mean  {number(step.staleness_max, '.0f')} max"
    )
    over = progress.staleness_max() > progress.bound
    return text.append(f"  bound {progress.bound}", style="bold red" if over else "dim")


def _tokens(progress: Progress) -> Text:
    tokens = progress.tokens
    if not tokens["generated"]:
        return Text("–")
    text = Text(f"{count(tokens['generated'])} made, {count(tokens['trained'])} trained")
    return text.append(f", {count(tokens['filtered'])} filtered" if tokens["filtered"] else "")


def _weights(progress: Progress, width: int) -> Text:
    """Return the newest version published, and the newest that a rollout engine has loaded."""
    if progress.published is None:
        return Text("–")
    used = "–" if progress.swapped is None else f"v{progress.swapped.version}"
    text = Text(f"v{progress.published.version} out, {used} in use")
    return text.append(
        f"  {format_size(progress.published.bytes)}" if width >= WIDE else "", style="dim"
    )


def _swap(progress: Progress) -> Text:
    """Return the exposed and hidden seconds of the last weight update."""
    swap = progress.swapped
    if swap is None:
        return Text("–")
    text = Text(f"{short_seconds(swap.exposed_seconds)} exposed")
    return text.append(f" {short_seconds(swap.hidden_seconds)} hidden", style="dim")


def _stages(progress: Progress, width: int) -> RenderableType:
    for bar, names in STAGE_COLUMNS:
        table = _stage_table(progress, bar, names)
        legend = _legend(progress, has_bar=bar > 0)
        if Measurement.get(RULER, RULER.options, Group(table, legend)).maximum <= width:
            break
    groups = ", ".join(
        f"{count(totals[0])} {reason}" for reason, totals in progress.dropped.items()
    )
    lines = [*_function_lines(progress.last), *call_lines(progress)]
    if trajectories := trajectories_text(summarize_trajectories(progress.trajectories)):
        lines.append(f"trajectories: {trajectories}")
    calls = [Text(f" {line}", style="dim") for line in lines]
    return Group(
        table,
        legend,
        *calls,
        *([Text(f" dropped groups: {groups}", style="yellow")] if groups else []),
    )


def _legend(progress: Progress, *, has_bar: bool) -> Text:
    legend = Text(" ")
    for name in SHARES if has_bar else ():
        glyph, style = GLYPHS[name]
        legend.append(glyph * 2, style=style)
        legend.append(f" {WORDS[name]}   ", style="dim")
    if progress.restarts:
        legend.append(f"restarts: {progress.restarts}", style="bold yellow")
    return legend


def _stage_table(progress: Progress, bar: int, names: Sequence[str]) -> Table:
    """Return a row for each stage: a bar of ``bar`` glyphs (0: none), and the shares ``names`` of
    its time."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    bars = ("where its time goes",) if bar else ()
    for name in ("stage", "queue", "held", *bars, *names, "rows/s", "tokens/s"):
        least = {"stage": 11, "where its time goes": bar}.get(name)
        table.add_column(name, justify="left" if least else "right", min_width=least, no_wrap=True)
    for name, worker in progress.workers.items():
        parts = shares(worker.recent)
        table.add_row(
            name,
            str(worker.latest.queue_depth),
            str(worker.latest.in_flight),
            *([share_bar(parts, bar)] if bar else []),
            *[percent(parts[part]) for part in SHARES][: len(names)],
            number(worker.rate("rows"), ".1f"),
            number(worker.rate("tokens"), ",.0f"),
        )
    return table


def _function_lines(step: StepEvent | None) -> Iterator[str]:
    """Yield the scores of each of several reward functions in ``step``, in one line each."""
    for name, figures in step.rewards.items() if step and len(step.rewards) > 1 else ():
        yield (
            f"reward {name}: {number(figures.get('mean'), '.3f')} "
            f"±{number(figures.get('std'), '.2f')}, "
            f"{percent(figures.get('share'))} of the differences in a group"
        )


def call_lines(progress: Progress) -> list[str]:
    """Return the calls of each reward function by each worker's process, in one line each."""
    return [
        f"{worker} {name}: {count(int(tally['calls']))} calls, {count(int(tally['again']))} again, "
        f"{short_seconds(tally['seconds'] / tally['calls'])} a call, "
        f"{short_seconds(tally.get('waited', 0) / tally['calls'])} waited; "
        f"{lost_text(tally) or 'scored all responses'}"
        for worker, totals in progress.workers.items()
        for name, tally in (totals.latest.calls or {}).items()
    ]
