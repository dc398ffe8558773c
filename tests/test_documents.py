"""Documents, logs and topics of a run are named in one place: no other code has a key of one, or
reads what it says in another way than its writer."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.documents import BEGIN, FILES, KINDS, declarations, page
from tests.sources import PACKAGES, ROOT, nodes_of, sources

# Calls of the index that take the name of a document, log or topic.
NAMED = ("get", "put", "put_once", "wake", "wait", "woken", "wait_any", "emit")
# Calls of the index for pipeline/documents/kinds.py alone.
PRIMITIVES = (
    *("read_document", "write_document", "remove_document"),
    *("append_log", "log_end", "read_log", "next_entry", "trim_log", "sign_entry"),
)
# A service's own list, in place of a run.
LISTS = ("orchestration/state/registry.py", "api/server/access/tokens.py")


def keys() -> list[str]:
    return [each.key for each in declarations().values()]


def named_elsewhere(path: Path, declared: list[str]) -> list[str]:
    """Lines of a file that name a document, log or topic by a text."""
    text = path.read_text(encoding="utf-8")
    nodes = nodes_of(path)
    has_index = "pipeline.index" in text
    documented = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    plain = {key for key in declared if "{" not in key and re.search("[:-]", key)}
    beginnings = {key.partition("{")[0] for key in declared if "{" in key}
    violations = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if not has_index or node.func.attr not in (*NAMED, *PRIMITIVES):
                continue
            of_index = re.search(r"\bindex$|_index$", ast.unparse(node.func.value))
            arguments = [
                node.args[0],
                *(node.args[0].keys if isinstance(node.args[0], ast.Dict) else ()),
            ]
            by_text = any(
                isinstance(argument, ast.JoinedStr)
                or (isinstance(argument, ast.Constant) and isinstance(argument.value, str))
                for argument in arguments
            )
            if of_index and by_text:
                violations.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.JoinedStr) and isinstance(first := node.values[0], ast.Constant):
            if first.value in beginnings and len(node.values) > 1:
                violations.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Constant) and node.value in plain and id(node) not in documented:
            violations.append(f"line {node.lineno}: {node.value!r}")
    return violations


@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks"])
def test_no_other_file_has_the_key_of_one(folder: str) -> None:
    declared = keys()
    violations = {
        str(path.relative_to(ROOT)): lines
        for path in sources(folder)
        if path.relative_to(ROOT).as_posix() not in FILES
        and (lines := named_elsewhere(path, declared))
    }
    assert not violations, f"declare it in one of {FILES}, and use the declaration: {violations}"


def test_they_are_made_in_their_files_and_read_through_their_kinds_alone() -> None:
    constructions = []
    primitive_calls = []
    for path in sources(*PACKAGES):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func)
            if (
                function in KINDS
                and "pipeline.documents.kinds" in text
                and name not in (*FILES, *LISTS)
            ):
                constructions.append(f"{name}: {ast.unparse(node)}")
            if function.rpartition(".")[2] in PRIMITIVES and not name.startswith("pipeline/index/"):
                primitive_calls.append(f"{name}: {function}")
    assert [each.partition(": ")[0] for each in constructions] == ["pipeline/index/claims.py"], (
        "a stage's topic"
    )
    assert {each.partition(":")[0] for each in primitive_calls} == {"pipeline/documents/kinds.py"}


def test_each_has_a_key_of_its_own_and_somebody_who_writes_and_reads_it() -> None:
    declared = declarations()
    assert len(declared) > 40
    assert [
        key
        for key, count in Counter((each.kind, each.key) for each in declared.values()).items()
        if count > 1
    ] == []
    alone = [
        each.name
        for each in declared.values()
        if each.kind != "Topic" and not (each.writers and each.readers)
    ]
    assert alone == []


def test_the_functions_of_the_index_wake_topics_that_are_declared() -> None:
    topics = {
        each.key
        for each in declarations().values()
        if each.kind == "Topic" and each.file == FILES[-1]
    }
    woken = set()
    for path in (ROOT / "pipeline/index/lua").glob("*.lua"):
        woken |= set(re.findall(r"wake\(run, '(\w+)'", path.read_text(encoding="utf-8")))
    assert woken == topics


def test_keys_that_the_functions_of_the_index_write_are_in_their_list() -> None:
    """The head of base.lua, for people who look into an index; TransferQueue's are at the head of
    their own file."""
    listed = (
        (ROOT / "pipeline/index/lua/base.lua")
        .read_text(encoding="utf-8")
        .partition("\n\nlocal ")[0]
    )
    written = {}
    for path in (ROOT / "pipeline/index/lua").glob("*.lua"):
        text = path.read_text(encoding="utf-8")
        head = "\n".join(
            line for line in text.partition("\n\nlocal ")[0].splitlines() if line.startswith("--")
        )
        for key in re.findall(r"\brun \.\. '([\w:]+)'", text):
            if not re.search(rf"\b{re.escape(key)}", listed + head):
                written[key] = path.name
    assert written == {}


def test_the_page_is_the_one_that_the_code_makes() -> None:
    text = (ROOT / "docs/run-documents.md").read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2] == page().partition(BEGIN)[2], f"make it again: {BEGIN}"
