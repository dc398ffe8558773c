from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.compat.extras import is_installed
from tests.orchestration.recipe.minimal import MINIMAL


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.toml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture(autouse=True)
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM counts as installed: its recipes are checked without it."""
    here = lambda module: module == "vllm" or is_installed(module)  # noqa: E731
    monkeypatch.setattr("orchestration.recipe.checks.machine.is_installed", here)
