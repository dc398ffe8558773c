"""Every benchmark starts as the pages say: ``python -m benchmarks.ROOM.NAME``, in the root of a
clone, without PYTHONPATH, and it accepts the arguments of each command of the documentation. What
pages and sources name of the benchmarks exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from string import Template

import pytest

from benchmarks.__main__ import programs
from tests.pages.page import PAGES, blocks
from tests.plain import ROOT
from tests.sources import PACKAGES, sources

# Each in a fork of a process that has imported what all of them import, once. A command ends when
# its arguments are parsed.
EACH = """
import argparse, contextlib, importlib, io, json, os, runpy, sys

class Parsed(BaseException):
    pass

parse = argparse.ArgumentParser.parse_args

def parse_and_end(self, *arguments, **named):
    parse(self, *arguments, **named)
    raise Parsed

argparse.ArgumentParser.parse_args = parse_and_end
commands = json.load(sys.stdin)
for name in sorted({command[0] for command in commands}):
    with contextlib.suppress(Exception):  # raised again below
        importlib.import_module(f"benchmarks.{name}")
for name, *arguments in commands:
    if os.fork() == 0:
        sys.argv, output, code = [name, *arguments], io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except Parsed:
            pass
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException as error:
            code = repr(error)
        print(json.dumps([code, output.getvalue()]), flush=True)
        os._exit(0)
    os.wait()
"""
NAMES = [f"{room}.{name}" for room, names in programs().items() for name in names]
NAMED = re.compile(r"(?<![\w/])benchmarks(?:/[\w/]+\.py\b|(?:\.[a-z]\w*)+)")
IN_TEXT = re.compile(r"`(python -m benchmarks\.[^`]+)`")
STANDS_FOR = {"FOLDER": "."}  # words that a text has for any value


def commands() -> list[tuple[str, ...]]:
    """The commands of all pages, as name and arguments, once."""
    found: dict[tuple[str, ...], None] = {}
    for page in PAGES:
        variables: dict[str, str] = {}
        lines = IN_TEXT.findall(page.read_text(encoding="utf-8"))
        for block in blocks(page):
            variables |= dict(re.findall(r'^(\w+)="(.*)"$', block.text, re.MULTILINE))
            lines += [Template(line).safe_substitute(variables) for line in block.commands]
        for line in lines:
            if match := re.search(r"python -m benchmarks\.(\w.*)", line):
                words = shlex.split(re.split(r"\s[|>&]", match[1])[0], comments=True)
                found[tuple(STANDS_FOR.get(word, word) for word in words)] = None
    return list(found)


ASKED = [*((name, "--help") for name in NAMES), *commands()]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, ...], tuple[int | str, str]]:
    """Exit code, or the error, and output of each of ASKED."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EACH],
        cwd=ROOT,
        env=environment,
        input=json.dumps(ASKED),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(ASKED, map(tuple, map(json.loads, done.stdout.splitlines())), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_prints_its_help(
    name: str, answers: dict[tuple[str, ...], tuple[int | str, str]]
) -> None:
    code, output = answers[name, "--help"]
    assert code == 0, output
    assert output.startswith("usage: "), output


@pytest.mark.parametrize("command", ASKED[len(NAMES) :], ids=" ".join)
def test_a_command_of_a_page_has_arguments_that_are_accepted(
    command: tuple[str, ...], answers: dict[tuple[str, ...], tuple[int | str, str]]
) -> None:
    code, output = answers[command]
    assert code == 0, output


def test_the_commands_of_the_pages_are_read() -> None:
    assert len(ASKED) - len(NAMES) > 70
    assert ("planning.planner", "--real", "tiny", "--steps", "150") in ASKED


def exists(name: str) -> bool:
    """Whether there is a file, a room, a module, or a module with such an attribute."""
    if "/" in name:
        return (ROOT / name).is_file()
    module = ROOT.joinpath(*name.split(".")[:3])
    return module.is_dir() or module.with_suffix(".py").is_file()


def test_what_is_named_of_the_benchmarks_exists() -> None:
    texts = [ROOT / "Makefile", ROOT / "pyproject.toml", *PAGES]
    texts += sources(*PACKAGES, "benchmarks", "tests")
    named = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in texts
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(named) > 300
    assert [each for each in named if not exists(each[1])] == []


def test_a_benchmark_starts_as_a_module() -> None:
    """One that imports another, by the command itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "benchmarks.planning.scale", "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize(
    ("module", "library"), [("flow.calls", "transfer_queue"), ("training.grpo_step", "trl")]
)
def test_a_benchmark_without_its_library_says_what_to_install(module: str, library: str) -> None:
    code = f"import runpy, sys; sys.modules[{library!r}] = None; sys.argv[1:] = []; "
    code += f"runpy.run_module('benchmarks.{module}', run_name='__main__')"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"error: {library} is not installed; pip install 'asyncdock[bench]'"
    )
    assert "Traceback" not in done.stderr
