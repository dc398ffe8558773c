"""The tests that take long: `make test` leaves them out, `make test-long` runs them.

    pytest --durations=0 -vv ─▶ python -m tests.long ─▶ tests/long.txt: the tests that take long, by name

A line of the list is a test function, with all its parameters, or one set of its parameters. A test
is long when it takes more than ``MOST`` seconds on two quiet cores. Of each file the shortest one
stays in `make test`, unless it is very long: few parts are without one. A test of both servers,
the embedded one and Redis, runs on the other one in `make test-long` alone where it takes more than
``TWIN`` seconds.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("long.txt")
MOST = 2.0  # seconds that a test takes which is not long
VERY_LONG = 5.0  # seconds of a test that is long although its file has no other
TWIN = 0.5  # seconds of a test on the second server
_LINE = re.compile(r"^\s*([\d.]+)s (?:setup|call|teardown)\s+tests/(\S+?\.py::.+?)\s*$")


def names() -> list[str]:
    return LIST.read_text(encoding="utf-8").splitlines()


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the tests of the list the mark ``long``."""
    listed = {*names()}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in listed or function_of(name) in listed:
            item.add_marker("long")


def function_of(test: str) -> str:
    return test.partition("[")[0]


def choose(seconds: Mapping[str, float]) -> list[str]:
    """Return the names of the long tests among all, of which ``seconds`` has the durations.

    >>> choose({"a.py::x[1]": 9.0, "a.py::x[2]": 8.0, "a.py::y": 0.1, "b.py::z": 3.0})
    ['a.py::x']
    >>> choose({"a.py::x[1]": 9.0, "a.py::x[2]": 1.0, "b.py::y[redis]": 0.6, "b.py::y[valkey]": 0.6})
    ['a.py::x[1]', 'b.py::y[redis]']
    """
    long = {
        test
        for test, duration in seconds.items()
        if duration > (TWIN if "[redis" in test else MOST)
    }
    of_files = defaultdict(set)
    of_functions = defaultdict(set)
    for test in seconds:
        of_files[test.partition("::")[0]].add(test)
        of_functions[function_of(test)].add(test)

    for tests in of_files.values():
        if tests <= long:
            shortest = min(tests, key=lambda test: (seconds[test], test))
            if seconds[shortest] <= VERY_LONG:
                long.remove(shortest)
    return sorted(
        {function_of(test) if of_functions[function_of(test)] <= long else test for test in long}
    )


def main(lines: Iterable[str], factor: float = 1.0) -> None:
    """``factor``: by which the durations are multiplied, less than 1 for those of a busy machine."""
    seconds: dict[str, float] = defaultdict(float)
    for line in lines:
        if match := _LINE.match(line):
            seconds[match[2]] += float(match[1]) * factor
    LIST.write_text("".join(f"{test}\n" for test in choose(seconds)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.stdin, *map(float, sys.argv[1:]))
