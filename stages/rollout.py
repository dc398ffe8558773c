"""Rollout: claims groups, hands them to an engine, and lets each response go on as soon as it ends.

    claim groups ──▶ one submission to the engine ──▶ response ends ──▶ commit that row   (no waiting for the slowest)
       ▲ as many as the engine has room for, none that its loaded version may not make
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import groupby

import torch
from tensordict import TensorDict

from pipeline.controller import Output
from pipeline.index import Claim
from stages.engines.protocols import Completion, GroupRequest, RolloutEngine, SamplingParams


class Rollout:
    """``most_rows`` is how many responses this worker holds at once: what the engine decodes, and what waits in it."""

    name = "rollout"
    fetches = ("prompt_ids",)

    def __init__(
        self, engine: RolloutEngine, params: SamplingParams, *, seed: int, group_size: int, most_rows: int
    ) -> None:
        self.engine, self.params, self.seed = engine, params, seed
        self._group_size, self._most_rows = group_size, most_rows
        self.held_back = False  # claims nothing while it is set (an evaluation that must not share its batch)

    def room(self, held: int) -> int:
        return 0 if self.held_back else (self._most_rows - held) // self._group_size

    def version(self) -> int | None:
        return self.engine.version

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        positions = {(row.group, row.place): i for i, row in enumerate(claim.rows)}
        prompts = rows["prompt_ids"].unbind()
        requests = []
        for group, members in groupby(claim.rows, key=lambda row: row.group):
            places = tuple(row.place for row in members)
            prompt = prompts[positions[group, places[0]]].clone()
            requests.append(GroupRequest(group, places, prompt, self.params, group_seed(self.seed, group)))
        async with aclosing(self.engine.generate(requests)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                yield response(positions[completion.group, completion.place], completion)


def group_seed(seed: int, group: int) -> int:
    """The seed of a group's responses: the same whenever and wherever the group is made."""
    return (seed * 0x9E3779B1 + group) & 0x7FFF_FFFF_FFFF


def response(position: int, completion: Completion) -> Output:
    tokens = len(completion.token_ids)
    return Output(
        positions=[position],
        rows={
            "response_ids": [completion.token_ids],
            "rollout_logprobs": [completion.logprobs],
            "versions": [torch.tensor([n for pair in completion.versions for n in pair], dtype=torch.int64)],
            "truncated": torch.tensor([completion.finish_reason == "length"]),
        },
        generated=[(completion.oldest_version, tokens)],
        tokens=tokens,
    )
