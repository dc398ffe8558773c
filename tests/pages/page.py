"""A page of the documentation as a list of blocks: what a reader types, saves and sees.

=================  ==================================================================================================
fence              what it is
=================  ==================================================================================================
``bash``           commands, executed as they stand; in the background where the paragraph above says "a terminal of
                   its own"
``console``        a command after ``$``, and the output that it has
``python``         a program, executed as it stands; saved only where it has a file name
``toml``, ``json`` a part of a recipe, or a file where it has a file name
``text``           a picture, or an output. Directly below a program or commands: exactly what these print
=================  ==================================================================================================

A file's name is its first line, as a comment; where a format has no comments, the end of the
paragraph above: `name`:
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "compose" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
KINDS = ("bash", "console", "json", "python", "text", "toml")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int  # of the page, where the text begins
    above: str  # the paragraph before it
    output: str | None = None  # what stands directly below it, or in it

    @property
    def file(self) -> str:
        """The name under which a reader saves it, or ""."""
        comment = re.match(r"# ([\w-]+\.\w+)$", self.text, re.MULTILINE)
        sentence = re.search(r"`([\w-]+\.\w+)`:$", self.above)
        found = comment or sentence
        return found[1] if found and self.kind in ("json", "python", "toml") else ""

    @property
    def in_own_terminal(self) -> bool:
        return "a terminal of its own" in self.above

    @property
    def commands(self) -> list[str]:
        """The commands of a shell, each in one line, without the variables that are set before
        it."""
        if self.kind not in ("bash", "console"):
            return []
        lines = self.shell.replace("\\\n", " ").splitlines()
        commands = [re.sub(r"^(\w+=(\".*?\"|[^\s$(\"]*)\s*)+(?=\S|$)", "", line) for line in lines]
        return [command for command in commands if command.strip() and not command.startswith("#")]

    @property
    def shell(self) -> str:
        """What a shell executes: of a console, what follows ``$``."""
        if self.kind != "console":
            return self.text
        return "".join(f"{line}\n" for line in re.findall(r"^\$ (.*)$", self.text, re.MULTILINE))

    @property
    def runs(self) -> bool:
        return self.kind in ("bash", "console") or (self.kind == "python" and not self.file)


def needs(page: Path) -> str:
    """What a page says it needs, in the first paragraph below its title, or ""."""
    found = re.match(r"# .*\n\n(Needs: .*(?:\n.+)*)", page.read_text(encoding="utf-8"))
    return found[1] if found else ""


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for fence, below in zip_longest(fences, fences[1:]):
        indent, kind, code = fence.groups()
        code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        above = text[: fence.start()].rstrip("\n").rpartition("\n\n")[2]
        output = re.sub(r"^\$ .*\n", "", code, flags=re.MULTILINE) if kind == "console" else None
        if (
            kind in ("bash", "python")
            and below
            and below[2] == "text"
            and not text[fence.end() : below.start()].strip()
        ):
            output = below[3]
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(kind, code, line, " ".join(above.split()), output))
    return found
