"""The tests nearest to what has changed: run while one works on a file.

    changed files ─▶ their modules ─▶ test files that import them, the most particular first ─▶ pytest

    python -m tests.near                      # what differs from the last commit
    python -m tests.near stages/prompts/gate.py       # of these files

A test file is the nearer, the fewer modules of ours it imports beside the changed one; one of the
same path (``stages/prompts/gate.py``, ``tests/stages/test_gate.py``) is the nearest. Long tests are left
out, and what is farther than ``MOST_FILES`` files: this is no substitute for `make test`.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "stages", "orchestration", "api", "benchmarks")
MOST_FILES = 4  # for each changed file


def changed_files() -> list[str]:
    """Return the files that differ from the last commit, also those that git does not know yet."""
    commands = (
        ["git", "diff", "--name-only", "HEAD"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    listed = [subprocess.check_output(command, cwd=ROOT, text=True) for command in commands]
    return "".join(listed).split()


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def imports(path: Path) -> set[str]:
    """Return our modules that the file ``path`` imports, at its top or in a function."""
    modules = set[str]()
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {
        name
        for name in modules
        if name.partition(".")[0] in PACKAGES
        and (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()
    }


def nearest(files: Iterable[str]) -> list[str]:
    """Return the test files nearest to ``files``, which are relative to the repository.

    >>> nearest(["pipeline/first_of.py"])[0]
    'tests/pipeline/test_first_of.py'
    """
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = dict[str, None]()
    for file in files:
        path = ROOT / file
        if path in tests:
            chosen[file] = None
            continue
        module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        mirror = ROOT / "tests" / Path(file).parent / f"test_{path.stem}.py"
        name = module.rpartition(".")[2]
        users = [test for test in tests if name in text_of(test) and module in imports(test)]
        users.sort(key=lambda test: (test != mirror, len(imports(test))))
        if mirror in tests and mirror not in users:
            users.insert(0, mirror)
        chosen.update(dict.fromkeys(str(test.relative_to(ROOT)) for test in users[:MOST_FILES]))
    return list(chosen)


def main(files: list[str]) -> int:
    tests = nearest(files or changed_files())
    if not tests:
        print("No test file imports what has changed; run `make test`.")
        return 0
    print(*tests, sep="\n", flush=True)
    options = ["-m", "not long and not pages", "-n", "2", "--dist", "loadfile"]
    return subprocess.call([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
