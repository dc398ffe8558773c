"""The table of commands: what `asyncdock --help` says of them without importing them, and what a
call imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from api.cli.main import COMMANDS, app
from tests.api.served import SECONDS, environment

GROUP = typer.main.get_command(app)
SERVICE = "api.cli.service."
# -X importtime lists no module that is imported by its name as text
CALL = """
import sys
from api.cli.main import app
try:
    app(args=sys.argv[1:], prog_name="asyncdock")
finally:
    print(*sys.modules, sep="\\n", file=sys.stderr)
"""


def asyncdock(*arguments: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules of its process."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALL, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_of_a_command_what_the_command_says(name: str) -> None:
    command = GROUP.commands[name]  # type: ignore[attr-defined]
    assert command.name == name
    for width in (20, 45, 60, 1000):
        listed = TyperCommand(name, help=COMMANDS[name][1]).get_short_help_str(width)
        assert listed == command.get_short_help_str(width)


def test_help_lists_all_commands_and_imports_none() -> None:
    out, modules = asyncdock("--help")
    listed = out.partition("Commands:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in listed.splitlines()] == list(COMMANDS)
    places = {place.partition(":")[0] for place, _ in COMMANDS.values()}
    assert not modules & places, modules & places


def test_a_command_imports_its_own_module_alone() -> None:
    _, modules = asyncdock("recipes", "--json")
    assert "api.cli.recipes" in modules
    assert not [module for module in modules if module.startswith((SERVICE, "api.client"))]


def test_a_misspelt_command_is_answered_with_the_closest() -> None:
    result = CliRunner().invoke(app, ["chekc"])
    assert result.exit_code == 2
    assert "Did you mean 'check'" in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("asyncdock re", {"resume", "recipes"}),
        ("asyncdock plan re", {"reshard"}),
        ("asyncdock run tin", {"tiny"}),
    ],
)
def test_a_shell_completes_commands_and_their_arguments(words: str, expected: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from api.cli.main import main; main()"],
        env={
            **os.environ,
            "_ASYNCDOCK_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert set(done.stdout.split()) == expected, done.stderr
