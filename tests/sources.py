"""The trees of the source files, for tests that read code: each is parsed once in a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "stages", "orchestration", "api")  # each imports only those before it


def sources(*packages: str) -> list[Path]:
    """Return the Python files of ``packages``, sorted by package and path."""
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert files
    return files


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of the tree of ``path`` in the order of ``ast.walk``."""
    return tuple(ast.walk(tree_of(path)))
