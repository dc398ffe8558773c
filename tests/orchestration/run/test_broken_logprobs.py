"""Runs whose rollout engine returns logprobs that are not finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.engines.mock.engines import MockRolloutEngine
from tests.orchestration.run.test_run import assert_each_sample_once
from tests.orchestration.runs import MOCK, complete, recipe


def break_logprobs(monkeypatch: pytest.MonkeyPatch, times: int, value: float) -> None:
    generate = MockRolloutEngine.generate
    left = [times]

    async def broken(self: MockRolloutEngine, requests: Any) -> AsyncIterator[Any]:
        async for completion in generate(self, requests):
            if left[0]:
                left[0] -= 1
                logprobs = completion.logprobs.clone()
                logprobs[1] = value
                completion = dataclasses.replace(completion, logprobs=logprobs)
            yield completion

    monkeypatch.setattr(MockRolloutEngine, "generate", broken)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
async def test_such_a_response_is_generated_again_and_never_trained(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_logprobs(monkeypatch, 1, value)
    of = recipe(MOCK, train__steps=4)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    reasons = [
        worker.get("reason", "") for worker in watched.of("worker") if worker["change"] == "died"
    ]
    assert len(reasons) == 1
    assert f"returned the logprob {value} for token 1" in reasons[0]
    assert_each_sample_once(of, watched)


async def test_an_engine_that_stays_broken_fails_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_logprobs(monkeypatch, 1_000_000, math.nan)
    _, result = await complete(
        Execution(RunFolder.create(recipe(MOCK, launch__max_restarts=1), tmp_path / "run"))
    )
    assert result.state == "failed"
    assert "returned the logprob nan for token 1" in result.reason
