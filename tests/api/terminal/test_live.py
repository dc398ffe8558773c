"""What a person sees: everything that matters, at any width, at any moment of a run."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from api.telemetry.progress import Progress
from api.terminal import live as terminal
from api.terminal.plain import PlainView
from orchestration.history.totals import SHARES
from tests.api import scripted


def screen(progress: Progress, width: int) -> list[str]:
    console = Console(width=width, height=40, record=True, file=io.StringIO(), force_terminal=True)
    console.print(terminal.LiveView(progress, console).render())
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 72, 76, 79, 80, 99, 100, 101, 104, 110, 120])
def test_everything_is_shown_and_nothing_is_cut(width: int) -> None:
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    for event in scripted.events()[:-1]:
        progress.apply(event)
    lines = screen(progress, width)
    text = "\n".join(lines)
    assert max(cell_len(line) for line in lines) <= width
    assert "…" not in text
    for shown in (
        "step 8/8",
        "running",
        "0:27 elapsed, 0:00 left",
        "0.700 ±0.10",
        "0.100 → 0.900",
        "-0.0700",
        "clipped 5%",
        "97% of tokens",
        "250",  # tokens a second: 500 a step of 2 s
        "4,100 made, 4,000 trained",
        "1.00 mean  2 max  bound 2",
        "v8 out, v8 in use",
        "2 ms exposed 0.3 s hidden",
        "rollout-0",
        "70%",
        "20%",
        *(["waiting for room"] if width >= 80 else []),
        "restarts: 1",
        "dropped groups: 3 equal rewards, 1 reward x failed",
        "rollout-0 died: ended by signal 9",
    ):
        assert shown in text, f"{shown!r} is missing in\n{text}"


def test_a_long_run_fits_a_narrow_terminal() -> None:
    progress = Progress("quickstart", 10_000, 16)
    for number in (998, 999):
        progress.apply(
            scripted.step(
                number, reward_mean=-12.345, tokens_generated=123_456_789, tokens_trained=99_999_999
            )
        )
        progress.apply(
            scripted.stage(
                4 * number, "reference-10", 4e4 + number, 1e4, 2e4, 1e3, 10**9 + 10**4 * number
            )
        )
    for event in scripted.events():
        if event.kind == "sync":
            progress.apply(
                scripted.event(
                    0, "sync", **event.data | {"version": 1000, "exposed_seconds": 0.00018}
                )
            )
    text = "\n".join(screen(progress, 80))
    assert "…" not in text
    assert "123M made, 100M trained" in text
    assert "v1000 out, v1000 in use" in text
    assert "0.18 ms exposed 0.3 s hidden" in text


@pytest.mark.parametrize("upto", range(0, 12))
def test_a_run_can_be_looked_at_from_its_first_moment(upto: int) -> None:
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    for event in scripted.events()[:upto]:
        progress.apply(event)
    lines = screen(progress, 80)
    assert "scripted" in lines[0]
    assert max(cell_len(line) for line in lines) <= 80


def test_numbers_that_are_none_are_dashes() -> None:
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    progress.apply(scripted.step(0, reward_mean=math.nan, loss=math.inf, ess=None))
    assert "–" in "\n".join(screen(progress, 80))


@given(parts=st.lists(st.floats(0, 1), min_size=4, max_size=4), width=st.integers(1, 60))
def test_a_share_bar_is_filled_and_true_to_its_shares(parts: list[float], width: int) -> None:
    total = sum(parts)
    shares = {
        name: part / total if total else 0.0 for name, part in zip(SHARES, parts, strict=True)
    }
    bar = terminal.share_bar(shares, width).plain
    assert len(bar) == width
    for name, share in shares.items():
        assert abs(bar.count(terminal.GLYPHS[name][0]) - share * width) < 1 + 1e-6


@given(
    values=st.lists(st.floats(-5, 5) | st.just(math.nan), max_size=200), width=st.integers(1, 40)
)
def test_a_sparkline_fits_and_rises_with_its_values(values: list[float], width: int) -> None:
    line = terminal.sparkline(values, width)
    assert len(line) <= width
    if len(values) <= width:
        bars = [(v, b) for v, b in zip(values, line, strict=False) if b != " "]
        for (a, low), (b, high) in zip(sorted(bars), sorted(bars)[1:], strict=False):
            assert a <= b
            assert low <= high


def test_plain_lines_show_one_line_a_step() -> None:
    out = io.StringIO()
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    view = PlainView(progress, Console(file=out, width=40))
    for event in scripted.events("failed", "update-0: [boom]"):
        view.event(event)
    lines = out.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == scripted.STEPS
    assert "step 3/8  reward 0.200" in steps[2]
    assert "bound 2" in steps[2]
    assert "run scripted: failed (update-0: [boom])" in lines
    assert "worker rollout-0 died: ended by signal 9" in lines
    assert "evaluation v8  reward 0.900 of 16 held-out prompts" in lines
