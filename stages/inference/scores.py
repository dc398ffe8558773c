"""Scores of given responses by other models than the policy: logprobs under the frozen reference,
for algorithms with a KL term, and values of the states before the tokens, under the critic that is
trained in the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tensordict import TensorDict

from pipeline.data.columns import Schema
from pipeline.index.client import Claim
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Written
from stages.engines.protocols import TrainEngine
from stages.flow.catalogue import CRITIC, scored_columns
from stages.flow.groups import GROUPS_AT_ONCE
from stages.training.critic import CriticWorker
from stages.training.ranks import train_batch


class Reference(Stage):
    """Claims one group at a time, so that bits do not depend on which groups came together."""

    name = "reference"

    def __init__(self, engine: TrainEngine, schema: Schema) -> None:
        self.engine = engine
        self.fetches = scored_columns(schema)

    def room(self, held: int) -> int:
        return 0 if held else 1

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        logprobs = await asyncio.to_thread(self.engine.logprobs, train_batch(claim, rows))
        yield Written(
            range(len(claim)), rows={"ref_logprobs": logprobs}, tokens=int(claim.tokens.sum())
        )


class Values(Stage):
    """Claims groups once ``may_begin``: a critic that was started again replays its steps first.

    Groups are computed one by one, between two steps of ``critic``.
    """

    name = CRITIC

    def __init__(self, critic: CriticWorker) -> None:
        self.critic = critic
        self.fetches = scored_columns(critic.dock.schema)
        self.may_begin = False

    def room(self, held: int) -> int:
        return 0 if held or not self.may_begin else GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        values = await self.critic.values(claim, rows)
        yield Written(range(len(claim)), rows={"values": values}, tokens=int(claim.tokens.sum()))
