"""The commands and programs of every page, executed in order as they stand.

`make test` has the short pages, `make test-pages` all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pages.excepted import is_excepted
from tests.pages.page import PAGES, ROOT, Block, needs
from tests.pages.shell import execute, missing, runnable

# Pages of more than about twenty seconds on two cores.
LONG = {
    "README.md",
}


PROGRAMS = ("curl", "jq", "openssl")  # that a page may need beside an installation


def chosen(page: Path) -> list[Block]:
    return [block for block in runnable(page) if not is_excepted(page, block)]


def params() -> list[object]:
    found = []
    for page in PAGES:
        if any(block.runs for block in chosen(page)):
            name = str(page.relative_to(ROOT))
            found.append(pytest.param(page, id=name, marks=[pytest.mark.pages] if name in LONG else []))
    return found


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", params())
def test_a_page_runs_in_order_as_it_stands(page: Path, tmp_path: Path) -> None:
    if lacking := [name for name in PROGRAMS if f"`{name}`" in needs(page) and not shutil.which(name)]:
        pytest.skip(f"{', '.join(lacking)} not installed")
    code, errors = execute(page, chosen(page), tmp_path, timeout=840)
    assert code == 0, errors
