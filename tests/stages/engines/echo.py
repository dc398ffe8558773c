"""The smallest engine that keeps the contract: it repeats its prompt, each token moved on by the
one weight it has.

    [rollout]
    engine = "tests.stages.engines.echo:engine"

generate ── one task per row ──▶ a token a turn, while the gate is open ──▶ Responses
pause, resume ── shut and open the gate;  load_weights ── between two turns, so that it is a token boundary
cut ── a row with a token leaves with what it has
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from stages.engines.protocols import (
    Completion,
    EngineClosed,
    FinishReason,
    GroupRequest,
    SwapTimes,
    WeightMismatch,
)
from stages.engines.responses import Responses


def engine(
    recipe: Recipe, *, version: int, weights: Path | None, vocabulary: int = 0
) -> EchoRolloutEngine:
    """``vocabulary`` may be given in rollout.options; else it is the tokenizer's."""
    made = EchoRolloutEngine(vocabulary=vocabulary or len(tokenizer_of(recipe)), version=version)
    if weights is not None:  # of a checkpoint from which the run goes on
        made.step = load_file(weights / "model.safetensors")["step"]
    return made


@dataclass(eq=False)
class _Row:
    request: GroupRequest
    place: int
    responses: Responses
    tokens: list[int]
    versions: list[tuple[int, int]]
    begun: int  # tokens of earlier visits

    def end(self, reason: FinishReason) -> None:
        made = torch.tensor(self.tokens)
        certain = torch.zeros(len(self.tokens))  # logprobs: its tokens are certain
        versions = tuple(self.versions)
        self.responses.put(
            Completion(self.request.group, self.place, made, certain, versions, reason)
        )


class EchoRolloutEngine:
    def __init__(self, *, vocabulary: int = 97, version: int = 0) -> None:
        self._vocabulary = vocabulary
        self._version = version
        self.step = torch.ones(1, dtype=torch.int64)
        self._gate = asyncio.Event()
        self._gate.set()
        self._rows: dict[_Row, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        self._refuse_closed()
        for request in requests:
            if request.params.max_tokens < 1:
                raise ValueError(
                    f"group {request.group}: max_tokens is {request.params.max_tokens}; at least 1 "
                    f"is needed"
                )
        responses = Responses(sum(len(request.places) for request in requests), self._abort)
        for request in requests:
            for place in request.places:
                row = _Row(request, place, responses, [], [], 0)
                if begun := request.begun.get(place):
                    row.tokens = begun.token_ids.tolist()
                    row.versions = list(begun.versions)
                    row.begun = len(row.tokens)
                self._rows[row] = asyncio.create_task(self._make(row))
        return responses

    async def load_weights(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        *,
        hold: bool = False,
        cut: bool = False,
    ) -> SwapTimes:
        self._refuse_closed()
        for name in {"step", *weights}:
            if name not in weights or name != "step":
                raise WeightMismatch(f"{name}: {'missing' if name == 'step' else 'unknown'}")
        step = weights["step"]
        if step.shape != self.step.shape or step.dtype != self.step.dtype:
            raise WeightMismatch(
                f"step: {step.dtype} {tuple(step.shape)} offered, the engine has int64 (1,)"
            )
        self.step = step.clone()
        self._version = version
        for row in [row for row in self._rows if cut and len(row.tokens) > row.begun]:
            row.end("cut")
            self._rows.pop(row).cancel()
        if hold:
            self._gate.clear()
        return SwapTimes(exposed=0.0, hidden=0.0)

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor:
        return torch.zeros(len(response_ids))

    async def pause(self) -> None:
        self._gate.clear()

    async def resume(self) -> None:
        self._gate.set()

    async def close(self) -> None:
        self._closed = True
        for row, task in self._rows.items():
            row.responses.put(EngineClosed("the rollout engine was closed"))
            task.cancel()
        await asyncio.gather(*self._rows.values(), return_exceptions=True)
        self._rows.clear()

    async def _make(self, row: _Row) -> None:
        params = row.request.params
        prompt = row.request.prompt_ids
        place = f"{row.request.seed} {row.place}".encode()
        offset = int.from_bytes(hashlib.blake2b(place, digest_size=4).digest(), "big")
        longest = row.request.limit(row.place)
        limit = min(longest, row.begun + params.budget) if params.budget else longest
        reason: FinishReason = "length" if limit == longest else "cut"
        while len(row.tokens) < limit and reason != "stop":
            await asyncio.sleep(0)  # a turn for the others
            await self._gate.wait()
            token = int(prompt[len(row.tokens) % len(prompt)])
            row.tokens.append((token + offset * int(self.step)) % self._vocabulary)
            count = (
                row.versions.pop()[1]
                if row.versions and row.versions[-1][0] == self._version
                else 0
            )
            row.versions.append((self._version, count + 1))
            if row.tokens[-1] in params.stop_token_ids:
                reason = "stop"
        row.end(reason)
        del self._rows[row]

    def _abort(self, responses: Responses) -> None:
        for row in [row for row in self._rows if row.responses is responses]:
            self._rows.pop(row).cancel()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the rollout engine is closed")
