"""Rollout: claims groups, hands them to an engine, and lets each response go on as soon as it ends.

    claim groups ──▶ one submission to the engine ──▶ response ends ──▶ commit that row   (no waiting for the slowest)
       ▲ as many as the engine has room for, none that its loaded version may not make

Responses that end while a commit is under way go out together with the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
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
    fetches: tuple[str, ...] = ("prompt_ids",)

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
        ended: asyncio.Queue[Completion] = asyncio.Queue()
        listening = asyncio.create_task(self._listen(requests, ended))
        try:
            left = len(positions)
            while left:
                first = asyncio.create_task(ended.get())
                await asyncio.wait([first, listening], return_when=asyncio.FIRST_COMPLETED)
                if not first.done():
                    first.cancel()
                    listening.result()  # it ended early: this raises what the engine raised
                    raise RuntimeError(f"the rollout engine ended with {left} of {len(positions)} responses missing")
                together = [first.result()]
                while not ended.empty():
                    together.append(ended.get_nowait())
                left -= len(together)
                yield responses([positions[c.group, c.place] for c in together], together)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, requests: Sequence[GroupRequest], ended: asyncio.Queue[Completion]) -> None:
        async with aclosing(self.engine.generate(requests)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                ended.put_nowait(completion)


def group_seed(seed: int, group: int) -> int:
    """The seed of a group's responses: the same whenever and wherever the group is made."""
    return (seed * 0x9E3779B1 + group) & 0x7FFF_FFFF_FFFF


def responses(positions: Sequence[int], completions: Sequence[Completion]) -> Output:
    """Finished responses as columns."""
    return Output(
        positions=positions,
        rows={
            "response_ids": [c.token_ids for c in completions],
            "rollout_logprobs": [c.logprobs for c in completions],
            "versions": [torch.tensor([n for pair in c.versions for n in pair]) for c in completions],
            "truncated": torch.tensor([c.finish_reason == "length" for c in completions]),
        },
        generated=[(c.oldest_version, len(c.token_ids)) for c in completions],
        tokens=sum(len(c.token_ids) for c in completions),
    )
