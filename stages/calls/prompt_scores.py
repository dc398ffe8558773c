"""What a sample request asks of its prompt: logprobs, likeliest tokens, targets, draws.

request ──▶ score ──▶ an engine that lets its logits be read: all of it from one forward ──▶ SampleOutput
                └───▶ another one: what its score_prompt gives; targets and draws are refused
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from stages import device as devices
from stages.calls.interface import CallRefused, Matrix, SampleOutput, SampleRequest
from stages.engines.protocols import GroupRequest, PromptReadingEngine, PromptScoringEngine

MOST_TOP = 1024  # alternatives to a token
SLICE_VALUES = 1 << 24  # logits that are worked on at once
Top = tuple[tuple[int, float], ...]


def check_prompt(request: SampleRequest) -> None:
    """Raise CallRefused for what no prompt of this length has."""
    tokens = len(request.prompt)
    counts = {"top_k_prompt": request.top_k_prompt, "prompt_alt_tokens_k": request.prompt_draws}
    for name, count in counts.items():
        if not 0 <= count <= MOST_TOP:
            raise CallRefused.of(name, count, "is out of range", f"give 0 to {MOST_TOP}")
    last = request.score_last
    if last is not None and not 1 <= last < tokens:
        wrong = f"is out of range for a prompt of {tokens} tokens"
        raise CallRefused.of(
            "prompt_logprobs_last_n", last, wrong, "give 1 to one less than it has"
        )
    if last is not None and not (request.prompt_logprobs or request.top_k_prompt):
        raise CallRefused.of(
            "prompt_logprobs_last_n", last, "is of no logprobs", "ask for these too"
        )
    targets = request.targets
    if targets is None:
        return
    if targets.shape[0] != tokens - 1:
        wrong = f"has {targets.shape[0]} rows, for a prompt of {tokens} tokens"
        raise CallRefused.of("target_prompt_logprobs", None, wrong, f"give {tokens - 1} rows")
    ids = targets.values
    if not (ids >= 0).any() or ids.min() < -1:
        wrong = "names no token" if len(ids) == 0 or ids.max() < 0 else f"has {ids.min()}"
        raise CallRefused.of("target_prompt_logprobs", None, wrong, "give tokens, and -1 for none")
    if len(ids) > MOST_TOP * (tokens - 1):
        wrong = f"has {len(ids)} values, for a prompt of {tokens} tokens"
        fix = f"give at most {MOST_TOP} for each token after the first"
        raise CallRefused.of("target_prompt_logprobs", None, wrong, fix)


async def score(
    engine: PromptScoringEngine, group: GroupRequest, request: SampleRequest
) -> SampleOutput:
    """Return what ``request``, whose prompt is that of ``group``, asks of it, without sequences.
    Raises CallRefused."""
    begin = len(request.prompt) - (request.score_last or len(request.prompt) - 1)
    reader = PromptReader(group, request)
    places = [int(place) for place in reader.target_places[:1]]
    places += [1] if request.prompt_draws else []
    if places and not isinstance(engine, PromptReadingEngine):
        name = "prompt_alt_tokens_k" if request.prompt_draws else "target_prompt_logprobs"
        wrong = "needs the logits of the prompt, which the engine that samples here does not give"
        raise CallRefused.of(name, None, wrong, "leave it out")
    places += [begin] if request.prompt_logprobs or request.top_k_prompt else []
    if not places:
        return SampleOutput(())
    if isinstance(engine, PromptReadingEngine):
        parts = await engine.read_prompt(group, min(places), reader.read)
        return reader.joined(list(itertools.chain.from_iterable(parts)), begin)
    scored = await engine.score_prompt(group, alternatives=request.top_k_prompt)
    tokens = [token for token, _ in scored[begin - 1 :]]
    logprobs = np.array([token.logprob for token in tokens], np.float32)
    part = _Part(logprobs, [token.alternatives for token in tokens])
    return reader.joined([part], begin)


@dataclass
class _Part:
    """Answers at consecutive places: ``logprobs`` float32 [T] of the prompt's tokens, the likeliest
    tokens, logprobs of the targets, and what is drawn [T, K] with its logprobs."""

    logprobs: np.ndarray
    top: list[Top] = field(default_factory=list)
    targets: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    drawn: tuple[np.ndarray, np.ndarray] | None = None


class PromptReader:
    """Reads from logits what ``request`` asks of the prompt of ``group``.

    ``target_places``: the place in the prompt of each target, in order.
    """

    def __init__(self, group: GroupRequest, request: SampleRequest) -> None:
        self._ids = group.prompt_ids
        self._request = request
        self._temperature = group.params.temperature
        targets = request.targets or Matrix((0, 0), np.empty(0, np.int64))
        self._is_target = targets.values >= 0
        self._targets = torch.from_numpy(targets.values[self._is_target])
        self.target_places = targets.rows[self._is_target] + 1
        digest = hashlib.blake2b(f"prompt {group.seed}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(int.from_bytes(digest, "little")))
        shape = max(0, len(self._ids) - 1), request.prompt_draws
        self._points = torch.from_numpy(generator.random(shape))

    def read(self, place: int, logits: torch.Tensor) -> list[_Part]:
        """Return the answers at ``place`` and those after it, whose tokens ``logits`` float32 [T, V]
        predict. Raises CallRefused."""
        vocabulary = logits.shape[1]
        if len(self._targets) and (highest := int(self._targets.max())) >= vocabulary:
            fix = f"the model knows 0..{vocabulary - 1}"
            raise CallRefused.of("target_prompt_logprobs", highest, "is no token of the model", fix)
        rows = max(1, SLICE_VALUES // vocabulary)
        starts = range(place, place + len(logits), rows)
        return [
            self._part(start, part) for start, part in zip(starts, logits.split(rows), strict=True)
        ]

    def _part(self, place: int, logits: torch.Tensor) -> _Part:
        end = place + len(logits)
        logprobs = logits.log_softmax(-1)
        part = _Part(_gather(logprobs, self._ids[place:end, None])[:, 0])
        if self._request.top_k_prompt:
            top = logprobs.topk(min(self._request.top_k_prompt, logprobs.shape[1]))
            cells = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            part.top = [tuple(zip(tokens, values, strict=True)) for tokens, values in cells]
        first, last = np.searchsorted(self.target_places, (place, end))
        if first < last:
            rows = torch.from_numpy(self.target_places[first:last] - place)
            columns = self._targets[first:last]
            device = logits.device
            chosen = logprobs[devices.put(rows, device), devices.put(columns, device)]
            part.targets = chosen.cpu().numpy()
        if self._request.prompt_draws:
            tokens = self._draw(self._points[place - 1 : end - 1], logits).cpu()
            part.drawn = tokens.numpy(), _gather(logprobs, tokens)
        return part

    def _draw(self, points: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return tokens int64 [T, K], by inverting the cumulative distribution at ``points``."""
        if not self._temperature:
            return logits.argmax(-1, keepdim=True).expand(points.shape)
        dtype = devices.widest_float(logits.device)
        ends = (logits / self._temperature).softmax(-1, dtype=dtype).cumsum(-1)
        total = ends[:, -1:].contiguous()
        # no rounding makes it the total, beyond which there is no token
        sought = devices.put(points.to(dtype), logits.device) * total
        sought = sought.minimum(total.nextafter(torch.zeros_like(total)))
        return torch.searchsorted(ends, sought, right=True).clamp_(max=logits.shape[1] - 1)

    def joined(self, parts: Sequence[_Part], begin: int) -> SampleOutput:
        """Return the answers of ``parts``, which are consecutive and go to the prompt's end; logprobs
        and likeliest tokens from the place ``begin`` on."""
        request = self._request
        length = len(self._ids)
        targets = None
        if request.targets is not None:
            values = np.zeros(len(self._is_target), np.float32)
            values[self._is_target] = np.concatenate([part.targets for part in parts])
            targets = replace(request.targets, values=values)
        logprobs = np.full(length, np.nan, np.float32)
        drawn = np.empty(self._points.shape, np.int64), np.empty(self._points.shape, np.float32)
        top: list[Top] = [()] * begin
        place = length - sum(len(part.logprobs) for part in parts)
        for part in parts:
            skipped = max(0, begin - place)
            end = place + len(part.logprobs)
            logprobs[place + skipped : end] = part.logprobs[skipped:]
            top += part.top[skipped:]
            if part.drawn is not None:
                drawn[0][place - 1 : end - 1], drawn[1][place - 1 : end - 1] = part.drawn
            place = end
        return SampleOutput(
            (),
            logprobs if request.prompt_logprobs else None,
            tuple(top) if request.top_k_prompt else (),
            target_logprobs=targets,
            drawn=drawn if request.prompt_draws else None,
        )


def _gather(logprobs: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    """Return the logprobs float32 [T, K] of ``tokens`` [T, K] at each place."""
    chosen = logprobs.gather(-1, devices.put(tokens, logprobs.device))
    return chosen.cpu().numpy()
