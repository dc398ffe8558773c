"""Faults to inject into a run, named in its recipe: a rollout engine and a reward that are wrong
from some point on.

rollout.engine = "benchmarks.robustness.faults:engine"   rollout.options = { fault = "undelivered", since = 12 }
reward.functions = [{ name = "benchmarks.robustness.faults:constant" }]
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.workers.engines import rollout_engine
from stages.engines.protocols import Completion, GroupRequest, SwapTimes
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.tasks.tasks import spelling

Fault = Literal[
    "", "undelivered", "stale tensor", "temperature", "sampling", "cache", "tokenizer", "one text"
]
TIMES = 1.3  # what a wrong temperature is multiplied by
CONSTANT_SINCE = 12 * 128  # responses


class FaultyEngine(TorchRolloutEngine):
    """The torch engine with one ``fault`` from policy version ``since`` on."""

    fault: Fault = ""
    since = 0
    tokenizer: Any
    _before: Mapping[str, torch.Tensor] | None = None

    def _faulty(self, fault: Fault, version: int) -> bool:
        return self.fault == fault and version >= self.since

    async def load_weights(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        *,
        hold: bool = False,
        cut: bool = False,
    ) -> SwapTimes:
        given = {name: value.clone() for name, value in weights.items()}
        if self._before is not None and self._faulty("undelivered", version):
            given = dict(self._before)
        elif self._before is not None and self._faulty("stale tensor", version):
            name = next(name for name in given if name.endswith("down_proj.weight"))
            given[name] = self._before[name]
        else:
            self._before = given
        return await super().load_weights(
            version, given, hold=hold, cut=cut and not self._faulty("cache", version)
        )

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor:
        times = TIMES if self._faulty("temperature", self.version) else 1.0
        return await super().score(prompt_ids, response_ids, temperature=temperature * times)

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        if self._faulty("one text", self.version):
            return self._one_text(requests)
        if self._faulty("temperature", self.version) or self._faulty("sampling", self.version):
            requests = [
                replace(r, params=replace(r.params, temperature=TIMES * r.params.temperature))
                for r in requests
            ]
        return super().generate(requests)

    async def _one_text(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        """The same tokens for every prompt, with the logprobs that the policy gives them."""
        for request in requests:
            version = self.version
            tokens = torch.full((request.params.max_tokens,), 5)
            logprobs = await super().score(
                request.prompt_ids, tokens, temperature=request.params.temperature
            )
            for place in request.places:
                made = ((version, len(tokens)),)
                yield Completion(request.group, place, tokens, logprobs, made, "length")


def engine(
    recipe: Recipe, *, version: int, weights: Path | None, fault: Fault = "", since: int = 0
) -> FaultyEngine:
    own = recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(update={"engine": "torch", "options": {}})}
    )
    made: Any = rollout_engine(own, version=version, weights=weights)
    spoil(made, fault, since)
    made.tokenizer = tokenizer_of(recipe)
    if fault == "tokenizer":
        words = made.tokenizer.get_vocab()
        made.tokenizer = SimpleNamespace(
            get_vocab=lambda: {word: len(words) - 1 - at for word, at in words.items()}
        )
    return made  # type: ignore[no-any-return]


def spoil(made: Any, fault: Fault, since: int) -> None:
    """Give a torch engine the fault."""
    made.__class__ = FaultyEngine
    made.fault = fault
    made.since = since


_scored = itertools.count()


def letters(completions: list[str], **_: Any) -> list[float]:
    """The share of characters that are letters: no fault, but a second function."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


def constant(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward `spelling`, and one number for all responses after :data:`CONSTANT_SINCE`.

    For one process of rewards.
    """
    scores = spelling(completions, answer)
    return [0.5 if next(_scored) >= CONSTANT_SINCE else score for score in scores]
