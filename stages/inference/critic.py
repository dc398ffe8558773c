"""Critic: values of the states before the response tokens, under the critic that is trained in the run."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from tensordict import TensorDict

from pipeline.controller import Output, Stage
from pipeline.index.client import Claim
from stages.flow.adapter import GROUPS_AT_ONCE
from stages.flow.catalogue import CRITIC
from stages.training.critic import CriticRank, CriticWorker


class Values(Stage):
    """Claims groups once ``may_begin``: a critic that was started again replays its steps first. Groups are computed one by
    one, between two steps of ``critic``."""

    name = CRITIC
    fetches = CriticRank.fetches

    def __init__(self, critic: CriticWorker) -> None:
        self.critic, self.may_begin = critic, False

    def room(self, held: int) -> int:
        return 0 if held or not self.may_begin else GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        values = await self.critic.values(claim, rows)
        yield Output(range(len(claim)), {"values": values}, tokens=int(claim.tokens.sum()))
