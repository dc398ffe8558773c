"""A warehouse and an index for the tests of training."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.index.client import Index
from pipeline.schedule.staleness import StalenessPlan
from pipeline.warehouse.dock import Dock
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import catalogue
from stages.flow.resolver import resolve
from tests.stages.training.claims import GROUPS


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> AsyncIterator[Dock]:
    flow = resolve(GRPO(), catalogue())
    plan = StalenessPlan(0, len(GROUPS), 1)
    await index.init(flow.config(plan), {"published": 0, "trained": 0, "admitted": 0})
    dock = Dock(
        index, flow.schema, worker="test", directory=tmp_path, lease=30.0, slab=2**16, secret=b"x"
    )
    await dock.join(2**22)
    yield dock
    await dock.close()
