"""Reference: logprobs of the responses under the frozen reference policy, for algorithms with a KL term."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import torch
from tensordict import TensorDict

from pipeline.controller import Output
from pipeline.index.client import Claim
from stages.engines.protocols import TrainEngine


class Reference:
    """Claims ``groups_at_once`` groups; the engine takes them one by one, so bits do not depend on who came together."""

    name = "reference"
    fetches: tuple[str, ...] = ("prompt_ids", "response_ids")

    def __init__(self, engine: TrainEngine, *, groups_at_once: int = 1) -> None:
        self.engine, self._groups = engine, groups_at_once

    def room(self, held: int) -> int:
        return 0 if held else self._groups

    def version(self) -> int | None:
        return None

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        rows["group"] = torch.from_numpy(claim.group.astype("int64"))
        rows["place"] = torch.from_numpy(claim.place.astype("int64"))
        logprobs = await asyncio.to_thread(self.engine.logprobs, rows)
        yield Output(range(len(claim)), {"ref_logprobs": logprobs}, tokens=int(claim.tokens.sum()))
