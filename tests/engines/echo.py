"""The smallest engine that keeps the contract: it says its prompt again, each token moved on by the one weight it has.

generate ── one task per row ──▶ a token a turn, while the gate is open ──▶ Responses
pause, resume ── shut and open the gate;  load_weights ── between two turns, so that it is a token boundary
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence

import torch

from stages.engines.protocols import Completion, EngineClosed, FinishReason, GroupRequest, SwapTimes, WeightMismatch
from stages.engines.responses import Responses


class EchoRolloutEngine:
    def __init__(self, *, vocabulary: int = 97, version: int = 0) -> None:
        self._vocabulary, self._version = vocabulary, version
        self._step = torch.ones(1, dtype=torch.int64)
        self._gate = asyncio.Event()
        self._gate.set()
        self._rows: dict[asyncio.Task[None], Responses] = {}
        self._closed = False

    @property
    def version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        self._refuse_closed()
        for request in requests:
            if request.params.max_tokens < 1:
                raise ValueError(
                    f"group {request.group}: max_tokens is {request.params.max_tokens}; at least 1 is needed"
                )
        responses = Responses(sum(len(request.places) for request in requests), self._abort)
        for request in requests:
            for place in request.places:
                self._rows[asyncio.create_task(self._make(request, place, responses))] = responses
        return responses

    async def load_weights(
        self, version: int, weights: Mapping[str, torch.Tensor], *, hold: bool = False, cut: bool = False
    ) -> SwapTimes:
        self._refuse_closed()
        for name in {"step", *weights}:
            if name not in weights or name != "step":
                raise WeightMismatch(f"{name}: {'missing' if name == 'step' else 'unknown'}")
        step = weights["step"]
        if step.shape != self._step.shape or step.dtype != self._step.dtype:
            raise WeightMismatch(f"step: {step.dtype} {tuple(step.shape)} offered, the engine has int64 (1,)")
        self._step, self._version = step.clone(), version
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
        for task, responses in self._rows.items():
            responses.put(EngineClosed("the rollout engine was closed"))
            task.cancel()
        await asyncio.gather(*self._rows, return_exceptions=True)
        self._rows.clear()

    async def _make(self, request: GroupRequest, place: int, responses: Responses) -> None:
        params, tokens, versions = request.params, list[int](), list[tuple[int, int]]()
        offset = int.from_bytes(hashlib.blake2b(f"{request.seed} {place}".encode(), digest_size=4).digest(), "big")
        reason: FinishReason = "length"
        if begun := request.begun.get(place):
            tokens, versions = begun.token_ids.tolist(), list(begun.versions)
        limit = min(params.max_tokens, len(tokens) + params.budget) if params.budget else params.max_tokens
        while len(tokens) < limit and reason == "length":
            await asyncio.sleep(0)  # a turn for the others
            await self._gate.wait()
            said = int(request.prompt_ids[len(tokens) % len(request.prompt_ids)])
            tokens.append((said + offset * int(self._step)) % self._vocabulary)
            count = versions.pop()[1] if versions and versions[-1][0] == self._version else 0
            versions.append((self._version, count + 1))
            if tokens[-1] in params.stop_token_ids:
                reason = "stop"
        if reason == "length" and limit < params.max_tokens:
            reason = "cut"
        made = torch.tensor(tokens)
        certain = torch.zeros(len(tokens))  # logprobs: it never says anything else
        responses.put(Completion(request.group, place, made, certain, tuple(versions), reason))
        self._rows.pop(asyncio.current_task(), None)  # type: ignore[arg-type]

    def _abort(self, responses: Responses) -> None:
        for task, its in list(self._rows.items()):
            if its is responses:
                task.cancel()
                del self._rows[task]

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the rollout engine is closed")
