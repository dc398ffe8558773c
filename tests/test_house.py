"""The house: imports go api → orchestration → stages → pipeline and never back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ["pipeline", "stages", "orchestration", "api"]


@pytest.mark.parametrize("package", FLOORS)
def test_no_package_imports_one_above_it(package: str) -> None:
    above = set(FLOORS[FLOORS.index(package) + 1 :])
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            wrong = {name for name in names if name.partition(".")[0] in above}
            assert not wrong, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} imports {wrong}"


def test_the_flow_alone_needs_no_model_library() -> None:
    wanted = "[name for name in ('transformers', 'vllm', 'ray') if name in sys.modules]"
    code = f"import pipeline.warehouse.dock, pipeline.controller, sys; print({wanted})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
