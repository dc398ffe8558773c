from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestration.recipe.minimal import MINIMAL


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.toml"
    path.write_text(MINIMAL)
    return path
