"""The documents and logs of a run, as the code declares and uses them.

Makes the table of docs/run-documents.md.

documents.py files ──▶ declarations ─┐
all other sources ──▶ uses ──────────┴▶ page: python -m tests.documents docs/run-documents.md
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.sources import PACKAGES, ROOT, nodes_of, sources, tree_of

FILES = [
    "orchestration/state/documents.py",
    "stages/weights/documents.py",
    "pipeline/documents/flow.py",
]
KINDS = ("Document", "Log", "Topic")
WRITES = ("put", "put_once", "entry", "append")
REMOVES = ("remove", "trim")
BEGIN = "<!-- made by `python -m tests.documents docs/run-documents.md` -->\n"


@dataclass
class Declaration:
    """A document, log or topic. ``writers`` and ``readers``: the modules that use it so."""

    name: str
    kind: str
    key: str
    type: str
    about: str
    removed: str
    file: str
    writers: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)


@cache
def declarations() -> dict[str, Declaration]:
    """All declarations by name, with the modules that use them.

    The text below each one is required.
    """
    declared: dict[str, Declaration] = {}
    for file in FILES:
        body = tree_of(ROOT / file).body
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(statement, ast.Assign | ast.AnnAssign):
                continue
            call = statement.value
            if not isinstance(call, ast.Call) or (kind := _kind(call)) is None:
                continue
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            name = ast.unparse(target)
            assert isinstance(following, ast.Expr), f"{file}: no text below {name} says what it is"
            assert isinstance(following.value, ast.Constant), f"{file}: no text below {name}"
            about, _, removed = str(following.value.value).partition("\n\nremoved: ")
            key = ast.literal_eval(call.args[0])
            declared[name] = Declaration(
                name, kind, key, _type(statement, call), _line(about), _line(removed), file
            )
    for path in sources(*PACKAGES):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for name, method in uses(path, declared):
            if method in WRITES:
                declared[name].writers.add(module)
            elif method not in REMOVES:
                declared[name].readers.add(module)
            if method == "put_once":  # its result is what there is
                declared[name].readers.add(module)
    return declared


def uses(path: Path, declared: dict[str, Declaration]) -> Iterator[tuple[str, str]]:
    """Each use of a declaration in a file: its name, and the method, "" where it is handed on.

    A log that an attribute holds is used by the methods of that attribute.
    """
    text = path.read_text(encoding="utf-8")
    if "documents" not in text:
        return
    nodes = nodes_of(path)
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and node.module
        and f"{node.module.replace('.', '/')}.py" in FILES
        for alias in node.names
        if alias.name in declared
    }
    held: dict[str, str] = {}  # attribute or variable → the log that it holds
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function = node.value.func
            if (
                isinstance(function, ast.Attribute)
                and function.attr == "at"
                and ast.unparse(function.value) in imported
            ):
                held[ast.unparse(node.targets[0])] = ast.unparse(function.value)
    for node in nodes:
        used = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        name = held.get(used, used)
        if name not in imported or isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        parent = parents[node]
        method = parent.attr if isinstance(parent, ast.Attribute) else ""
        if method != "at":
            yield name, method


def page() -> str:
    """The table, as Markdown."""
    declared = declarations()
    lines = [BEGIN]
    for file in FILES:
        lines += [
            f"## `{file}`\n",
            "| key | value | what it says | written by | read by |",
            "| --- | --- | --- | --- | --- |",
        ]
        for each in (
            each for each in declared.values() if each.file == file and each.kind != "Topic"
        ):
            key = f"doc:{each.key}" if each.kind == "Document" else each.key
            about = f"{each.about} Removed {each.removed}." if each.removed else each.about
            lines.append(
                f"| `{key}` | {each.type} | {about} | {_modules(each.writers)} | "
                f"{_modules(each.readers)} |"
            )
        lines += ["", "| topic | woken when |", "| --- | --- |"]
        for each in (
            each for each in declared.values() if each.file == file and each.kind == "Topic"
        ):
            lines.append(f"| `wake:{each.key}` | {each.about} |")
        lines.append("")
    return "\n".join(lines)


def _modules(modules: set[str]) -> str:
    return ", ".join(f"`{module}`" for module in sorted(modules))


def _kind(call: ast.Call) -> str | None:
    text = ast.unparse(call.func)
    return (
        text.partition(".")[0]
        if text in (*KINDS, "Document.of_class", "Document.of_json")
        else None
    )


def _type(statement: ast.Assign | ast.AnnAssign, call: ast.Call) -> str:
    if isinstance(statement, ast.AnnAssign):
        written = re.sub(r"^\w+\[(.*)\]$", r"\1", ast.unparse(statement.annotation))
    else:
        written = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
    form = ast.unparse(call.func).partition(".")[2]
    if form == "of_class":
        return f"JSON of `{ast.literal_eval(call.args[1])}`"
    if form == "of_json":
        return f"JSON, `{written}`"
    match = re.search(r"lambda \w+: (\w+)", written)
    return f"`{match[1]}`" if match else f"`{written}`"


def _line(text: str) -> str:
    return " ".join(text.split())


def main(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    (ROOT / path).write_text(text.partition(BEGIN)[0] + page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
