"""The programs in the documentation do what the page says: each is run as it stands, and prints what stands below it.
Only the port of a service is another one, so that the tests disturb none."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from api.client.credentials import DEFAULT_SERVER
from tests.api.served import Served

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("sample-flow.md", "from-transfer-queue.md", "client.md")


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


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The one that the programs of client.md talk to."""
    made = Served(tmp_path_factory.mktemp("service") / "data", "--runs", "2")
    made.start()
    yield made
    made.end()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, service: Served) -> dict[Program, tuple[int, str, str]]:
    """Exit code, output and errors of each. They run side by side, as most of their time goes into importing torch."""
    started = {}
    for program in ALL:
        path = tmp_path_factory.mktemp("page") / "program.py"
        path.write_text(program.code.replace(DEFAULT_SERVER, service.url), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", str(path)]
        started[program] = subprocess.Popen(
            command, cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    found = {}
    for program, process in started.items():
        output, errors = process.communicate(timeout=120)
        found[program] = process.returncode, output, errors
    return found


@pytest.mark.parametrize("program", ALL, ids=lambda program: f"{program.page}-{program.number}")
def test_the_programs_of_a_page_print_what_it_says(
    program: Program, results: dict[Program, tuple[int, str, str]]
) -> None:
    code, output, errors = results[program]
    assert code == 0, errors
    assert output == program.output


PLACES = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
IN_README = (
    "docs/api.md",
    "docs/cli.md",
    "docs/client.md",
    "docs/external.md",
    "compose/README.md",
    "docs/images/dashboard-light.png",
)


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "compose" / "README.md", *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: page.name,
)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    assert [
        place for place in PLACES.findall(page.read_text(encoding="utf-8")) if not (page.parent / place).exists()
    ] == []


def test_every_way_to_the_service_is_reached_from_the_readme() -> None:
    linked = PLACES.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(IN_README) <= set(linked)
    assert "images/dashboard-light.png" in PLACES.findall((DOCS / "api.md").read_text(encoding="utf-8"))


def test_two_processes_need_thirty_lines() -> None:
    lines = [line for line in programs("sample-flow.md")[0].code.splitlines() if line.strip()]
    assert len([line for line in lines if not re.match(r"(from|import) ", line)]) <= 30
