"""A sample, from the JSON of ``asample`` to what the service takes, and its answer as protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np
from pydantic import Field

from api.tinker.messages import MESSAGES
from api.tinker.schemas import LARGEST, Integer, Named, Number, Tolerant
from api.tinker.tensors import is_sparse_matrix, refuse, write_tensor
from stages.calls.interface import (
    Matrix,
    SampleOutput,
    SampleRequest,
    SamplingOptions,
)

LENGTH = 1  # stop_reason; 0: stop
NO_LOGPROB = -99999.0  # of an empty cell
Top = Sequence[Sequence[tuple[int, float]]]


class PromptChunk(Tolerant):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(Tolerant):
    chunks: list[PromptChunk]


class Sampling(Tolerant):
    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    seed: Integer | None = None
    stop: str | list[str] | list[Integer] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1, le=LARGEST)
    top_p: float = Field(default=1.0, gt=0, le=1)


class Targets(Tolerant):
    """A matrix of tokens, whole or in CSR form."""

    data: list[int]
    dtype: Literal["int64"] = "int64"
    shape: list[int] = Field(min_length=2, max_length=2)
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def matrix(self) -> Matrix:
        """Return it as the service takes it. Raises CallRefused."""
        parts = (self.data, self.shape, self.sparse_crow_indices, self.sparse_col_indices)
        if any(not -(2**31) <= value < 2**31 for part in parts for value in part or ()):
            _refuse_targets("has a number out of range")
        rows, columns = self.shape
        values = np.array(self.data, np.int64)
        if self.sparse_crow_indices is None:
            if min(rows, columns) < 0 or rows * columns != len(values):
                _refuse_targets(f"has {len(values)} values, and the shape {self.shape}")
            return Matrix((rows, columns), values)
        starts = np.array(self.sparse_crow_indices, np.int64)
        cells = np.array(self.sparse_col_indices or (), np.int64)
        if not is_sparse_matrix((rows, columns), len(values), starts, cells):
            _refuse_targets("is no matrix in CSR form")
        return Matrix((rows, columns), values, starts, cells)


class SampleBody(Tolerant):
    sampling_session_id: Named
    seq_id: Number = 0
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: Sampling = Sampling()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=100)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=100)
    target_prompt_logprobs: Targets | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=100)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1, le=LARGEST)

    def request(self) -> SampleRequest:
        """Return it as the service takes it. Raises CallRefused."""
        tokens = list[int]()
        for number, chunk in enumerate(self.prompt.chunks):
            if chunk.tokens is None:
                key = f"prompt.chunks[{number}].type"
                fix = "send encoded_text with tokens: models read text"
                refuse(key, chunk.type, "is not read here", fix)
            tokens += chunk.tokens
        if tokens and not (min(tokens) >= 0 and max(tokens) < 2**31):
            refuse("prompt", None, "has a token out of range", "correct it")
        params = self.sampling_params
        targets = self.target_prompt_logprobs
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
            targets=None if targets is None else targets.matrix(),
            prompt_draws=self.prompt_alt_tokens_k,
            score_last=self.prompt_logprobs_last_n,
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
    if output.target_logprobs is not None:
        write_tensor(answer.target_prompt_logprobs, output.target_logprobs)
    if output.drawn is not None:
        tokens, logprobs = output.drawn
        write_tensor(answer.prompt_alt_tokens.tokens, Matrix(tokens.shape, tokens))
        write_tensor(answer.prompt_alt_tokens.logprobs, Matrix(logprobs.shape, logprobs))
    return bytes(answer.SerializeToString())


def _refuse_targets(wrong: str) -> NoReturn:
    refuse("target_prompt_logprobs", None, wrong, "send the TensorData of the SDK")


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
