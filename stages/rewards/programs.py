"""The reward of programs that the policy writes: the share of a row's tests that they pass.

completion ─▶ its last fence of code ─▶ a process with limits: the program, then each test ─▶ passed / tests

The process runs what a model wrote: this function is called in a sandbox alone. What the program prints
counts for nothing. A test has passed when the process says so by a word that it gets with the tests. A
program that searches the process for that word can still cheat, and harms nothing but its own reward.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import subprocess
import sys
import tempfile
from typing import Any

from stages.tasks.tasks import Completions, text

SECONDS = 5.0  # of a program and its tests
FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
RUN = """
import json, os, resource, sys
for limit, most in {
    resource.RLIMIT_NPROC: 0, resource.RLIMIT_AS: 2**30, resource.RLIMIT_FSIZE: 2**20
}.items():
    resource.setrlimit(limit, (most, most))
program, tests, word = json.load(sys.stdin)
report = os.fdopen(os.dup(1), "w")
silence = os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(silence, stream)
names = {"__name__": "response"}
exec(compile(program, "response", "exec"), names)
for number, test in enumerate(tests):
    try:
        exec(compile(test, "test", "exec"), names)
    except BaseException:
        continue
    print(word, number, file=report, flush=True)
"""


def python_tests(
    completions: Completions,
    tests: list[list[str] | str],
    seconds: list[float] | None = None,
) -> list[float | None]:
    """Return the share of its row's tests that the program in each completion passes.

    The program is the last fence of code, or the whole text where there is none. ``tests``: Python
    statements, such as ``assert add(1, 2) == 3``; those of a list count one by one, a text is one
    test. ``seconds``: longest time of a program with its tests (default: 5). A program that raises
    passes none. A row without tests has no score.
    """
    return [
        _share(text(completion), tests[at], seconds[at] if seconds else SECONDS)
        for at, completion in enumerate(completions)
    ]


def _share(response: str, tests: Any, seconds: float) -> float | None:
    of_row = [tests] if isinstance(tests, str) else tests
    if not of_row:
        return None
    if not isinstance(of_row, list) or not all(isinstance(test, str) for test in of_row):
        raise ValueError(
            f"tests: {tests!r:.200} is no text with Python statements, nor a list of such"
        )
    return passed(program_of(response), of_row, seconds) / len(of_row)


def program_of(response: str) -> str:
    """Return the program in a response.

    >>> program_of("So:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    fences = FENCE.findall(response)
    return str(fences[-1]) if fences else response


def passed(program: str, tests: list[str], seconds: float) -> int:
    """Return how many of ``tests`` hold after ``program``, within ``seconds`` for all together."""
    word = secrets.token_hex(16)
    source = json.dumps([program, tests, word]).encode()
    with tempfile.TemporaryFile() as report:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-I", "-c", RUN],
                input=source,
                stdout=report,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
            )
        report.seek(0)
        lines = {*report.read().decode(errors="replace").splitlines()}
    return sum(f"{word} {number}" in lines for number in range(len(tests)))
