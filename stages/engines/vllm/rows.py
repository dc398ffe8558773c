"""Rows of the vLLM engine: responses in progress, and the check of the requests that they come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from stages.engines.protocols import Completion, FinishReason, GroupRequest
from stages.engines.requests import check_request as check_basics
from stages.engines.responses import Responses


@dataclass(eq=False)
class VllmRow:
    """One response in progress: the tokens that vLLM has made of it, and the request that makes the rest."""

    request: GroupRequest
    place: int
    responses: Responses
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    asked: str = ""  # id of the present vLLM request
    begun: int = 0  # tokens made before it was claimed this time
    cut: bool = False  # a swap cuts it, if it has a token of this claim

    def __post_init__(self) -> None:
        if has := self.request.begun.get(self.place):
            self.tokens, self.logprobs = has.token_ids.tolist(), has.logprobs.tolist()
            self.versions, self.begun = list(has.versions), len(has.token_ids)

    @property
    def limit(self) -> int:
        """Tokens that it may have at the end of this claim."""
        params = self.request.params
        return min(params.max_tokens, self.begun + params.budget) if params.budget else params.max_tokens

    def add_version(self, version: int, tokens: int) -> None:
        if self.versions and self.versions[-1][0] == version:
            tokens += self.versions.pop()[1]
        self.versions.append((version, tokens))

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            group=self.request.group,
            place=self.place,
            token_ids=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=tuple(self.versions),
            finish_reason=reason,
        )


def check_request(
    request: GroupRequest, *, vocabulary: int, context: int, filters: bool, cuts_stop_strings: bool
) -> None:
    """Raise ``ValueError`` for a request that an engine with these limits cannot serve. ``filters``: it was made for top-k
    and top-p. ``cuts_stop_strings``: its swaps abort requests, so that a stop string may be split between two."""
    check_basics(request, vocabulary=vocabulary, context=context)
    params, where = request.params, f"group {request.group}: "
    if any(len(has.token_ids) >= params.max_tokens for has in request.begun.values()):
        raise ValueError(f"{where}{params}; responses begun with fewer than max_tokens are needed")
    if params.stop and (params.budget or request.begun):
        raise ValueError(
            f"{where}stop is {params.stop}; a stop string that a cut splits would be missed: use stop_token_ids"
        )
    if params.stop and cuts_stop_strings:
        wrong = "a stop string that a swap splits would be missed with pause = 'abort'"
        raise ValueError(f"{where}stop is {params.stop}; {wrong}: use pause = 'keep', or stop_token_ids")
    filtered = params.top_k or params.top_p < 1
    if filtered and params.temperature and not filters:
        raise ValueError(f"{where}{params}; top_k and top_p need an engine made with filters=True")
    if filters and params.temperature not in (0.0, 1.0):
        raise ValueError(f"{where}{params}; an engine made with filters=True gives logprobs at temperature 0 or 1")


def sampling_params(vllm: Any, row: VllmRow) -> Any:
    """Returns vLLM's ``SamplingParams`` for the rest of ``row``."""
    params, begun = row.request.params, len(row.tokens)
    return vllm.SamplingParams(
        max_tokens=row.limit - begun,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # stop_token_ids has all that ends a response
        detokenize=bool(params.stop),
        skip_special_tokens=False,  # a stop string may be one
        spaces_between_special_tokens=False,
        seed=seed_of(row.request.seed, row.place, begun),
        logprobs=0,  # of the sampled token
        output_kind=vllm.RequestOutputKind.DELTA,
    )


def seed_of(seed: int, place: int, begun: int) -> int:
    """Seed of vLLM's random generator for the tokens from ``begun`` on of the response at ``place``."""
    digest = hashlib.blake2b(f"{seed} {place} {begun}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
