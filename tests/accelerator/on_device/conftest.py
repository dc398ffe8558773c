"""Each test is in a process that has the emulated device."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def npu() -> torch.device:
    return torch.device("npu", 0)


@pytest.fixture
def library() -> Any:
    """The emulated torch_npu, whose counts of calls begin at 0."""
    module = importlib.import_module("torch_npu")
    module.calls.clear()
    module.emptied.clear()
    return module
