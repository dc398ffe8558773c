"""Evaluation: the rollout engine answers held-out prompts, beside the training samples.

    version due ─▶ rows that training does not need ─▶ a newer version waits: no further prompt ─▶ swap
                                                          └─▶ the rest: at most `share` of the engine's rows

An engine that goes past a due version is evaluated at the version that it has; the event names
both, and counts due versions that were passed over.

With η = 0, and in a colocated run, all prompts are answered at once, and the claims wait. Otherwise
a swap waits for the answers in flight alone: an evaluation that one version has no time for is
completed by the next ones, before another is due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from pipeline.data.events import Answer, EvaluationEvent
from pipeline.first_of import cancel_all, first_of
from pipeline.index.client import Index
from stages.engines.protocols import GroupRequest, RolloutEngine, SamplingParams
from stages.flow.catalogue import OBSERVED
from stages.model.load import Tokenizer
from stages.prompts.formatter import Prompt
from stages.prompts.sources import PromptSource
from stages.rewards.scores import RewardScores, has_failed, mean_of
from stages.rewards.stage import RewardSet, score_rows
from stages.weights.documents import EVALUATED

WAIT_SECONDS = 1.0  # room is asked for again this often
DRAWS_PER_PROMPT = 20  # at most, to find distinct prompts: a small procedural source repeats itself


@dataclass(frozen=True)
class Attempt:
    """What the policy has made of ``prompt``.

    ``columns``: of its row, for the reward functions: ragged ones [T], others []. ``text``: as it
    is shown. ``tokens``: that the policy has made. ``failure``: why it is not scored ("").
    """

    prompt: Prompt
    columns: Mapping[str, Any]
    text: str
    tokens: int
    failure: str = ""


@dataclass(frozen=True)
class Evaluator:
    """Answers ``prompts`` and scores them.

    ``samples`` of the answers are shown, always to the same prompts.
    """

    engine: RolloutEngine
    params: SamplingParams
    rewards: RewardSet
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    samples: int

    rows: int = 0
    """Responses that the engine decodes at the same time."""
    share: float = 1.0
    """Of those, an evaluation that has waited takes at most so much while training needs all of
    them."""
    reads: Sequence[str] = ()
    """Further columns that the reward functions get."""
    is_sampled: bool = False
    """Answers are sampled with ``params``, else they are greedy."""

    def request(self, number: int) -> GroupRequest:
        """Return the request for the answer to the prompt ``number``, whose random numbers depend
        on that number alone."""
        params = self.params if self.is_sampled else self.params.greedy()
        return GroupRequest(-1 - number, (0,), self.prompts[number].ids, params, number)

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    async def answer(
        self, numbers: Sequence[int], version: int
    ) -> AsyncGenerator[tuple[int, Attempt], None]:
        """Have the engine, at ``version``, answer the prompts ``numbers``, and yield each with its
        number as it ends."""
        requests = [self.request(number) for number in numbers]
        async with aclosing(self.engine.generate(requests)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                check_version(completion.versions, version)
                number = -1 - completion.group
                ids = completion.token_ids
                text = self.decode(ids.tolist())
                columns = {"response_ids": ids}
                yield number, Attempt(self.prompts[number], columns, text, len(ids))

    async def run(self, version: int) -> EvaluationEvent:
        """Return the `evaluation` event of ``version``, which the engine must have loaded: all
        prompts at once."""
        evaluation = Evaluation(self, version)
        await evaluation.answer_all()
        return await evaluation.event()


class Evaluation:
    """An evaluation of ``version`` in progress.

    It may be left between two answers, for the engine to load newer weights: each answer is of one
    version.
    """

    def __init__(self, evaluator: Evaluator, version: int) -> None:
        self.evaluator = evaluator
        self.version = version
        self.last_version = version
        self._left = list(range(len(evaluator.prompts)))
        self._answers: dict[int, Attempt] = {}
        self._began = time.monotonic()
        self._row_seconds = 0.0

    async def answer_all(self) -> None:
        await self._answer(self._left, self.version)
        self._left = []

    async def go_on(
        self,
        version: int,
        room: Callable[[int], int],
        gives_way: Callable[[], bool],
        changed: asyncio.Event,
    ) -> bool:
        """Answer with ``version``, ``room(in flight)`` further prompts at a time, until all are
        answered, or none is in flight and it ``gives_way``. Both are asked again when ``changed``
        is set. Returns whether all are answered."""
        self.last_version = version
        running = set[asyncio.Task[None]]()
        try:
            while True:
                changed.clear()
                ended = {task for task in running if task.done()}
                for task in ended:
                    task.result()
                running -= ended
                more = self._left[: max(0, 0 if gives_way() else room(len(running)))]
                del self._left[: len(more)]
                running |= {asyncio.create_task(self._answer([number], version)) for number in more}
                if not running and (not self._left or gives_way()):
                    return not self._left
                answered = (
                    [asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)] if running else []
                )
                await first_of(changed.wait(), *answered, timeout=WAIT_SECONDS)
        finally:
            await cancel_all(*running)

    async def _answer(self, numbers: Sequence[int], version: int) -> None:
        began = time.monotonic()
        async with aclosing(self.evaluator.answer(numbers, version)) as answers:
            async for number, attempt in answers:
                self._answers[number] = attempt
                self._row_seconds += time.monotonic() - began

    async def event(self) -> EvaluationEvent:
        """Score the answers, all of which are there, and return the event."""
        seconds = time.monotonic() - self._began
        evaluator = self.evaluator
        answers = [self._answers[number] for number in range(len(self._answers))]
        failures = [answer.failure for answer in answers if answer.failure]
        scored = [number for number, answer in enumerate(answers) if not answer.failure]
        scores = await score_attempts(evaluator, [answers[number] for number in scored])
        counted = scores.counted
        failed = has_failed(scores.scores)
        if bool(failed.any()):
            failures += evaluator.rewards.failures.values()
        rewards = {
            number: float(total)
            for number, total, has in zip(scored, scores.total, counted, strict=True)
            if has
        }
        names = evaluator.rewards.names
        return EvaluationEvent(
            version=self.version,
            last_version=self.last_version,
            step=self.version,
            count=int(counted.sum()),
            failed=int(failed.any(dim=1).sum()) + len(answers) - len(scored),
            absent=int(scores.scores.isnan().all(dim=1).sum()),
            reason=next(iter(failures), ""),
            reward_mean=mean_of(scores.total, counted),
            functions=scores.means(names) if len(names) > 1 else {},
            samples=[
                Answer(
                    prompt=question(answer.prompt), response=answer.text, reward=rewards.get(number)
                )
                for number, answer in enumerate(answers[: evaluator.samples])
            ],
            seconds=seconds,
            tokens=sum(answer.tokens for answer in answers),
            share=self._row_seconds / seconds / evaluator.rows if evaluator.rows else None,
        )


async def score_attempts(evaluator: Evaluator, attempts: Sequence[Attempt]) -> RewardScores:
    """Return the scores of ``attempts``."""
    if not attempts:
        return RewardScores(torch.empty(0, len(evaluator.rewards.names)), torch.empty(0))
    rows = TensorDict({}, batch_size=[len(attempts)])
    for name, first in attempts[0].columns.items():
        values = [attempt.columns[name] for attempt in attempts]
        rows[name] = (
            torch.nested.nested_tensor(values, layout=torch.jagged)
            if first.dim()
            else torch.stack(values)
        )
    rows["given"] = NonTensorStack(*(attempt.prompt.given_json for attempt in attempts))
    rows["fields"] = NonTensorStack(*(attempt.prompt.fields_json for attempt in attempts))
    return await score_rows(evaluator.rewards, evaluator.tokenizer, rows, evaluator.reads)


def check_version(versions: Sequence[tuple[int, int]], version: int) -> None:
    """Raise RuntimeError where others than ``version`` have made tokens of an answer."""
    if {number for number, _ in versions} - {version, OBSERVED}:
        raise RuntimeError(f"evaluation of version {version} was answered by versions {versions}")


def newest_due(version: int, every: int, steps: int) -> int:
    """Return the newest version up to ``version`` that is due: each ``every`` versions, and the
    last of ``steps``.

    >>> newest_due(12, 5, 20), newest_due(20, 15, 20)
    (10, 20)
    """
    return version if version >= steps else version - version % every


async def newest_evaluated(index: Index) -> int:
    """Return the newest version that was evaluated; -1: none."""
    version = await EVALUATED.get(index)
    return -1 if version is None else version


async def evaluate_once(
    index: Index, evaluator: Evaluator, version: int, due: int, every: int
) -> None:
    """Evaluate ``version`` and emit the result, unless it, or a newer one, was evaluated before."""
    if await newest_evaluated(index) < version:
        await record(index, await evaluator.run(version), due, every)


async def record(index: Index, event: EvaluationEvent, due: int, every: int) -> None:
    """Emit ``event``, of the evaluation that was due at version ``due``; its version is not
    evaluated again."""
    missed = max(0, (due - 1) // every - await newest_evaluated(index) // every)
    event = replace(event, due=None if due == event.version else due, missed=missed)
    await index.emit(event, EVALUATED.entry(event.version))


def distinct_prompts(source: PromptSource, count: int, *, by_row: bool = False) -> list[Prompt]:
    """Return the first ``count`` distinct prompts of ``source``; fewer when it repeats itself
    before. ``by_row``: those of one text differ where other columns of their rows do."""
    prompts: dict[tuple[str, str], Prompt] = {}
    for number in range(DRAWS_PER_PROMPT * count):
        prompt = source.prompt(number)
        prompts.setdefault((prompt.text, prompt.fields_json if by_row else ""), prompt)
        if len(prompts) == count:
            break
    return list(prompts.values())


def question(prompt: Prompt) -> str:
    """Return the prompt as its row had it, without the chat template."""
    return prompt.given if isinstance(prompt.given, str) else prompt.given[-1]["content"]
