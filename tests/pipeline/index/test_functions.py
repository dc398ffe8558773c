"""The function library and the client belong together: one typed method for each function, and no
other callers."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.index.calls import _PARTS
from pipeline.index.client import Index

ROOT = Path(__file__).resolve().parents[3]
INDEX = ROOT / "pipeline" / "index"
# classes that own a function library of their own
OWNERS = {ROOT / "orchestration" / "state" / "registry.py"}


def test_every_lua_file_is_part_of_the_library() -> None:
    assert sorted(_PARTS) == sorted(path.stem for path in (INDEX / "lua").glob("*.lua"))


def test_every_function_is_called_by_exactly_one_method() -> None:
    library = "".join(path.read_text() for path in (INDEX / "lua").glob("*.lua"))
    client = "".join(path.read_text() for path in INDEX.glob("*.py"))
    functions = re.findall(r"^define\('(\w+)'", library, re.M)
    calls = re.findall(r"\.(?:call|_call_raw)\(\s*\"(\w+)\"", client)
    assert len(functions) > 40
    assert sorted(calls) == sorted(functions)


def test_no_other_module_calls_a_function_by_its_name() -> None:
    pattern = re.compile(r"index\.(?:call|_call_raw|_reply)\(")
    for package in ("pipeline", "stages", "orchestration", "api", "benchmarks", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            if path not in OWNERS and path != Path(__file__):
                assert not pattern.search(path.read_text()), (
                    f"{path}: give the function a typed method in {INDEX}"
                )


def test_every_method_has_a_docstring() -> None:
    for name in dir(Index):
        if not name.startswith("_"):
            member = getattr(Index, name)
            assert (member.fget if isinstance(member, property) else member).__doc__, name
