"""A run of tests that ends in time: what does not begin before ``--until`` is not run, and is named.

    --until: no test begins ──▶ GRACE ──▶ what still goes on is ended by its time limit

Neither is a failure, unless the tests are run again because they failed (``--last-failed``): those
have failed. The order is by the worth of a file to the commit: first the tests nearest to the files
of the last commits, then all others, in an order that the commit decides, so that commits take
turns. Fixtures are torn down in every case: no process stays behind.
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections import Counter
from collections.abc import Generator

import pytest

from tests.near import nearest
from tests.sources import ROOT

GRACE = 90.0  # seconds that a test has which began just before the end
COMMITS = 5  # the last ones, whose files come first
NOT_RUN = "not run for want of time"
_cut = pytest.StashKey[float]()  # when the test is ended, in seconds of time.time()


class Budget:
    """A plugin. ``until``: seconds since the epoch. ``grace``: seconds. ``must_run``: a test that is
    left out fails."""

    def __init__(self, until: float, grace: float = GRACE, must_run: bool = False) -> None:
        self._until = until
        self._end = until + grace
        self._must_run = must_run

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        near = {file: place for place, file in enumerate(nearest(changed_files()))}
        commit = git("rev-parse", "HEAD")

        def turn(item: pytest.Item) -> tuple[int, str, str]:
            file = item.nodeid.partition("::")[0]
            digest = hashlib.sha256(f"{commit} {file}".encode()).hexdigest()
            return near.get(file, len(near)), digest, file

        items.sort(key=turn)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout reads the limit
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        now = time.time()
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
        if now < self._until and now + limit > self._end:
            item.add_marker(pytest.mark.timeout(self._end - now), append=False)
            item.stash[_cut] = self._end
        return (yield)

    @pytest.hookimpl(tryfirst=True)  # before fixtures are set up
    def pytest_runtest_setup(self) -> None:
        if time.time() >= self._until:
            if self._must_run:
                pytest.fail(NOT_RUN, pytrace=False)
            pytest.skip(NOT_RUN)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        is_cut = time.time() >= item.stash.get(_cut, float("inf")) - 1
        if report.failed and is_cut and not self._must_run:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {NOT_RUN}")
        return report


def summary(stats: dict[str, list[object]]) -> list[str]:
    """Lines that say which files have tests that were not run, with their number."""
    skipped = [each for each in stats.get("skipped", []) if isinstance(each, pytest.TestReport)]
    left_out = Counter(
        report.nodeid.partition("::")[0] for report in skipped if NOT_RUN in str(report.longrepr)
    )
    if not left_out:
        return []
    names = [f"  {count:4d} {file}" for file, count in sorted(left_out.items())]
    return [f"{left_out.total()} tests of {len(left_out)} files, {NOT_RUN}:", *names]


def changed_files() -> list[str]:
    """Return the files that the last commits have changed, the latest first."""
    files = git("log", f"-{COMMITS}", "--name-only", "--format=")
    return [*dict.fromkeys(file for file in files.split() if (ROOT / file).exists())]


def git(*arguments: str) -> str:
    """Return what git says, nothing where there is no repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
