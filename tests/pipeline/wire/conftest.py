"""An arena for each test, and torch on one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.data.arena import Arena


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path / "arena", 1 << 22)
