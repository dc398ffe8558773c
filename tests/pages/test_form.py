"""The form of the pages: what each needs stands at its top, each block is of a kind that is known,
and nothing is left out of the tests but what is excepted by name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from api.cli.main import app
from tests.pages.excepted import COMMANDS, WHOLE, is_excepted, why
from tests.pages.page import KINDS, PAGES, ROOT, blocks, needs
from tests.pages.shell import READY

PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
MARKDOWN = [*PAGES, ROOT / "CHANGELOG.md"]
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")
INLINE = re.compile(r"`((?:asyncdock|make|python -m) [^`]+)`")


def prose(page: Path) -> str:
    return re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


@each_page
def test_a_page_says_what_it_needs(page: Path) -> None:
    commands = [command for block in blocks(page) for command in block.commands]
    if any(block.runs for block in blocks(page)):
        assert needs(page), "its first paragraph is 'Needs: …': what to install, how long it takes"
    if re.search(
        r"^(sudo )?(make |python -m "
        r"(benchmarks|tests)\.)",
        "\n".join(commands),
        re.MULTILINE,
    ):
        assert "a clone" in needs(page)


@each_page
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    assert {block.kind for block in blocks(page)} <= set(KINDS)
    indented = re.findall(
        r"^ {4}(?:\$ )?(?:sudo )?(?:asyncdock|python|make) "
        r".*$",
        prose(page),
        re.MULTILINE,
    )
    assert not indented, "a command stands in a fenced block"


@each_page
def test_a_block_is_excepted_as_a_whole(page: Path) -> None:
    for block in blocks(page):
        if is_excepted(page, block):
            assert [command for command in block.commands if not why(page, command)] == [], (
                block.line
            )
            assert not block.file


@each_page
def test_a_saved_file_is_used_below(page: Path) -> None:
    every = blocks(page)
    for number, block in enumerate(every):
        if block.file:
            below = "".join(other.text for other in every[number + 1 :] if other.runs or other.file)
            assert re.search(rf"\b{Path(block.file).stem}\b", below), (
                f"{block.file} is used by no command"
            )


def test_nothing_is_excepted_that_no_page_has() -> None:
    commands = {
        (name, command)
        for name, page in zip(PAGE_IDS, PAGES, strict=True)
        for block in blocks(page)
        for command in block.commands
    }
    assert [
        start for start in COMMANDS if not any(command.startswith(start) for _, command in commands)
    ] == []
    assert set(WHOLE) <= {name for name, _ in commands}


# --- commands that are not executed, in blocks and in the text
# ----------------------------------------------------------


def unknown(words: list[str]) -> list[str]:
    """What the command line does not know of ``words``: commands, and options that begin with a
    dash."""
    command = typer.main.get_command(app)
    rest = words
    while rest and rest[0] in getattr(command, "commands", ()):
        command, rest = command.commands[rest[0]], rest[1:]  # type: ignore[attr-defined]
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        return [rest[0]]
    options = {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    options |= {"--help", "--trace", "--install-completion", "--show-completion"}
    return [word for word in rest if word.startswith("--") and word.split("=")[0] not in options]


def test_a_word_that_the_command_line_does_not_know_is_found() -> None:
    assert unknown(["runs", "start", "RECIPE", "--watch"]) == []
    assert unknown(["runs", "begin"]) == ["begin"]
    assert unknown(["rnus"]) == ["rnus"]
    assert unknown(["plan", "run", "tiny", "--serach"]) == ["--serach"]


@each_page
def test_commands_that_are_not_executed_are_known(page: Path) -> None:
    left_out = [
        command for block in blocks(page) if is_excepted(page, block) for command in block.commands
    ]
    targets = re.findall(
        r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for command in [*left_out, *INLINE.findall(prose(page))]:
        first, *words = shlex.split(re.sub(r"[\[\]]", " ", command.partition(" #")[0]))
        if first == "asyncdock":
            assert unknown(words) == [], command
        if first == "make" and "/" not in words[0]:
            assert words[0] in targets, command


# --- links
# --------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", MARKDOWN, ids=[*PAGE_IDS, "CHANGELOG.md"])
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    reached = set()
    pending = [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        reached.add(page)
        names = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8"))]
        targets = {(page.parent / name).resolve() for name in names if name}
        targets |= {
            target / "README.md"
            for target in targets
            if target.is_dir() and (target / "README.md").exists()
        }
        pending += [target for target in targets - reached if target.suffix == ".md"]
    assert set(PAGES) - reached == set()


def test_the_terminals_of_their_own_say_when_they_are_ready() -> None:
    last = [
        block.commands[-1]
        for page in PAGES
        for block in blocks(page)
        if block.in_own_terminal and block.commands
    ]
    assert len(last) >= 5
    assert [command for command in last if not command.startswith(tuple(READY))] == []


def test_two_processes_need_thirty_lines() -> None:
    program = next(
        block for block in blocks(ROOT / "docs" / "sample-flow.md") if block.kind == "python"
    )
    lines = [line for line in program.text.splitlines() if line.strip()]
    assert len([line for line in lines if not re.match(r"(from|import) ", line)]) <= 30


def test_every_page_is_in_the_index_of_the_documentation() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
