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
    "docs/agents.md",
    "docs/cluster.md",
    "docs/engines.md",
    "docs/external.md",
    "docs/moving.md",
    "docs/planner.md",
    "docs/rewards.md",
    "docs/runs.md",
    "docs/serving.md",
}


PROGRAMS = ("curl", "jq", "openssl")  # that a page may need beside an installation


def chosen(page: Path) -> list[Block]:
    return [block for block in runnable(page) if not is_excepted(page, block)]


def params() -> list[object]:
    found = []
    for page in PAGES:
        if any(block.runs for block in chosen(page)):
            name = str(page.relative_to(ROOT))
            found.append(
                pytest.param(page, id=name, marks=[pytest.mark.pages] if name in LONG else [])
            )
    return found


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", params())
def test_a_page_runs_in_order_as_it_stands(page: Path, tmp_path: Path) -> None:
    if lacking := [
        name for name in PROGRAMS if f"`{name}`" in needs(page) and not shutil.which(name)
    ]:
        pytest.skip(f"{', '.join(lacking)} not installed")
    code, errors = execute(page, chosen(page), tmp_path, timeout=1740)
    assert code == 0, errors


PAGE = """# A page

Needs: bash.

```python
# greeting.py
WORD = "hello"
```

```python
from greeting import WORD

print(WORD)
```

```text
hello
```

```bash
word=world   # for the next block
```

```bash
echo $word
```

```text
world
```
"""


def outcome(text: str, folder: Path) -> tuple[int, str]:
    page = folder / "page.md"
    page.write_text(text)
    return execute(page, runnable(page), folder, timeout=120, patience=2)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ("", "", ""),
        ("word=world", "false", "page.md, the block of line 21: false: exit code 1"),
        (
            "echo $word",
            "echo $word | grep moon | cat",
            "page.md, the block of line 25: cat: exit code 1",
        ),
        ("```text\nhello", "```text\nhullo", "-hullo\n+hello"),
        ("```text\nworld", "```text\nword", "-word\n+world"),
        ("echo $word", "sleep 600 &\necho $word", "left over:\n/proc/"),
        ("print(WORD)", "print(word)", "NameError: name 'word' is not defined"),
    ],
    ids=[
        "right",
        "exit code",
        "pipe",
        "output of a program",
        "output of a command",
        "left over",
        "program",
    ],
)
def test_a_page_that_is_wrong_is_found(right: str, wrong: str, error: str, tmp_path: Path) -> None:
    code, errors = outcome(PAGE.replace(right, wrong), tmp_path)
    assert (code != 0, errors if not error else "") == (bool(error), "")
    assert error in errors
