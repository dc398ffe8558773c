"""Reference: logprobs of the responses under the frozen reference policy, for algorithms with a KL term."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tensordict import TensorDict

from pipeline.controller import Output, Stage
from pipeline.index.client import Claim
from stages.engines.protocols import TrainEngine
from stages.training.ranks import train_batch


class Reference(Stage):
    """Claims one group at a time, so that bits do not depend on which groups came together."""

    name = "reference"
    fetches: tuple[str, ...] = ("prompt_ids", "response_ids")

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def room(self, held: int) -> int:
        return 0 if held else 1

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        logprobs = await asyncio.to_thread(self.engine.logprobs, train_batch(claim, rows))
        yield Output(range(len(claim)), {"ref_logprobs": logprobs}, tokens=int(claim.tokens.sum()))
