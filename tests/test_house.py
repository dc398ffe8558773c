"""The layout of the four packages: direction of imports, no circles, and sizes that a reader can
hold in the head."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import PACKAGES, ROOT, nodes_of, sources

# keys of a recipe's section
SIZES = ("dp", "dp_replicate", "tp", "cp", "context_parallel", "pp", "vpp", "ep")
FILE_TOKENS = 4600
CLASS_TOKENS = 2800
LINE_COLUMNS = 100
VAGUE_NAMES = [
    "found",
    "wrong",
    "one",
    "left",
    "given",
    "own",
    "kept",
    "made",
    "of",
    "which",
    "mine",
    "told",
]
VAGUE_SHARE = 0.015  # of all stores to variables
# private names of libraries, which modules of ours have too
FOREIGN = {
    "_parameters",
    "_buffers",
    "_values",
    "_offsets",
    "_lengths",
    "_writer",
    "_make",
    "_exit",
}
FILES_IN_FOLDER = 12


@functools.cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """The modules that a file imports, at its top, in a function or for type checkers, with their
    lines."""
    imported = list[tuple[str, int]]()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imported += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:  # a module of a package, or a name of a module
                submodule = f"{node.module}.{alias.name}"
                exists = (ROOT / submodule.replace(".", "/")).with_suffix(".py").exists()
                imported.append((submodule if exists else node.module, node.lineno))
    return tuple(imported)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_one_above_it(package: str) -> None:
    above = set(PACKAGES[PACKAGES.index(package) + 1 :])
    for path in sources(package):
        violations = {
            f"{name} (line {line})"
            for name, line in imports(path)
            if name.partition(".")[0] in above
        }
        assert not violations, f"{path.relative_to(ROOT)} imports {violations}"


def fail_at_a_circle(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(reversed(error.args[1])))


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {module_of(path): path for path in sources(*PACKAGES)}
    fail_at_a_circle(
        {
            module: {name for name, _ in imports(path) if name in files and name != module}
            for module, path in files.items()
        }
    )


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Each folder is a room: what lies in it, without what lies in folders of its own."""
    files = {module_of(path): path for path in sources(*PACKAGES)}
    graph: dict[str, set[str]] = {str(path.parent): set() for path in files.values()}
    for path in files.values():
        rooms = {str(files[name].parent) for name, _ in imports(path) if name in files}
        graph[str(path.parent)] |= rooms - {str(path.parent)}
    fail_at_a_circle(graph)


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstring_lines(nodes: Iterable[ast.AST]) -> dict[int, int]:
    """The last line of each docstring, by its first one."""
    return {
        node.lineno: node.end_lineno or node.lineno
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def code_tokens(source: str, nodes: Iterable[ast.AST]) -> list[tokenize.TokenInfo]:
    """The tokens of ``source`` without comments, docstrings and layout: what its size is counted
    in."""
    documented = docstring_lines(nodes)
    return [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in documented)
    ]


def test_files_and_classes_are_short() -> None:
    long = []
    for path in sources(*PACKAGES):
        source = path.read_text(encoding="utf-8")
        nodes = nodes_of(path)
        rows = [token.start[0] for token in code_tokens(source, nodes)]
        name = path.relative_to(ROOT)
        if len(rows) > FILE_TOKENS:
            long.append(f"{name}: {len(rows)} tokens")
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                last = node.end_lineno or node.lineno
                size = sum(node.lineno <= row <= last for row in rows)
                if size > CLASS_TOKENS:
                    long.append(f"{name}: class {node.name} has {size} tokens")
    assert not long, f"at most {FILE_TOKENS} tokens a file and {CLASS_TOKENS} a class: {long}"


def test_lines_of_code_are_at_most_a_hundred_columns_wide() -> None:
    """Pictures in docstrings may be wider, and so may a comment for a checker after the code."""
    wide = []
    for path in sources(*PACKAGES):
        source = path.read_text(encoding="utf-8")
        pictures = set[int]()
        for first, last in docstring_lines(nodes_of(path)).items():
            pictures.update(range(first, last + 1))
        for number, line in enumerate(source.splitlines(), 1):
            code = re.sub(r"  # (type: ignore|noqa).*", "", line)
            if len(code) > LINE_COLUMNS and number not in pictures:
                wide.append(f"{path.relative_to(ROOT)}:{number}")
    assert not wide, f"wider than {LINE_COLUMNS} columns: {wide}"


def test_folders_hold_a_dozen_files_at_most() -> None:
    full = {}
    for package in (*PACKAGES, "benchmarks"):
        for folder in [
            ROOT / package,
            *(path for path in (ROOT / package).rglob("*") if path.is_dir()),
        ]:
            if folder.name != "__pycache__":
                full[str(folder.relative_to(ROOT))] = sum(
                    file.is_file() and file.name not in ("__init__.py", "py.typed")
                    for file in folder.iterdir()
                )
    assert not (
        crowded := {folder: count for folder, count in full.items() if count > FILES_IN_FOLDER}
    ), crowded


def test_the_flow_alone_needs_no_model_library() -> None:
    wanted = "[name for name in ('transformers', 'vllm', 'ray') if name in sys.modules]"
    code = f"import pipeline.warehouse.dock, pipeline.worker.controller, sys; print({wanted})"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert out.stdout.strip() == "[]"


def test_few_files_read_the_sizes_of_a_parallel_strategy() -> None:
    """What else depends on them asks a layout for what they mean (stages/parallel/layout.py).

    Process groups of the same names, as ``meshes.tp``, are no sizes.
    """
    readers: dict[str, list[str]] = {}
    for path in sources(*PACKAGES):
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in SIZES
                and isinstance(node.ctx, ast.Load)
            ):
                owner = ast.unparse(node.value)
                if not owner.endswith("meshes"):
                    readers.setdefault(str(path.relative_to(ROOT)), []).append(
                        f"{owner}.{node.attr}"
                    )
    assert len(readers) <= 8, readers


def test_no_private_name_of_another_module_is_used() -> None:
    """Those of libraries are left out: torch has no public way to some of its parts."""
    files = sources(*PACKAGES)
    private = {path: set(private_names(nodes_of(path))) for path in files}
    not_foreign = set[str]().union(*private.values()) - FOREIGN
    used = []
    for path in files:
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(tuple(PACKAGES)):
                names = [alias.name for alias in node.names if is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and node.attr in not_foreign:
                inherited = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                names = [] if inherited or node.attr in private[path] else [node.attr]
            else:
                continue
            used += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in names]
    assert not used


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The private names that a module gives: to functions, classes, attributes and variables."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if is_private(name):
            yield name


def test_variables_are_named_for_what_they_hold() -> None:
    """Few stores go to names that say how a value was come by, and not what it is."""
    counts = Counter(
        node.id
        for path in sources(*PACKAGES)
        for node in nodes_of(path)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    vague = {name: counts[name] for name in VAGUE_NAMES if counts[name]}
    share = sum(vague.values()) / counts.total()
    print(f"{share:.2%} of {counts.total()} stores go to {vague}")
    assert share <= VAGUE_SHARE, vague
