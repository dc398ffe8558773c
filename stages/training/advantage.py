"""Advantage: claims groups whose rows all have their reward, and says how much better each is than its group."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import torch
from tensordict import TensorDict

from pipeline.controller import Output
from pipeline.index.client import Claim
from stages.algorithms import Algorithm

GROUPS_AT_ONCE = 256


class Advantage:
    name = "advantage"
    fetches: tuple[str, ...] = ("reward",)

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def room(self, held: int) -> int:
        return GROUPS_AT_ONCE

    def version(self) -> int | None:
        return None

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        advantage = advantages(self.algorithm, rows["reward"], claim.group.tolist())
        yield Output(range(len(claim)), {"advantage": advantage}, tokens=int(claim.tokens.sum()))


def advantages(algorithm: Algorithm, rewards: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
    """Advantages float32 [B] of rows with ``rewards`` float32 [B]; ``groups`` names the group of each row."""
    out = torch.empty_like(rewards)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    for at in members.values():
        out[at] = algorithm.advantages(rewards[at])
    return out
