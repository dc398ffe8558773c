"""Text from outside is shown on a terminal without effect on it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from api.cli.main import app
from api.cli.service import runs as runs_cli
from api.schemas.runs import RunView, StagesView
from api.schemas.samples import SamplePage, SampleView
from api.telemetry.progress import Progress
from api.terminal.live import LiveView
from api.terminal.report import summarize, summary_table
from api.terminal.screen import Safe, complain, safe_console, write
from api.terminal.view import viewing
from orchestration import logs
from orchestration.escapes import escaped
from tests.api import scripted
from tests.orchestration.runs import MOCK

CLEAR = "\x1b[2J"
BEEP = "\x07"
TITLE = "\x1b]0;pwned\x07"
CSI = "\x9b31m"
TURN = "\u202e"
ISOLATE = "\u2066"
ATTACK = f"good{CLEAR}{BEEP}{TITLE}{CSI}{TURN}live{ISOLATE}\r\ud800\u2028\U000e0041[/red][red]bad"
TEXT = ATTACK.replace("\ud800", "")  # as UTF-8 carries it
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|\x1b(?!\\[[0-9;]*m)"
)


def sample() -> SampleView:
    numbers: dict[str, Any] = {
        "group": 1,
        "place": 0,
        "step": 2,
        "reward": 0.5,
        "rewards": {ATTACK: 0.5},
        "advantage": 0.0,
    }
    more: dict[str, Any] = {"tokens": 4, "versions": [(1, 4)], "staleness": 0, "truncated": False}
    return SampleView(prompt=ATTACK, response=ATTACK, **numbers, **more)


def run(**changes: Any) -> RunView:
    fields: dict[str, Any] = {
        "id": "run",
        "name": "run",
        "state": "failed",
        "reason": TEXT,
        "position": None,
        "owner": TEXT,
    }
    fields |= {
        "created": 0.0,
        "started": None,
        "ended": None,
        "agent": TEXT,
        "attempts": 1,
        "folder": TEXT,
        "steps": 1,
    }
    return RunView.model_construct(**fields, steps_done=0, reward=None, recipe={}, **changes)


def safe(text: str) -> bool:
    return not UNSAFE.search(text) and "\x1b[2J" not in text


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that has one run, which says what it likes."""

    class Client:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def sample_pages(self, *_: Any, **__: Any) -> Any:
            yield SamplePage(samples=[sample()], next="", looked=1, steps=(2, 2))

        async def runs(self, **_: Any) -> Any:
            yield run()

        async def run(self, _: str) -> RunView:
            return run()

        async def stages(self, _: str) -> StagesView:
            return StagesView.model_construct(dropped={TEXT: 1}, dropped_tokens={TEXT: 9})

        async def stop(self, _: str) -> RunView:
            return run()

        async def logs(self, *_: Any, **__: Any) -> str:
            return f"first line\n\t{ATTACK}\nlast line"

    monkeypatch.setattr("api.client.client.Client", Client)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "command",
    [
        ["samples", "run"],
        ["samples", "run", "--json"],
        ["runs", "list"],
        ["runs", "list", "--json"],
        ["runs", "show", "run"],
        ["runs", "show", "run", "--json"],
        ["runs", "stop", "run"],
        ["runs", "stop", "run", "--json"],
        ["runs", "logs", "run"],
        ["runs", "logs", "run", "--json"],
    ],
)
def test_no_command_about_runs_sends_a_terminal_anything_but_text(
    command: list[str], terminal: bool, service: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, done.exception) == (0, None), done.output
    shown = done.stdout + done.stderr
    assert safe(shown), repr(UNSAFE.findall(shown))
    if command[1] not in ("list", "stop"):
        assert "good\\u001b[2J" in shown, "it is shown all the same"
    if "--json" in command:
        assert json.loads(done.stdout) is not None


def test_what_a_service_says_of_an_error_is_shown_safely(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complain(f"error: {ATTACK}")
    write(ATTACK)
    out, err = capsys.readouterr()
    assert safe(out)
    assert safe(err)


def test_json_means_the_same_once_it_is_escaped() -> None:
    text = json.dumps({"a": ATTACK, ATTACK: [ATTACK]}, ensure_ascii=False)
    assert json.loads(escaped(text)) == json.loads(text)


@given(st.text(), st.booleans())
def test_any_text_comes_out_as_text(text: str, colour: bool) -> None:
    out = io.StringIO()
    console = safe_console(
        file=out, width=60, force_terminal=colour, color_system="truecolor" if colour else None
    )
    table = Table("a", title=Text(text))
    table.add_row(text)
    for shown in (text, Text(text, style="red"), table):
        console.print(shown)
    assert safe(out.getvalue())


def test_a_live_view_shows_messages_safely() -> None:
    out = io.StringIO()
    console = safe_console(file=out, width=100, force_terminal=True)
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    with viewing(progress, console, json=False, plain=False) as (show, say):
        for event in (
            *scripted.events()[:-1],
            scripted.event(40, "state", state="failed", reason=ATTACK),
        ):
            show(event)
        say(ATTACK)
        console.print(ATTACK)
    # what a live view itself sends
    moves = re.compile("\x1b\\[(\\?25[lh]|[0-9]*[ABCDGHK]|[0-9;]*m)|\r")
    shown = moves.sub("", out.getvalue())
    assert "good\\u001b[2J" in shown
    assert "\x1b" not in shown
    assert safe(shown)


def test_plain_lines_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        out = io.StringIO()
        progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
        with viewing(progress, safe_console(file=out), json=as_json, plain=True) as (show, say):
            event = scripted.event(40, "state", state="failed", reason=TEXT)
            show(event)
            say(ATTACK)
        printed = capsys.readouterr().out + out.getvalue()
        assert "good\\u001b[2J" in printed
        assert safe(printed)


def test_a_live_view_has_the_width_that_it_had() -> None:
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    for event in scripted.events():
        progress.apply(event)
    shown = []
    for wrap in (False, True):
        console = safe_console(width=100, file=io.StringIO(), force_terminal=True, record=True)
        view = LiveView(progress, console)
        with Live(
            get_renderable=lambda v=view, w=wrap: Safe(v.render()) if w else v.render(),
            console=console,
        ):
            pass
        console.print(view.render())
        shown.append(console.export_text())
    assert shown[0] == shown[1]


def test_the_summary_of_a_run_is_safe() -> None:
    progress = Progress(ATTACK, scripted.STEPS, scripted.BOUND)
    for event in (
        *scripted.events()[:-1],
        scripted.event(40, "state", state="failed", reason=ATTACK),
    ):
        progress.apply(event)
    out = io.StringIO()
    summary = summarize(progress, checkpoint=None)
    safe_console(file=out, width=200).print(summary_table(summary))
    assert safe(out.getvalue())


def test_descriptions_of_recipes_are_safe_and_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.toml").write_text('description = "good\\u001b[2J[/red]\\u202e"\n')
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--json"]):
        done = CliRunner().invoke(app, ["recipes", *options])
        assert (done.exit_code, done.exception) == (0, None)
        assert "good" in done.stdout
        assert safe(done.stdout)


def test_what_is_wrong_with_a_recipe_is_shown_safely(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        '"ke\\u001b[2Jy" = 1\nname = "\\u001b]0;x\\u0007"\n[model]\nsource = "\\u202etiny\\u009b"\n'
    )
    done = CliRunner().invoke(app, ["check", str(path), "--set", "rollout.engine=\x1b[2J\u202e"])
    assert done.exit_code == 2
    assert "\\u001b[2J" in done.stderr
    assert safe(done.stderr), repr(UNSAFE.findall(done.stderr))


def test_logs_on_a_terminal_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(terminal=True)
    log = structlog.get_logger()
    try:
        raise ValueError(TEXT)
    except ValueError:
        log.error(TEXT, reason=TEXT, exc_info=True)
    assert safe(capsys.readouterr().err)


def test_runs_are_completed_safely(service: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(recipe, text) for recipe, text in [("mock", ATTACK)] if recipe in MOCK["name"]]
    monkeypatch.setattr(
        runs_cli,
        "ask_for_completion",
        lambda *_: [type("Recipe", (), {"name": n, "description": t}) for n, t in found],
    )
    context = type("Context", (), {"params": {}})
    assert all(safe(help_) for _, help_ in runs_cli._complete_recipe(context, "mo"))  # type: ignore[arg-type]


def test_without_a_terminal_no_line_is_padded(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("a", "b", box=None)
    table.add_row("x", "long text")
    table.add_row("", "y")
    table.add_row("z", "")
    safe_console().print(table)
    safe_console().print(Text("end  "), Text("  inner  space"))
    assert capsys.readouterr().out.splitlines() == [
        *(" a  b", " x  long text", "    y", " z"),
        "end     inner  space",
    ]
