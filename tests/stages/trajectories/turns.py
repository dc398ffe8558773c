"""A run whose rows go between environment and rollout, without processes and without an engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.data.columns import Schema
from pipeline.index.client import Claim, Index, RunConfig, StageSpec
from pipeline.warehouse.dock import Dock
from stages.flow.catalogue import ENDED, ENVIRONMENT, PROMPT, RESPONSE, TRAJECTORY
from stages.flow.declarations import column

MADE = {**RESPONSE, **TRAJECTORY, **ENDED}
COLUMNS = {**PROMPT, **MADE, "reward": "float32"}
SCHEMA = Schema([column(name, kind) for name, kind in COLUMNS.items()])
STAGES = (
    StageSpec(ENVIRONMENT, "groups", SCHEMA.mask(PROMPT), SCHEMA.mask(MADE)),
    StageSpec("rollout", "groups", 0, 0, takes_turns_with=ENVIRONMENT),
    StageSpec("reward", "rows", SCHEMA.mask(MADE), SCHEMA.mask(["reward"])),
    StageSpec("update", "batch", SCHEMA.mask([*MADE, "reward"]), 0),
)
ARENA = 4 << 20


@asynccontextmanager
async def flow(url: str, directory: Path) -> AsyncIterator[Dock]:
    """A run of its own, with P = 1 and S = 3."""
    index = Index(url, uuid.uuid4().hex[:8])
    dock = Dock(index, SCHEMA, worker="a", directory=directory / index.run, slab=0)
    await index.init(RunConfig(STAGES, 1, 3, 1, 3), {"published": 0, "trained": 0, "admitted": 0})
    await dock.join(ARENA)
    yield dock
    await dock.close()
    await index.erase()
    await index.close()


async def admit(dock: Dock, *rows: Mapping[str, Any], group: int = 0, samples: int = 1) -> None:
    """Let groups in, one for each of ``rows``, which have a ``prompt``."""
    fields = [{name: value for name, value in row.items() if name != "prompt"} for row in rows]
    prompts = {
        "prompt_ids": [torch.tensor([5, 6]) for _ in rows],
        "given": [json.dumps(row.get("prompt", "")) for row in rows],
        "fields": [json.dumps(each) for each in fields],
    }
    await dock.admit([(group + at, samples) for at in range(len(rows))], prompts)


async def claimed(dock: Dock, stage: str, most: int = 100, version: int = 0) -> Claim:
    claim = await dock.claim(stage, most, version=version if stage == "rollout" else None)
    assert claim is not None, f"{stage} finds nothing"
    return claim
