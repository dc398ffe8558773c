"""Evaluation: held-out prompts, each once, answered by one version."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from api.telemetry.progress import Progress
from api.telemetry.trackers import Points
from api.terminal.plain import plain_line
from api.terminal.report import samples_markdown, summarize
from orchestration.history.lines import event_json
from pipeline.data.events import EvaluationEvent, Event
from stages.engines.mock.engines import MockRolloutEngine
from stages.engines.mock.options import MockRolloutOptions
from stages.engines.protocols import SamplingParams
from stages.model.load import tiny_tokenizer
from stages.prompts.formatter import Prompt
from stages.prompts.rows.options import PromptOptions
from stages.prompts.sources import load_prompts
from stages.rewards.stage import ErrorPolicy, RewardSet
from stages.rollout.evaluate import Evaluation, Evaluator, distinct_prompts


class Repeating:
    """A source of ``different`` prompts, over and over."""

    def __init__(self, different: int) -> None:
        self.different = different
        self.size = None

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
    return MockRolloutEngine(
        MockRolloutOptions(vocabulary=len(tiny_tokenizer()), time_scale=0.001), version=7
    )


def test_sampled_answers_have_random_numbers_of_their_own_and_always_the_same() -> None:
    greedy = evaluator(mock())
    sampled = replace(greedy, is_sampled=True)
    assert greedy.request(3).params.temperature == 0
    assert [sampled.request(n).params.temperature for n in range(3)] == [1.0] * 3
    assert len({sampled.request(number).seed for number in range(3)}) == 3
    assert sampled.request(2) == sampled.request(2)


async def test_the_event_has_version_reward_and_samples() -> None:
    engine = mock()
    event = await evaluator(engine).run(7)
    await engine.close()
    assert (event.version, event.count, len(event.samples)) == (7, 6, 2)
    assert 0.0 <= (event.reward_mean or 0.0) <= 1.0
    assert event.samples[0].prompt.endswith("=")


def judges(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """Two judges that answer, of five; of the sixth prompt none applies."""
    return [
        (1.0, math.nan, 1.0, math.nan, math.nan, None)[number] for number in range(len(completions))
    ]


def lengths(completions: list[str], **_: Any) -> list[float | None]:
    return [None, *[0.5] * (len(completions) - 2), None]


def failing(completions: list[str], **_: Any) -> list[float]:
    return [math.nan for _ in completions]


async def evaluated(functions: list[Any], count: int, **policy: Any) -> EvaluationEvent:
    engine = mock()
    rewards = RewardSet(
        [(f"{__name__}:{name}", weight) for name, weight in functions], policy=ErrorPolicy(**policy)
    )
    asked = replace(evaluator(engine), rewards=rewards, samples=count)
    event = await replace(asked, prompts=asked.prompts[:count]).run(7)
    await engine.close()
    return event


@pytest.mark.parametrize("on_error", ["drop", "zero"])
async def test_an_answer_whose_reward_failed_is_in_no_mean(on_error: str) -> None:
    """Of five judges three fail: 2 answers, 1.0 on average, whatever a failure costs in
    training."""
    event = await evaluated([("judges", 1.0)], 5, on_error=on_error)
    assert (event.count, event.failed, event.absent, event.reward_mean) == (2, 3, 0, 1.0)
    assert [answer.reward for answer in event.samples] == [1.0, None, 1.0, None, None]
    assert "judges' returned nan as a score" in event.reason


async def test_of_several_functions_the_others_count_where_one_does_not_apply() -> None:
    """By hand: judges 1, -, 1, -, -, none; lengths none, .5 ×4, none: rewards 1, -, 1 + 0.25, -, -,
    none."""
    event = await evaluated([("judges", 1.0), ("lengths", 0.5)], 6)
    assert (event.count, event.failed, event.absent, event.reward_mean) == (2, 3, 1, 1.125)
    names = [f"{__name__}:judges", f"{__name__}:lengths"]
    assert event.functions == dict(zip(names, (1.0, 0.5), strict=True))


async def test_an_evaluation_without_a_score_has_none(tmp_path: Path) -> None:
    event = await evaluated([("failing", 1.0)], 4)
    assert (event.count, event.failed, event.reward_mean) == (0, 4, None)
    data = json.loads(event_json(Event("1-0", 1.0, "evaluation", event.wire())))["data"]
    assert data["reward_mean"] is None
    progress = Progress("evaluated", 9, 0)
    line = Event("1-0", 1.0, "evaluation", data)
    progress.apply(line)
    assert plain_line(progress, line).startswith(
        "evaluation v7  reward – of 0 held-out prompts  (4 failed): reward '"
    )
    assert summarize(progress, checkpoint=None)["held_out_last"] is None
    assert "Mean reward: – of 0 prompts with version 7  (4 failed)" in samples_markdown(progress)
    (point,) = Points().of(line)
    assert "evaluation/reward_mean" not in point.numbers
    assert point.numbers["evaluation/failed"] == 4


async def test_it_takes_the_room_that_it_is_given_and_gives_way_between_answers() -> None:
    """Two rows at a time; after the third answer newer weights wait, and the rest is answered by
    them."""
    engine = mock()
    most = 0
    counts = list[int]()
    running = replace(evaluator(engine), rows=8, share=0.25)
    evaluation = Evaluation(running, 7)
    changed = asyncio.Event()

    def room(in_flight: int) -> int:
        nonlocal most
        most = max(most, in_flight)
        return 2 - in_flight

    def gives_way() -> bool:
        return len(evaluation._answers) >= 3

    assert not await evaluation.go_on(7, room, gives_way, changed)
    counts.append(len(evaluation._answers))
    await engine.load_weights(8, {"w": torch.zeros(1)})
    assert await evaluation.go_on(8, room, lambda: False, changed)
    event = await evaluation.event()
    await engine.close()
    assert counts[0] in (3, 4)
    assert most <= 2
    assert (event.version, event.last_version, event.count) == (7, 8, 6)
    assert event.tokens == sum(answer.tokens for answer in evaluation._answers.values()) > 0
    assert 0 < (event.share or 0) <= 0.25 + 1e-6
    assert (event.seconds or 0) > 0


async def test_without_room_it_waits_until_something_changes() -> None:
    engine = mock()
    free = 0
    changed = asyncio.Event()
    evaluation = Evaluation(evaluator(engine), 7)
    going = asyncio.create_task(
        evaluation.go_on(7, lambda in_flight: free - in_flight, lambda: False, changed)
    )
    await asyncio.sleep(0.1)
    assert not evaluation._answers
    free = 6
    changed.set()
    assert await going
    await engine.close()


async def test_answers_of_another_version_are_refused() -> None:
    engine = mock()
    running = evaluator(engine)
    weights: dict[str, Any] = {"w": torch.zeros(1)}
    await engine.load_weights(8, weights)
    with pytest.raises(RuntimeError, match="evaluation of version 7 was answered by versions"):
        await running.run(7)
    await engine.close()
