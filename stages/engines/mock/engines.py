"""Mock engines, without a model: outputs are random but fixed by the seed, durations follow a model
of latency.

    generate ──▶ waiting (begun rows first) ── one of max_rows slots is free ──▶ decoding ── all tokens made ──▶ Completion
                                                                        │
                 one clock for all rows: tokens made per row, d(clock)/dt = row_rate · min(1, saturation_rows / rows)

All decoding rows have one rate, so a row that joins at clock c and has n tokens ends at clock c +
n, however often the rate changes. The engine keeps a heap of those ends and one timer for the
nearest: one wake-up per completion, none per token. Rows end at the model's exact time even if the
timer fires late, so delays of the machine do not add up.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDictBase

from stages.algorithms import TokenBatch
from stages.algorithms.batch import TrainBatch
from stages.algorithms.named import AlgorithmLike, split_gap
from stages.engines.checks import Layout, check_weights, layout_of
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.protocols import (
    Completion,
    EngineClosed,
    FinishReason,
    GroupRequest,
    RequestRefused,
    SwapTimes,
)
from stages.engines.responses import Responses, line_up
from stages.flow.catalogue import TEACHER_IDS, TEACHER_LOGPROBS
from stages.flow.declarations import IN_TRAINING, token_shape


@dataclass(eq=False)
class _Row:
    request: GroupRequest
    place: int
    stream: Responses
    length: int  # tokens of the response when it has ended
    tokens: int  # that it will have at the end of this visit
    finish_reason: FinishReason
    first: float = 0.0  # what the clock shows when its first token begins, or would have begun

    @property
    def begun(self) -> int:
        """Tokens made before the present request."""
        return (
            len(self.request.begun[self.place].token_ids) if self.place in self.request.begun else 0
        )


class MockRolloutEngine:
    """A :class:`~stages.engines.protocols.RolloutEngine` with the latency model above.

    Lengths depend on ``(seed, place)`` alone. Tokens also depend on the bytes of the weights that
    made them, so runs that train on other data or swap at another time have other tokens.
    ``weights``: a folder with the first ones.
    """

    def __init__(
        self, options: MockRolloutOptions, *, version: int = 0, weights: Path | None = None
    ) -> None:
        self._options = options
        first = (
            0
            if weights is None
            else _digest(t for _, t in sorted(load_file(weights / "model.safetensors").items()))
        )
        # from what the clock shows on: version, digest of its weights
        self._spans = [(0.0, version, first)]
        self._layout: Layout | None = None
        self._waiting: deque[_Row] = deque()
        # heap: the clock at its end, order of joining, row
        self._decoding: list[tuple[float, int, _Row]] = []
        self._joined = 0
        self._clock = 0.0
        # model seconds up to which the clock has run; None while it stands still
        self._time: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused = self._swapping = self._closed = False
        self._swaps = asyncio.Lock()

    @property
    def version(self) -> int:
        return self._spans[-1][1]

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        self._check_open()
        stream = Responses(sum(len(request.places) for request in requests), self._abort)
        rows = [
            self._row(request, place, stream) for request in requests for place in request.places
        ]
        self._advance()
        line_up(self._waiting, rows)
        self._admit()
        self._arm()
        return stream

    async def load_weights(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        *,
        hold: bool = False,
        cut: bool = False,
    ) -> SwapTimes:
        self._check_open()
        async with self._swaps:
            # the first weights that are loaded fix the layout of all later ones
            if self._layout is not None:
                check_weights(weights, self._layout)
            digest = _digest(tensor for _, tensor in sorted(weights.items()))
            began = time.perf_counter()
            await self._sleep(self._options.copy_seconds)
            copied = time.perf_counter()
            self._advance()
            self._swapping = True
            self._arm()
            try:
                await self._sleep(self._options.swap_seconds)
                self._layout = layout_of(weights)
                if cut:
                    self._cut()
                self._spans.append((self._clock, version, digest))
                self._paused = self._paused or hold
            finally:
                self._swapping = False
                self._arm()
            self._forget_spans()
            return SwapTimes(exposed=time.perf_counter() - copied, hidden=copied - began)

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor:
        self._check_open()
        return _logprobs(response_ids, self._spans[-1][2])

    async def cut(self) -> None:
        self._advance()
        self._cut()
        self._arm()

    async def pause(self) -> None:
        self._advance()
        self._paused = True
        self._arm()

    async def resume(self) -> None:
        self._paused = False
        self._arm()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in {
            row.stream for row in (*self._waiting, *(row for _, _, row in self._decoding))
        }:
            stream.put(EngineClosed("the rollout engine was closed with this request in flight"))
        self._waiting.clear()
        self._decoding.clear()
        self._arm()

    # --- the clock
    # ----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time() / self._options.time_scale

    def _rate(self) -> float:
        """Return the tokens per second of each decoding row."""
        return self._options.row_rate * min(
            1.0, self._options.saturation_rows / max(1, len(self._decoding))
        )

    def _advance(self) -> None:
        """Advance the clock to the present: rows that have ended leave, each at its own time, and
        waiting rows start."""
        if self._time is None:
            return
        now = self._now()
        while self._decoding:
            end, _, row = self._decoding[0]
            at = self._time + (end - self._clock) / self._rate()
            if at > now:
                break
            heapq.heappop(self._decoding)
            self._clock = end
            self._time = at
            row.stream.put(self._completion(row))
            self._admit()
        self._clock += (now - self._time) * self._rate() if self._decoding else 0.0
        self._time = now

    def _admit(self) -> None:
        while self._waiting and len(self._decoding) < self._options.max_rows:
            row = self._waiting.popleft()
            # The prompt costs as many ticks of the clock as tokens could be made while it is
            # computed alone.
            known = len(row.request.prompt_ids) + row.begun
            row.first = (
                self._clock
                + known / self._options.prefill_rate * self._options.row_rate
                - row.begun
            )
            heapq.heappush(self._decoding, (row.first + row.tokens, self._joined, row))
            self._joined += 1

    def _arm(self) -> None:
        """Set the timer for the next end, or stop the clock when nothing decodes.

        Called after ``_advance``.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._paused or self._swapping or self._closed or not self._decoding:
            self._time = None
            return
        if self._time is None:
            self._time = self._now()
        end = self._time + (self._decoding[0][0] - self._clock) / self._rate()
        self._timer = asyncio.get_running_loop().call_at(end * self._options.time_scale, self._tick)

    def _tick(self) -> None:
        self._advance()
        self._arm()

    def _abort(self, stream: Responses) -> None:
        self._advance()
        self._waiting = deque(row for row in self._waiting if row.stream is not stream)
        self._decoding = [entry for entry in self._decoding if entry[2].stream is not stream]
        heapq.heapify(self._decoding)
        self._admit()
        self._arm()

    def _cut(self) -> None:
        """End the rows with a token of their present request; the others stay. The clock is
        stopped."""
        staying = []
        for end, joined, row in self._decoding:
            token_count = math.floor(self._clock - row.first + 1e-9)
            if token_count > row.begun:
                row.tokens = token_count
                row.finish_reason = "cut"
                row.stream.put(self._completion(row))
            else:
                staying.append((end, joined, row))
        self._decoding = staying
        heapq.heapify(self._decoding)
        self._admit()

    async def _sleep(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds * self._options.time_scale)

    # --- what a row is made of
    # ------------------------------------------------------------------------------------

    def _row(self, request: GroupRequest, place: int, stream: Responses) -> _Row:
        max_tokens = request.params.max_tokens
        budget = request.params.budget
        if max_tokens < 1 or budget < 0:
            problem = f"max_tokens = {max_tokens}, budget = {budget}"
            fix = "give 1 at least, and 0 at least"
            raise RequestRefused(request.group, "max_tokens", problem, fix)
        turn_start = request.turn_start(place)
        limit = request.limit(place)
        seed = request.seed + turn_start + request.aside(place)
        tokens = turn_start + drawn_tokens(self._options, seed, place)
        row = _Row(
            request,
            place,
            stream,
            min(tokens, limit),
            min(tokens, limit),
            "stop" if tokens <= limit else "length",
        )
        if budget and row.begun + budget < row.length:
            row.tokens = row.begun + budget
            row.finish_reason = "cut"
        return row

    def _completion(self, row: _Row) -> Completion:
        request = row.request
        n = row.tokens
        tokens = np.empty(n, dtype=np.int64)
        logprobs = np.empty(n, dtype=np.float32)
        versions: list[tuple[int, int]] = []
        if row.begun:
            begun = request.begun[row.place]
            tokens[: row.begun], logprobs[: row.begun] = (
                begun.token_ids.numpy(),
                begun.logprobs.numpy(),
            )
            versions += begun.versions
        aside = request.aside(row.place)
        for begin, end, version, digest in self._pieces(row):
            random = np.random.default_rng([1, request.seed, row.place, digest])
            drawn = slice(aside + begin, aside + end)
            most = aside + row.length
            tokens[begin:end] = random.integers(self._options.vocabulary, size=most)[drawn]
            logprobs[begin:end] = -random.exponential(0.5, size=most)[drawn]
            # loaded twice in flight
            again = versions.pop()[1] if versions and versions[-1][0] == version else 0
            versions.append((version, again + end - begin))
        if row.finish_reason == "stop" and request.params.stop_token_ids:
            tokens[-1] = request.params.stop_token_ids[0]
        return Completion(
            group=request.group,
            place=row.place,
            token_ids=torch.from_numpy(tokens),
            logprobs=torch.from_numpy(logprobs),
            versions=tuple(versions),
            finish_reason=row.finish_reason,
        )

    def _pieces(self, row: _Row) -> list[tuple[int, int, int, int]]:
        """Return ``(begin, end, version, digest)`` of the tokens of this request; a token belongs
        to the weights that ended it."""
        pieces = []
        end = row.tokens
        for start, version, digest in reversed(self._spans):
            begin = min(end, max(row.begun, math.floor(start - row.first + 1e-9)))
            if begin < end:
                pieces.append((begin, end, version, digest))
            end = begin
            if end == row.begun:
                break
        return pieces[::-1]

    def _forget_spans(self) -> None:
        """Drop the spans that ended before the oldest row in flight began."""
        oldest = min((row.first + row.begun for _, _, row in self._decoding), default=self._clock)
        while len(self._spans) > 1 and self._spans[1][0] <= oldest:
            self._spans.pop(0)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the rollout engine is closed")


def drawn_tokens(options: MockRolloutOptions, seed: int, place: int) -> int:
    """Return the number of tokens of a response before any limit; ``seed`` is its group's."""
    drawn = np.random.default_rng([0, seed, place]).lognormal(0.0, options.sigma)
    return max(1, round(options.median_tokens * drawn))


class MockTrainEngine:
    """A :class:`~stages.engines.protocols.TrainEngine` that takes time and learns nothing.

    Each train batch changes the weights by noise drawn from its bytes (token ids and advantages, in
    their order): two runs have the same weights exactly when they trained on the same data in the
    same order. It takes the time of the algorithm's epochs and mini-batches; as policy scores it
    gives the rollout's logprobs, as values zeros.
    """

    def __init__(self, options: MockTrainOptions, *, seed: int = 0) -> None:
        self._options = options
        self._step = 0
        random = np.random.default_rng([2, seed])
        values = random.standard_normal(options.parameters, dtype=np.float32)
        head = max(1, options.parameters // 4)
        self._weights = {"head.weight": torch.from_numpy(values[:head].copy())}
        if options.parameters > head:
            self._weights["body.weight"] = torch.from_numpy(values[head:].copy())

    def train_batch(self, batch: TensorDictBase, algorithm: AlgorithmLike) -> Mapping[str, float]:
        began = time.perf_counter()
        wanted = {name: by for name, by in algorithm.scores.items() if by in IN_TRAINING}
        zeros = torch.zeros(len(batch["response_ids"].values()))
        scores = {
            n: batch["rollout_logprobs"].values() if by == "policy" else zeros
            for n, by in wanted.items()
        }
        if TEACHER_IDS in wanted:
            [k] = token_shape(algorithm.loss_reads[TEACHER_IDS])
            scores |= dict(zip((TEACHER_LOGPROBS, TEACHER_IDS), _top(len(zeros), k), strict=True))
        train_batch = TrainBatch(batch, algorithm, computed=scores)
        if not train_batch.is_trained.any():
            raise FloatingPointError("loss is not defined: loss_mask leaves no token of the batch")
        candidates = train_batch[algorithm.candidates] if algorithm.candidates else None
        tokens = _tokens(batch, train_batch, candidates)
        with torch.no_grad():
            output = algorithm.loss(tokens)
        measured = {**output.metrics, **tokens.behaviour_gap()}
        gap, metrics = split_gap({name: float(value) for name, value in measured.items()})
        digest = _digest(
            (batch["response_ids"].values(), *(train_batch[name] for name in tokens.rows))
        )
        random = np.random.default_rng([3, self._step, digest])
        norm = 0.0
        for name, tensor in self._weights.items():
            change = torch.from_numpy(random.standard_normal(tensor.shape, dtype=np.float32))
            self._weights[name] = tensor - self._options.learning_rate * change
            norm += float(change.square().sum())
        self._step += 1
        seconds = (
            self._options.step_seconds * algorithm.mini_batches
            + self._options.token_seconds * _fed_tokens(batch)
        )
        self._sleep(seconds * algorithm.epochs, began)
        return {
            "loss": float(output.loss),
            "grad_norm": math.sqrt(norm),
            "learning_rate": self._options.learning_rate,
            **gap,
            **algorithm.finish(metrics),
        }

    def logprobs(self, batch: TensorDictBase) -> torch.Tensor:
        began = time.perf_counter()
        responses = batch["response_ids"]
        values = _logprobs(
            responses.values(), _digest(tensor for _, tensor in sorted(self._weights.items()))
        )
        self._sleep(self._options.logprob_token_seconds * _fed_tokens(batch), began)
        return torch.nested.nested_tensor_from_jagged(values, responses.offsets())

    def top_logprobs(self, batch: TensorDictBase, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens 0 to k - 1 with equal probabilities; see
        :class:`~stages.engines.protocols.TeacherEngine`."""
        began = time.perf_counter()
        responses = batch["response_ids"]
        tops = _top(len(responses.values()), k)
        self._sleep(self._options.logprob_token_seconds * _fed_tokens(batch), began)
        logprobs, tokens = (
            torch.nested.nested_tensor_from_jagged(each.flatten(), responses.offsets() * k)
            for each in tops
        )
        return logprobs, tokens

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return list(self._weights.items())

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "weights": {name: tensor.clone() for name, tensor in self._weights.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = int(state["step"])
        self._weights = {name: tensor.clone() for name, tensor in state["weights"].items()}

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        """Write the weights as ``model.safetensors``; transformers cannot open it as a model."""
        path.mkdir(parents=True, exist_ok=True)
        save_file(dict((state or self.state_dict())["weights"]), path / "model.safetensors")

    def close(self) -> None:
        """Do nothing."""

    def _sleep(self, seconds: float, began: float) -> None:
        """Sleep for the model's duration of the call, less the time that the mock's own work
        took."""
        time.sleep(max(0.0, seconds * self._options.time_scale - (time.perf_counter() - began)))


def _tokens(
    batch: TensorDictBase, given: TrainBatch, candidates: torch.Tensor | None
) -> TokenBatch:
    """Return the whole batch as the algorithm's loss takes it, under weights that have not moved
    since rollout. ``candidates`` [T, k]: all of them are equally probable."""
    groups = batch["group"].unique(return_inverse=True)[1]
    behaviour = batch.get("rollout_logprobs", None)
    logprobs = torch.zeros(int(given.lengths.sum())) if behaviour is None else behaviour.values()
    if candidates is not None:
        of_candidates = _top(*candidates.shape)[0]
        logprobs = torch.cat([logprobs[:, None], of_candidates], 1)
    return given.tokens(
        range(len(given.lengths)),
        groups.tolist(),
        logprobs,
        values=torch.zeros(len(logprobs)),
        total_tokens=int(given.trained.sum()),
        total_rows=int((given.trained > 0).sum()),
        total_groups=int(groups.max()) + 1,
    )


def _top(count: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 and int32 [count, k]: the logprobs of ``k`` tokens and of a tail that are
    equally probable, and the tokens."""
    tokens = torch.arange(k, dtype=torch.int32).expand(count, k)
    return torch.full((count, k), -math.log(k + 1)), tokens.contiguous()


def _logprobs(token_ids: torch.Tensor, digest: int) -> torch.Tensor:
    """Return a fixed number between -2 and 0 for each token id under weights of this ``digest``:
    float32 [T]."""
    return -2.0 * ((token_ids * 2654435761 + digest % 1_000_003) % 1009).to(torch.float32) / 1009


def _fed_tokens(batch: TensorDictBase) -> int:
    prompts = batch["prompt_ids"].offsets().diff().tolist()
    once = dict(zip(batch["group"].tolist(), prompts, strict=True))
    return len(batch["response_ids"].values()) + sum(once.values())


def _digest(tensors: Iterable[torch.Tensor]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")
