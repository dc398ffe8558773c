"""Rows of the vLLM engine: responses in progress, and the check of the requests that they come
from."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from stages.engines.bounds import LEAST_VLLM
from stages.engines.checks import check_request as check_basics
from stages.engines.protocols import GroupRequest, RequestRefused, Token
from stages.engines.responses import ResponseInProgress, Responses
from stages.engines.vllm.adapter_sets import LoadedSet

NEW = 2**31 - 1  # the priority of a response without tokens


class VllmRow(ResponseInProgress):
    """One response in progress: the tokens that vLLM has made of it, and the request that makes the
    rest. ``alternatives``: to each token of a stream; None: it is no stream. ``never``: the bias of
    tokens that are not sampled."""

    def __init__(
        self,
        request: GroupRequest,
        place: int,
        responses: Responses,
        alternatives: int | None,
        never: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        super().__init__(request, place)
        self.responses = responses
        self.alternatives = alternatives
        self.never = never
        self.request_id = ""  # of the present vLLM request
        # tokens of a stream, with vLLM's logprobs there
        self._undelivered: list[tuple[int, Mapping[int, Any]]] = []
        self.cut = False  # a swap cuts it, if it has a token of this claim

    def add(self, piece: Any, asked: int, version: int, counts_versions: bool) -> None:
        """Append ``piece`` of vLLM's output, to a request that was made at the version ``asked``;
        it is ``version`` now. ``counts_versions``: the last piece has the versions of all tokens.
        Where vLLM does not count, those that arrive at a version were made by it."""
        made_by: int | None = version
        if not counts_versions:
            self.add_version(version, len(piece.token_ids))
        elif asked != version:
            made_by = None
        self.tokens += piece.token_ids
        self.logprobs += [
            position[token].logprob
            for position, token in zip(piece.logprobs or (), piece.token_ids, strict=True)
        ]
        versions = list[int]()
        for span in (piece.weight_versions or ()) if counts_versions else ():
            self.add_version(int(span.version), span.end - span.start)
            versions += [int(span.version)] * (span.end - span.start)
        if self.alternatives is None:
            return
        self._undelivered += zip(piece.token_ids, piece.logprobs or (), strict=True)
        versions = (
            [made_by] * len(self._undelivered)
            if made_by is not None
            else versions[-len(self._undelivered) :]
        )
        for (token, position), version in zip(self._undelivered, versions, strict=False):
            named = self.request.params.logprob_token_ids or likeliest(position, self.alternatives)
            others = tuple(
                (other, position[other].logprob) for other in named if other not in self.never
            )
            self.responses.put(
                Token(
                    self.request.group, self.place, token, position[token].logprob, version, others
                )
            )
        if versions:
            self._undelivered.clear()

    @property
    def longest(self) -> int:
        """Tokens that it may have at the end of this claim."""
        budget = self.request.params.budget
        return min(self.limit, self.begun + budget) if budget else self.limit


def likeliest(position: Mapping[int, Any], count: int) -> list[int]:
    """Return the ``count`` likeliest tokens among vLLM's logprobs at a position."""
    return sorted(position, key=lambda token: position[token].rank)[:count]


async def prompt_logprobs(
    vllm: Any, llm: Any, name: str, ids: list[int], count: int, loaded: LoadedSet
) -> list[Any]:
    """Return what ``llm`` says of a prompt by a request of this ``name``: its logprobs of the tokens
    ``ids`` and of the ``count`` likeliest ones at each position, None at the first one. Empty where
    a swap has aborted the request."""
    params = vllm.SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=count, detokenize=False
    )
    prompt = {"prompt_token_ids": ids, "cache_salt": loaded.salt}
    positions: list[Any] = []
    async with aclosing(llm.generate(prompt, params, name, lora_request=loaded.request)) as outputs:
        async for output in outputs:
            positions = positions or output.prompt_logprobs or []
    return positions


def scored_prompt(
    request: GroupRequest, version: int, positions: list[Any], count: int
) -> list[tuple[Token, int]]:
    """Return the tokens of a prompt after the first one, each with ``count`` alternatives and its
    rank. ``positions``: of :func:`prompt_logprobs`."""
    ids = request.prompt_ids.tolist()
    scored = []
    for token, position in zip(ids[1:], positions[1:], strict=True):
        others = tuple((other, position[other].logprob) for other in likeliest(position, count))
        logprob = position[token]
        prompt_token = Token(request.group, 0, token, logprob.logprob, version, others)
        scored.append((prompt_token, logprob.rank))
    return scored


def check_request(
    request: GroupRequest,
    *,
    vocabulary: int,
    context: int,
    filters: bool,
    adapters: Collection[str] = (),
) -> None:
    """Raise RequestRefused for a request that an engine with these limits cannot serve.

    ``filters``: it was made for top-k and top-p. ``adapters``: the sets that it has.
    """
    check_basics(request, vocabulary=vocabulary, context=context, adapters=adapters)
    params = request.params
    refused = functools.partial(RequestRefused, request.group)
    is_split = any(len(of.token_ids) > of.turn_start for of in request.begun.values())
    if params.stop and (params.budget or is_split):
        fix = "a stop string that a cut splits would be missed: use stop_token_ids"
        raise refused("stop", f"stop is {params.stop}", fix)
    filtered = params.top_k or params.top_p < 1
    if filtered and params.temperature and not filters:
        fix = "top_k and top_p need an engine made with filters=True"
        raise refused("top_p" if params.top_p < 1 else "top_k", f"{params}", fix)
    if params.changes and not filters:
        fix = "it needs an engine made with filters=True"
        raise refused(params.changes[0], f"{params}", fix)
    if 0 < params.temperature < LEAST_VLLM:
        problem = (
            f"temperature is {params.temperature:g}, which vLLM would change to {LEAST_VLLM:g} or "
            f"to 0"
        )
        raise refused("temperature", problem, f"give 0, or {LEAST_VLLM:g} at least")
    is_tempered = params.temperature not in (0.0, 1.0)
    if params.raw_logprobs and is_tempered and not filters:
        fix = "it needs an engine made with filters=True"
        raise refused("raw_logprobs", f"{params}", fix)
    if filters and is_tempered and not params.raw_logprobs:
        fix = "an engine made with filters=True gives logprobs at temperature 0 or 1"
        raise refused("temperature", f"{params}", fix)


def priority(row: VllmRow) -> int:
    """Return vLLM's priority of ``row``, the lower the earlier: responses that go on come before new
    ones, the oldest group first."""
    return row.request.group if row.tokens else NEW


def sampling_params(vllm: Any, row: VllmRow) -> Any:
    """Return vLLM's ``SamplingParams`` for the rest of ``row``."""
    params = row.request.params
    begun = len(row.tokens)
    named = list(params.logprob_token_ids)
    sampling = vllm.SamplingParams(
        max_tokens=row.longest - begun,
        min_tokens=max(0, params.min_tokens - begun + row.turn_start),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        allowed_token_ids=list(params.allowed_token_ids) or None,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # stop_token_ids has all that ends a response
        detokenize=bool(params.stop),
        skip_special_tokens=False,  # a stop string may be one
        spaces_between_special_tokens=False,
        seed=seed_of(row.request.seed, row.place, row.aside + begun),
        # beside that of the sampled token
        **({"logprob_token_ids": named} if named else {"logprobs": row.alternatives or 0}),
        logit_bias={**dict(params.logit_bias), **row.never} or None,
        output_kind=vllm.RequestOutputKind.DELTA,
    )
    if params.bad_words:  # vLLM would make them of texts, by its own tokenizer
        sampling._bad_words_token_ids = [list(word) for word in params.bad_words]
    return sampling


def seed_of(seed: int, place: int, begun: int) -> int:
    """Return the seed of vLLM's random generator for the tokens from ``begun`` on of the response
    at ``place``."""
    digest = hashlib.blake2b(f"{seed} {place} {begun}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
