"""Samples with the weights of several clients: adapters in one engine, whole models in engines of
their own.

    put(name, rank > 0) ─▶ a set of adapters ──▶ one engine ◀── rows of all names, "" the base ── sample
    put(name, rank 0) ───▶ OpenModels: engines by name ◀───────────────────────── rows of name ── sample

Where the engine has room for some sets alone, those that have requests are there: OpenModels too.
Rows start in the order of the calls: the caller bounds how many a client has in flight.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch

from pipeline.problems import Problem
from stages.calls.interface import (
    ALPHA,
    CallRefused,
    ModelOptions,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplerFailed,
)
from stages.calls.open_models import OpenModels
from stages.calls.prompt_scores import MOST_TOP, Top, check_prompt, score
from stages.engines.protocols import (
    AdaptersRemoved,
    BoundedEngine,
    Completion,
    EngineClosed,
    EngineFailed,
    GroupRequest,
    MultiAdapterEngine,
    PromptScoringEngine,
    RequestRefused,
    RolloutEngine,
    SamplingParams,
    StreamingEngine,
    Token,
    WeightMismatch,
)

MOST_SAMPLES = 1024  # of one request


class SamplingEngine(
    StreamingEngine, PromptScoringEngine, MultiAdapterEngine, BoundedEngine, RolloutEngine, Protocol
):
    """What a sampler needs of an engine."""


class EngineSampler:
    """A :class:`~stages.calls.interface.Sampler` with ``engine``, which it closes.

    ``ends``: the model's end tokens. ``make_whole``: makes an engine of the same model for one of
    rank 0, of which at most ``most_whole`` are open (None: such models are refused). ``room``: sets
    of adapters that the engine has at a time (None: all).
    """

    def __init__(
        self,
        engine: SamplingEngine,
        ends: Sequence[int],
        *,
        make_whole: Callable[[], SamplingEngine] | None = None,
        most_whole: int = 1,
        room: int | None = None,
    ) -> None:
        self._engine = engine
        self._ends = tuple(ends)
        self._options: dict[str, ModelOptions] = {}
        self._whole = None if make_whole is None else OpenModels(make_whole, most_whole)
        self._sets = None if room is None else OpenModels(partial(_AdapterSet, engine), room)
        self._groups = itertools.count()
        self._going = asyncio.Event()
        self._going.set()

    async def put(
        self, name: str, options: ModelOptions, weights: Mapping[str, Any], step: int
    ) -> None:
        """See :class:`~stages.calls.interface.Sampler`. Raises CallRefused: the weights that
        ``name`` has stay."""
        if not name:
            raise CallRefused.of("model", name, "is the base model", "give another name")
        if self._options.get(name, options) != options:
            fix = "remove it first, or keep its options"
            raise CallRefused.of("model", name, f"has {self._options[name]}, not {options}", fix)
        if not options.rank and self._whole is None:
            fix = "use an adapter: a rank of 1 or more"
            raise CallRefused.of("rank", options.rank, "samplers of whole models are off", fix)
        try:
            if (models := self._models_of(options)) is not None:
                await models.put(name, weights, step)
            else:
                await _put(self._engine, name, step, weights)
        except EngineFailed as error:
            raise SamplerFailed(str(error)) from error
        except ValueError as error:  # of weights that do not fit, or no room for more
            raise CallRefused.of("model", name, str(error)) from error
        self._options[name] = options

    async def remove(self, name: str) -> None:
        """See :class:`~stages.calls.interface.Sampler`. Raises CallRefused."""
        options = self._options.pop(name, None)
        if options is None:
            raise CallRefused.of("model", name, "has no weights here")
        if (models := self._models_of(options)) is not None:
            await models.remove(name)
        else:
            await self._engine.remove_adapters(name)

    async def sample(self, name: str, request: SampleRequest, seed: int) -> SampleOutput:
        """See :class:`~stages.calls.interface.Sampler`. ``seed`` is used where the request has
        none.

        Logprobs are those at temperature 1, whatever the request's is. ``stop`` ends a response
        beside the model's end tokens, unless it is empty; the tokens that stop are part of it.
        """
        for field, least, most in (("top_k_sampled", 0, MOST_TOP), ("count", 1, MOST_SAMPLES)):
            if not least <= (value := getattr(request, field)) <= most:
                raise CallRefused.of(field, value, "is out of range", f"give {least} to {most}")
        check_prompt(request)
        if name and name not in self._options:
            raise CallRefused.of("model", name, "has no weights here", "put them first")
        await self._going.wait()
        try:
            async with self._engine_of(name) as (engine, adapters):
                group = self._group(request, seed, adapters, engine.context)
                scores = await score(engine, group, request)
                sequences, cached = await _generate(engine, group, request.top_k_sampled)
                return replace(scores, sequences=sequences, cached_tokens=cached)
        except RequestRefused as error:
            raise CallRefused(*map(_as_sent, error.problems)) from error
        except EngineFailed as error:
            raise SamplerFailed(str(error)) from error
        except (AdaptersRemoved, EngineClosed, WeightMismatch) as error:
            if isinstance(error, EngineClosed) and name in self._options:
                raise
            wrong = str(error) if isinstance(error, WeightMismatch) else "was removed"
            raise CallRefused.of("model", name, wrong) from error

    async def pause(self) -> None:
        """See :class:`~stages.calls.interface.Sampler`. Calls wait too."""
        self._going.clear()
        for engine in self._engines():
            with suppress(EngineClosed):
                await engine.pause()

    async def resume(self) -> None:
        """See :class:`~stages.calls.interface.Sampler`."""
        self._going.set()
        for engine in self._engines():
            with suppress(EngineClosed):
                await engine.resume()

    def _engines(self) -> list[SamplingEngine]:
        return [self._engine, *(self._whole.engines() if self._whole is not None else ())]

    async def close(self) -> None:
        """Close all engines; calls in flight raise EngineClosed. May be called again."""
        if self._whole is not None:
            await self._whole.close()
        await self._engine.close()

    @asynccontextmanager
    async def _engine_of(self, name: str) -> AsyncIterator[tuple[SamplingEngine, str]]:
        """Return the engine of ``name``, and the name of its adapters there."""
        models = self._models_of(self._options[name]) if name else None
        if models is None:
            yield self._engine, name
        else:
            async with models.engine(name) as opened:
                is_set = isinstance(opened, _AdapterSet)
                yield (self._engine, opened.name) if is_set else (opened, "")

    def _models_of(self, options: ModelOptions) -> OpenModels[Any] | None:
        """Return the models of which some are open; None: the engine has all of their adapters."""
        return self._sets if options.rank else self._whole

    def _group(
        self, request: SampleRequest, seed: int, adapters: str, context: int
    ) -> GroupRequest:
        options = request.options
        prompt = torch.tensor(request.prompt)
        if not len(prompt):
            raise CallRefused.of("prompt", None, "has no tokens", "send at least one")
        room = context - len(prompt)
        if room < 1:
            wrong = f"has {len(prompt)} tokens, and the context {context}: there is room for none"
            raise CallRefused.of("prompt", None, wrong, "shorten it")
        if options.top_k < -1:
            raise CallRefused.of(
                "top_k", options.top_k, "is out of range", "give -1 or 0 for all tokens"
            )
        stop = options.stop or ()
        ends = () if options.stop == () else self._ends
        params = SamplingParams(
            max_tokens=room if options.max_tokens is None else options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=max(0, options.top_k),
            stop=tuple(text for text in stop if isinstance(text, str)),
            stop_token_ids=(*ends, *(int(each) for each in stop if not isinstance(each, str))),
            raw_logprobs=True,
        )
        return GroupRequest(
            next(self._groups),
            tuple(range(request.count)),
            prompt,
            params,
            seed if options.seed is None else options.seed,
            is_repeated=True,  # a client asks for the responses to a prompt one by one
            adapters=adapters,
        )


class _AdapterSet:
    """A set of adapters of ``engine``, in the place of an engine of its own."""

    _numbers = itertools.count()

    def __init__(self, engine: SamplingEngine) -> None:
        self.name = f"open-{next(self._numbers)}"
        self._engine = engine
        self._is_loaded = False

    async def load_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        await _put(self._engine, self.name, version, weights)
        self._is_loaded = True

    async def close(self) -> None:
        if self._is_loaded:
            self._is_loaded = False
            await self._engine.remove_adapters(self.name)


async def _put(
    engine: SamplingEngine, name: str, version: int, weights: Mapping[str, torch.Tensor]
) -> None:
    """Give ``engine`` a set of adapters. Raises WeightMismatch, and ValueError without room."""
    rank = next((len(weight) for each, weight in weights.items() if ".lora_A." in each), 1)
    await engine.put_adapters(name, version, weights, scale=ALPHA / rank)


async def _generate(
    engine: SamplingEngine, group: GroupRequest, top_k: int
) -> tuple[list[SampledSequence], int]:
    """Return the responses of ``group`` in order, and how many tokens of its prompt were cached."""
    top = defaultdict[int, list[Top]](list)
    ended: dict[int, Completion] = {}
    responses = engine.stream([group], alternatives=top_k) if top_k else engine.generate([group])
    async with aclosing(cast(Any, responses)) as items:
        async for item in items:
            if isinstance(item, Token):
                top[item.place].append(item.alternatives)
            else:
                ended[item.place] = item
    sequences = [
        SampledSequence(
            ended[place].token_ids.numpy().astype(np.int32),
            ended[place].logprobs.numpy(),
            ended[place].finish_reason == "stop",
            ended[place].versions,
            tuple(top[place]),
        )
        for place in group.places
    ]
    return sequences, min(each.cached_tokens for each in ended.values())


def _as_sent(problem: Problem) -> Problem:
    """Return what an engine says of a request, by the name that its client knows."""
    key, wrong = (text.replace("prompt_ids", "prompt") for text in (problem.key, problem.wrong))
    return replace(problem, key=key, wrong=wrong)
