"""Evaluation: the rollout engine answers held-out prompts greedily, beside the training samples.

An evaluation belongs to one policy version: its worker loads no newer weights until the last answer is complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import torch
from tensordict import NonTensorStack, TensorDict

from pipeline.events import Answer, EvaluationEvent
from pipeline.index.client import Index
from stages.engines.protocols import Completion, GroupRequest, RolloutEngine, SamplingParams
from stages.models import Tokenizer
from stages.prompts.formatter import Prompt
from stages.prompts.sources import PromptSource
from stages.rewards.stage import RewardSet, score_rows

DRAWS_PER_PROMPT = 20  # at most, to find distinct prompts: a small procedural source repeats itself


@dataclass(frozen=True)
class Evaluator:
    """Answers ``prompts`` and scores them. ``samples`` of the answers are shown, always to the same prompts."""

    engine: RolloutEngine
    params: SamplingParams
    rewards: RewardSet
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    samples: int

    async def run(self, version: int) -> EvaluationEvent:
        """Returns the `evaluation` event of ``version``, which the engine must have loaded."""
        greedy = replace(self.params, temperature=0.0, top_k=0, top_p=1.0)
        requests = [GroupRequest(-1 - i, (0,), prompt.ids, greedy, 0) for i, prompt in enumerate(self.prompts)]
        answers: dict[int, Completion] = {}
        async with aclosing(self.engine.generate(requests)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                if completion.versions != ((version, len(completion.token_ids)),):
                    raise RuntimeError(
                        f"evaluation of version {version} was answered by versions {completion.versions}"
                    )
                answers[-1 - completion.group] = completion
        rows = TensorDict({}, batch_size=[len(requests)])
        order = range(len(requests))
        rows["response_ids"] = torch.nested.nested_tensor([answers[i].token_ids for i in order], layout=torch.jagged)
        rows["given"] = NonTensorStack(*(json.dumps(prompt.given) for prompt in self.prompts))
        rows["fields"] = NonTensorStack(*(json.dumps(prompt.fields, default=str) for prompt in self.prompts))
        scores = await score_rows(self.rewards, self.tokenizer, rows)
        kept = (~scores.failed.any(dim=1)).nonzero()[:, 0]  # answers that could not be scored do not count
        return EvaluationEvent(
            version=version,
            step=version,
            count=len(kept),
            reward_mean=float(scores.total[kept].mean()) if len(kept) else 0.0,
            samples=[
                Answer(
                    prompt=question(self.prompts[i]),
                    response=str(self.tokenizer.decode(answers[i].token_ids.tolist(), skip_special_tokens=True)),
                    reward=float(scores.total[i]),
                )
                for i in range(min(self.samples, len(requests)))
            ],
        )


async def evaluate_once(index: Index, evaluator: Evaluator, version: int) -> None:
    """Evaluate ``version`` and emit the result, unless that was done before."""
    if await index.get(f"evaluated:{version}") is None:
        await index.emit(await evaluator.run(version))
        await index.put(f"evaluated:{version}", "1")


def distinct_prompts(source: PromptSource, count: int) -> list[Prompt]:
    """Returns the first ``count`` distinct prompts of ``source``; fewer when it repeats itself before."""
    found: dict[str, Prompt] = {}
    for number in range(DRAWS_PER_PROMPT * count):
        prompt = source.prompt(number)
        found.setdefault(prompt.text, prompt)
        if len(found) == count:
            break
    return list(found.values())


def question(prompt: Prompt) -> str:
    """Returns the prompt as its row had it, without the chat template."""
    return prompt.given if isinstance(prompt.given, str) else prompt.given[-1]["content"]
