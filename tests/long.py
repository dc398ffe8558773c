"""The tests that take long: `make test` leaves them out, `make test-long` runs them.

    pytest --durations=0 ─▶ python -m tests.long ─▶ tests/long.txt: the tests that took most of the time, by name

A test is one function with all its parameters. Of each file the shortest stays in `make test`,
unless it is very long: few parts are without one.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("long.txt")
SHARE = 0.3  # of all seconds, which the tests that are not in the list take together
VERY_LONG = 0.005  # of all seconds
_LINE = re.compile(r"^\s*([\d.]+)s (?:setup|call|teardown)\s+tests/(\S+?\.py::[\w:]+)")


def names() -> list[str]:
    return LIST.read_text(encoding="utf-8").split()


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the tests of the list the mark ``long``."""
    listed = {*names()}
    for item in items:
        if item.nodeid.removeprefix("tests/").partition("[")[0] in listed:
            item.add_marker("long")


def choose(seconds: dict[str, float], share: float = SHARE) -> list[str]:
    """The longest tests, without which the others take ``share`` of all ``seconds``; of a file one
    stays out.

    >>> choose({"a.py::x": 500.0, "a.py::y": 0.1, "b.py::z": 0.2, "c.py::v": 0.4, "c.py::w": 0.3}, share=0.0)
    ['a.py::x', 'c.py::v']
    """
    remaining = sum(seconds.values())
    most = share * remaining
    very_long = VERY_LONG * remaining
    chosen = []
    of_file = defaultdict(set)
    for test in seconds:
        of_file[test.partition("::")[0]].add(test)
    for test in sorted(seconds, key=lambda test: -seconds[test]):
        others = of_file[test.partition("::")[0]]
        if remaining <= most:
            break
        if len(others) > 1 or seconds[test] > very_long:
            others.remove(test)
            remaining -= seconds[test]
            chosen.append(test)
    return sorted(chosen)


def main(lines: Iterable[str]) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for line in lines:
        if match := _LINE.match(line):
            seconds[match[2]] += float(match[1])
    LIST.write_text("".join(f"{test}\n" for test in choose(seconds)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.stdin)
