"""Evaluation: held-out prompts, each once, answered by one version."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.engines.mock.engines import MockRolloutEngine
from stages.engines.mock.options import MockRolloutOptions
from stages.engines.protocols import SamplingParams
from stages.models import tiny_tokenizer
from stages.prompts.formatter import Prompt
from stages.prompts.options import PromptOptions
from stages.prompts.sources import load_prompts
from stages.rewards.stage import RewardSet
from stages.rollout.evaluate import Evaluator, distinct_prompts


class Repeating:
    """A source of ``different`` prompts, over and over."""

    def __init__(self, different: int) -> None:
        self.different, self.size = different, None

    def prompt(self, seq: int) -> Prompt:
        text = f"{seq % self.different}="
        return Prompt(torch.tensor([seq % self.different]), text, text, {})


def test_each_prompt_is_asked_once() -> None:
    assert [p.text for p in distinct_prompts(Repeating(5), 3)] == ["0=", "1=", "2="]
    assert [p.text for p in distinct_prompts(Repeating(2), 8)] == ["0=", "1="]


def evaluator(engine: MockRolloutEngine) -> Evaluator:
    tokenizer = tiny_tokenizer()
    split = load_prompts(PromptOptions(source="builtin", task="repeat", held_out=0.2), tokenizer, 0)
    assert split.held_out is not None
    prompts = distinct_prompts(split.held_out, 6)
    params = SamplingParams(max_tokens=6, temperature=1.0)
    return Evaluator(engine, params, RewardSet([("spelling", 1.0)]), tokenizer, prompts, samples=2)


def mock() -> MockRolloutEngine:
    return MockRolloutEngine(MockRolloutOptions(vocabulary=len(tiny_tokenizer()), time_scale=0.001), version=7)


async def test_the_event_has_version_reward_and_samples() -> None:
    engine = mock()
    event = await evaluator(engine).run(7)
    await engine.close()
    assert (event.version, event.count, len(event.samples)) == (7, 6, 2)
    assert 0.0 <= (event.reward_mean or 0.0) <= 1.0
    assert event.samples[0].prompt.endswith("=")


async def test_answers_of_another_version_are_refused() -> None:
    engine = mock()
    running = evaluator(engine)
    weights: dict[str, Any] = {"w": torch.zeros(1)}
    await engine.load_weights(8, weights)
    with pytest.raises(RuntimeError, match="evaluation of version 7 was answered by versions"):
        await running.run(7)
    await engine.close()
