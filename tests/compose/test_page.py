"""compose/README.md is a page that ``make compose-check`` can follow: each command stands in a
block, and each section that has commands has something to hold after them. The check itself says
what is lacking, and its shell is a person's."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "dockerfile_parse", reason="dockerfile-parse is not installed; pip install -e '.[dev]'"
)

from tests.compose.check import Report, missing
from tests.compose.expected import AFTER
from tests.compose.page import PAGE, Command, Shell, commands, until
from tests.compose.sandbox import ROOT

TEXT = PAGE.read_text(encoding="utf-8")
ALL = list(commands(TEXT))


def test_every_command_of_the_page_is_one_that_the_check_executes() -> None:
    executed = [command.text.split("  #")[0].strip() for command in ALL]
    outside = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    for mentioned in re.findall(r"`((?:docker compose|curl) [^`]*)`", outside):
        assert any(mentioned in command for command in executed), mentioned
    assert list(dict.fromkeys(command.section for command in ALL)) == list(AFTER)
    assert all(AFTER.values())


def test_a_command_of_the_page_is_good_bash() -> None:
    for command in ALL:
        done = subprocess.run(["bash", "-n", "-c", command.text], capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)


def test_commands_are_read_by_section_and_line() -> None:
    page = (
        "# T\n```bash\nno\n```\n## A\n```bash\na=1   # x\n# only this\n\nb \\\n  "
        "c\n```\n```json\n{}\n```\n## B\n"
    )
    assert list(commands(page)) == [Command("A", "a=1   # x"), Command("A", "b    c")]


def test_the_shell_keeps_folder_and_variables_and_tells_failures(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    shell = Shell(tmp_path, tmp_path / "state", ["word", "never_set"])
    assert shell.run("cd inner", 60) == (0, "", "")
    assert shell.run("word='two  words $(x)'", 60) == (0, "", "")
    assert shell.run('printf "%s" "$word"; pwd', 60) == (
        0,
        f"two  words $(x){tmp_path}/inner\n",
        "",
    )
    assert shell.run("false | cat", 60)[0] == 1
    assert shell.run("sleep 60", 0.1)[0] == 124
    assert shell.run('printf "%s" "$word"', 60)[1] == "two  words $(x)"


def test_a_failure_is_in_the_table_and_in_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    assert report.failed()  # nothing was tried

    def fails() -> None:
        raise AssertionError("the reason")

    assert report.attempt("A", "good  # comment", lambda: None)
    assert not report.failed()
    assert not report.attempt("A", "bad", fails)
    assert report.failed()
    assert "the reason" in capsys.readouterr().out
    assert re.search(r"\| A \| `good` \| ok \| .*\n\| A \| `bad` \| FAILED ", report.table())
    assert report.table().endswith("1 of 2 as they have to be")


def test_until_says_what_it_saw_last() -> None:
    with pytest.raises(AssertionError, match=r"the thing: not within 0 s; last: 'step 3'"):
        until(lambda: {}["step 3"], 0.0, "the thing")


def test_two_checks_in_one_folder_are_one_too_many(tmp_path: Path) -> None:
    if os.getuid() != 0 or missing(own=True):
        pytest.skip("; ".join(missing(own=True)))
    command = [
        sys.executable,
        "-m",
        "tests.compose.check",
        "--local-bases",
        "--folder",
        str(tmp_path),
    ]
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"another check uses {tmp_path}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("options", [[], ["--local-bases"]])
def test_what_is_not_installed_is_named_with_its_fix(tmp_path: Path, options: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.compose.check",
        "--folder",
        str(tmp_path / "check"),
        *options,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    for line in ("docker: apt install docker.io", "debootstrap: apt install debootstrap"):
        assert line in done.stderr
    assert not (tmp_path / "check").exists()
