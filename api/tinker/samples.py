"""A sample, from the JSON of ``asample`` to what the service takes, and its answer as protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from api.tinker.messages import MESSAGES
from api.tinker.schemas import Named, Number, Tolerant
from pipeline.problems import Problem
from stages.calls.interface import CallRefused, SampleOutput, SampleRequest, SamplingOptions

LENGTH = 1  # stop_reason; 0: stop
NO_LOGPROB = -99999.0  # of an empty cell
Top = Sequence[Sequence[tuple[int, float]]]


class PromptChunk(Tolerant):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(Tolerant):
    chunks: list[PromptChunk]


class Sampling(Tolerant):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(Tolerant):
    """What is not of the service has one value alone: what a client sends that does not use it."""

    sampling_session_id: Named
    seq_id: Number = 0
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: Sampling = Sampling()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=100)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=100)
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: None = None

    def request(self) -> SampleRequest:
        """Return it as the service takes it. Raises CallRefused."""
        tokens = list[int]()
        for number, chunk in enumerate(self.prompt.chunks):
            if chunk.tokens is None:
                key = f"prompt.chunks[{number}].type"
                fix = "send encoded_text with tokens: models read text"
                raise CallRefused(Problem(key, chunk.type, "is not read here", fix))
            tokens += chunk.tokens
        if tokens and not (min(tokens) >= 0 and max(tokens) < 2**31):
            raise CallRefused(Problem("prompt", None, "has a token out of range", "correct it"))
        params = self.sampling_params
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        options = SamplingOptions(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=None if stop is None else tuple(stop),  # type: ignore[arg-type]
            temperature=params.temperature,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
        )
        return SampleRequest(
            prompt=np.array(tokens, np.int64),
            options=options,
            count=self.num_samples,
            prompt_logprobs=bool(self.prompt_logprobs),
            top_k_prompt=self.topk_prompt_logprobs,
            top_k_sampled=self.topk_sample_logprobs,
        )


def write_sample(output: SampleOutput) -> bytes:
    """Return the answer to a sample."""
    answer = MESSAGES["SampleResponse"](prompt_cache_hit_tokens=output.cached_tokens)
    for sampled in output.sequences:
        sequence = answer.sequences.add(stop_reason=0 if sampled.stopped else LENGTH)
        sequence.tokens = sampled.tokens.astype("<i4").tobytes()
        sequence.logprobs = sampled.logprobs.astype("<f4").tobytes()
        sequence.versions.extend(number for run in sampled.versions for number in run)
        if sampled.top:
            _write_top(sequence.topk_sampled_logprobs, sampled.top)
    if output.prompt_logprobs is not None:
        answer.prompt_logprobs = output.prompt_logprobs.astype("<f4").tobytes()
    if output.prompt_top:
        _write_top(answer.topk_prompt_logprobs, output.prompt_top)
    return bytes(answer.SerializeToString())


def _write_top(message: Any, top: Top) -> None:
    width = max(map(len, top))
    tokens = np.zeros((len(top), width), "<i4")
    logprobs = np.full((len(top), width), NO_LOGPROB, "<f4")
    for row, cells in enumerate(top):
        for column, (token, logprob) in enumerate(cells):
            tokens[row, column] = token
            logprobs[row, column] = logprob
    message.token_ids = tokens.tobytes()
    message.logprobs = logprobs.tobytes()
    message.k = width
    message.length = len(top)
