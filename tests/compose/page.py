"""The commands of compose/README.md, in order, each executed in the shell that a person would have
who types them all."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.compose.sandbox import ROOT

T = TypeVar("T")

PAGE = ROOT / "compose" / "README.md"


@dataclass(frozen=True)
class Command:
    section: str
    text: str  # one line, with its comment


def commands(page: str) -> Iterator[Command]:
    """What stands in the page's blocks of bash, a line at a time."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        for block in re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    yield Command(title, line)


class Shell:
    """A person's shell: the folder and the variables that a command sets are there for the next
    one."""

    def __init__(self, folder: Path, state: Path, names: list[str]) -> None:
        """``names`` of the variables to keep; ``state``: a folder to keep them in."""
        self._state = state
        self._names = names
        state.mkdir()
        (state / "variables").touch()
        (state / "folder").write_text(str(folder))

    def run(self, command: str, seconds: float) -> tuple[int, str, str]:
        """Exit code, standard output and standard error.

        A command that takes too long has exit code 124.
        """
        script = (
            f'cd "$(cat {self._state}/folder)"\nsource '
            f"{self._state}/variables\n{command}\nstatus=$?\n"
            f"declare -p {' '.join(self._names)} > {self._state}/variables 2>/dev/null\npwd > "
            f"{self._state}/folder\nexit $status\n"
        )
        shell = ["timeout", "--kill-after=30", str(seconds), "bash", "-o", "pipefail", "-c", script]
        done = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr


def variables(lines: list[Command]) -> list[str]:
    """Names of the variables that the commands set."""
    found = (re.match(r"(\w+)=", line.text) for line in lines)
    return [match[1] for match in found if match]


def until(condition: Callable[[], T], seconds: float, what: str) -> T:
    """The first true value of ``condition()``.

    Raises AssertionError, with its last value or error, when it is late.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = condition()
            if value:
                return value
            last: object = value
        except (OSError, subprocess.SubprocessError, LookupError, AssertionError) as error:
            last = error
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s; last: {last}"
        time.sleep(0.5)
