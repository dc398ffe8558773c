"""What errors declare, and who reads it: whether another attempt may succeed, and what is wrong."""

from __future__ import annotations

import ast
import builtins
import importlib
from pathlib import Path

import pytest

from orchestration.run.exit_codes import EXIT_FAILED, EXIT_FATAL, EXIT_NOT_STARTED, EXIT_REWIND
from orchestration.run.worker import CannotStart, NotStarted, exit_code

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["pipeline", "stages", "orchestration", "api"]
TREES = {
    path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
KINDS = {
    "Fatal": [
        *("AlgorithmError", "BoundBroken", "CannotStart", "CheckpointUnusable", "ColumnError"),
        *("DeviceMissing", "DiskRefused", "EngineMissing", "EngineUnknown", "ExtraMissing"),
        *("FilesDamaged", "GateClosed", "ModelNotFound", "NeedsOwnCode", "NeverFits"),
        *("PromptError", "RewardError", "ShardsRefused", "StageError", "TeacherDenied"),
        *("TeacherRefused", "TokenizerFailed", "TooManyDropped", "TooManySkipped", "WrittenTwice"),
    ],
    "Passing": ["SamplesGone", "StageProcessEnded", "StaleHandle"],
}
# Of Python's own, and of those that are neither: a worker that ends with one of them is started again, for some time.
OTHERS = {
    EXIT_FATAL: [FloatingPointError, NotImplementedError],
    EXIT_NOT_STARTED: [NotStarted],
    EXIT_FAILED: [ValueError, OSError, ConnectionError, TimeoutError, MemoryError, RuntimeError],
}


def bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def classes_below(*roots: str) -> dict[str, str]:
    """Module of each class of ours that has one of ``roots`` as a base, by its name."""
    found: dict[str, str] = {}
    known = set(roots)
    while True:
        new = {
            node.name: ".".join(path.with_suffix("").parts)
            for path, tree in TREES.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and node.name not in known and bases(node) & known
        }
        if not new:
            return found
        found |= new
        known |= new.keys()


def made(module: str, name: str) -> Exception:
    error = getattr(importlib.import_module(module), name)
    return error.__new__(error)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_each_error_decides_how_its_worker_exits(kind: str) -> None:
    """A new error joins the list where its kind is meant: a fatal one ends a run at the first attempt."""
    below = classes_below(kind)
    assert sorted(below) == KINDS[kind]
    for name, module in below.items():
        code = EXIT_FATAL if kind == "Fatal" else EXIT_REWIND if name == "SamplesGone" else EXIT_FAILED
        assert exit_code(made(module, name)) == code, name


def test_other_errors_are_tried_again_but_for_what_cannot_be_computed() -> None:
    for code, errors in OTHERS.items():
        for error in errors:
            assert exit_code(error("again")) == code, error
    assert issubclass(CannotStart, RuntimeError)


def test_no_list_of_errors_stands_for_what_they_should_declare() -> None:
    python = [name for name, value in vars(builtins).items() if isinstance(value, type)]
    ours = classes_below(*python) | dict.fromkeys(["Fatal", "Passing"], "")
    listed = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in TREES.items()
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and len({ast.unparse(each).rpartition(".")[2] for each in node.elts} & ours.keys()) > 1
    ]
    assert not listed
