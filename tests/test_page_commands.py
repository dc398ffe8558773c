"""The ``asyncdock`` commands of the pages: all are parsed as they stand, and those that look at a recipe are executed.

What starts a run, a service or a cluster, or talks to one, is parsed alone: EXCEPTED names why. Programs in Python are
run by test_docs, recipes are checked by test_recipe_pages, benchmarks' commands are parsed by benchmarks/test_commands.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from api.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "compose" / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "changes.md"),
]
# By the command: why it is parsed and not executed here.
EXCEPTED = {
    "agent": "it needs a service, which goes on until it is ended; tests/api/cli/service executes it",
    "deploy": "it needs a Ray cluster; tests/api/policy/test_deploy.py executes it",
    "dock": "it needs a run that is alive; tests/api/cli/test_dock.py executes it",
    "host": "it needs another machine; tests/orchestration/run/test_hosts.py executes it",
    "login": "it needs a service; tests/api/cli/service/test_runs.py executes it",
    "pairs": "it needs the folder of a run; tests/test_plain_install.py executes it",
    "plan profile": "it executes runs for minutes; tests/api/cli/test_plan.py executes it",
    "plan reshard": "its models are the user's; tests/api/cli/test_reshard.py executes it",
    "plan what-if": "it needs the folder of a run; tests/test_plain_install.py executes it",
    "resume": "it needs the folder of a run; tests/api/cli/test_new_user.py executes it",
    "run": "it executes a run for minutes; tests/test_plain_install.py executes runs of each kind",
    "runs": "it needs a service; tests/api/cli/service/test_runs.py executes it",
    "serve": "it goes on until it is ended; tests/api/cli/service/test_serve.py executes it",
    "token": "it changes the tokens of a service; tests/api/server/access executes it",
    "track": "it needs the folder of a run; tests/api/telemetry/test_trackers.py executes it",
    "why": "it needs a run that is alive; tests/api/cli/service executes it",
}
# Recipes of the reader's own, and others that are not in the repository or that need what this machine may lack.
ABSENT = {"quickstart-vllm", "mine.toml", "my_recipe"}


def commands() -> list[tuple[str, ...]]:
    """The words of each command in the blocks of the pages that are no program and no recipe, once."""
    found: dict[tuple[str, ...], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if kind not in ("", "bash", "console", "sh"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                match = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?asyncdock (\S.*)", line)
                if match and not re.search(r"─|\[[A-Z-]|…", match[1]):
                    command = re.split(r"\s+#|\s[|>&]|;", match[1])[0]
                    found[tuple(shlex.split(command))] = None
    return list(found)


COMMANDS = commands()


def read(arguments: tuple[str, ...]) -> str:
    """Parse a command as the command line does; returns its name. Raises an error for what it does not take."""
    command, names, rest = typer.main.get_command(app), [], list(arguments)
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(" ".join(names) or "asyncdock", rest, parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, child, rest = command.resolve_command(context, rest)
        names.append(str(name))
        command = child
    command.make_context(names[-1], rest, parent=context)
    return " ".join(names)


def test_the_commands_of_the_pages_are_read() -> None:
    assert len(COMMANDS) >= 30
    assert ("plan", "run", "mock", "--set", "pipeline.staleness=2") in COMMANDS


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_of_a_page_works(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCDOCK_INDEX", "redis://10.0.0.1:6379")  # as docs/two-machines.md sets it above
    name = read(arguments)
    if name in EXCEPTED or name.split()[0] in EXCEPTED or ABSENT & set(arguments) or "--costs" in arguments:
        return
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
