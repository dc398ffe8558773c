"""The programs in the documentation do what the page says: each is run as it stands, and prints what stands below it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("sample-flow.md", "from-transfer-queue.md")


@dataclass(frozen=True)
class Program:
    page: str
    number: int
    code: str
    output: str  # empty: the page does not show any


def programs(page: str) -> list[Program]:
    """The Python blocks of a page, each with the text block that follows it, if one does."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    following = [*blocks[1:], ("", "")]
    found = [
        (code, after[1] if after[0] == "text" else "")
        for (kind, code), after in zip(blocks, following, strict=True)
        if kind == "python"
    ]
    return [Program(page, number, *pair) for number, pair in enumerate(found)]


ALL = [program for page in PAGES for program in programs(page)]


def test_every_page_has_programs_that_show_what_they_print() -> None:
    assert {program.page for program in ALL if program.output} == set(PAGES)


@pytest.mark.parametrize("program", ALL, ids=lambda program: f"{program.page}-{program.number}")
def test_the_programs_of_a_page_print_what_it_says(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(program.code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == program.output


def test_two_processes_need_thirty_lines() -> None:
    lines = [line for line in programs("sample-flow.md")[0].code.splitlines() if line.strip()]
    assert len([line for line in lines if not re.match(r"(from|import) ", line)]) <= 30
