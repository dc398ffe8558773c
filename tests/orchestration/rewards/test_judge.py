"""An async judge over the network that fails now and then: what is asked again, and how many
requests there are at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stages.rewards import stage
from stages.rewards.calls import LocalCaller
from stages.rewards.stage import ErrorPolicy, RewardScores, RewardSet
from tests.orchestration.rewards.judges import JudgeServer, serving
from tests.orchestration.rewards.test_pool import LIMIT, pool_of

JUDGE = "tests.orchestration.rewards.judges:judge"
TEXTS = [f"{number:03} " + "x" * (number % 7) for number in range(60)]
FAILING = {text: 1 for text in TEXTS[::10]}  # one in ten


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BACKOFF_SECONDS", 0.0)


async def judged(rewards: RewardSet, url: str, texts: Sequence[str]) -> RewardScores:
    fields = [{"url": url} for _ in texts]
    return await rewards.score(["q"] * len(texts), texts, [[1]] * len(texts), fields)


@pytest.mark.parametrize("processes", [1, 0])
async def test_only_failed_rows_are_asked_again_and_all_at_the_same_time(
    processes: int, tmp_path: Path
) -> None:
    """The server holds each wave until all of it is there: 60 requests at once, then the six that
    failed at once."""
    server = JudgeServer(FAILING, waves=(len(TEXTS), len(FAILING)))
    policy = ErrorPolicy(timeout=LIMIT, retries=1, max_error_share=0.0)
    async with (
        serving(server) as url,
        pool_of(JUDGE, tmp_path=tmp_path, processes=max(1, processes)) as pool,
    ):
        caller = pool if processes else LocalCaller([JUDGE])
        rewards = RewardSet([(JUDGE, 1.0)], policy=policy, pool=caller)
        scores = await judged(rewards, url, TEXTS)
    assert scores.total.tolist() == [len(text) for text in TEXTS]
    assert server.requests == {text: 1 + (text in FAILING) for text in TEXTS}
    counts = rewards.counts[JUDGE]
    assert (counts.calls, counts.failed, counts.again) == (66, 6, 6)
    assert counts.seconds > 0


async def test_concurrency_bounds_the_requests_at_once_also_those_that_are_repeated(
    tmp_path: Path,
) -> None:
    """Waves of five: each bound is reached, and none is passed."""
    server = JudgeServer(FAILING, waves=[5] * 12)
    policy = ErrorPolicy(timeout=LIMIT, retries=1, max_error_share=0.0, concurrency=5)
    async with serving(server) as url, pool_of(JUDGE, tmp_path=tmp_path, processes=1) as pool:
        scores = await judged(RewardSet([(JUDGE, 1.0)], policy=policy, pool=pool), url, TEXTS)
    assert scores.total.tolist() == [len(text) for text in TEXTS]
    assert server.requests.total() == 66
    assert server.most == 5


async def test_a_batched_judge_is_asked_for_many_rows_and_for_those_of_a_failed_call_at_the_same_time(
    tmp_path: Path,
) -> None:
    server = JudgeServer({TEXTS[0]: 1}, waves=(8, 8))
    policy = ErrorPolicy(timeout=LIMIT, retries=1, max_error_share=0.0)
    async with serving(server) as url, pool_of(JUDGE, tmp_path=tmp_path, processes=1) as pool:
        rewards = RewardSet([(JUDGE, 1.0)], policy=policy, pool=pool, batched=[JUDGE])
        scores = await judged(rewards, url, TEXTS[:8])
    assert scores.total.tolist() == [len(text) for text in TEXTS[:8]]
    assert (rewards.counts[JUDGE].calls, rewards.counts[JUDGE].failed) == (1 + 8, 1)
    assert set(server.requests.values()) == {2}


async def test_a_row_that_fails_each_time_costs_its_own_score(tmp_path: Path) -> None:
    server = JudgeServer({TEXTS[3]: 99}, waves=())
    policy = ErrorPolicy(timeout=LIMIT, retries=2, max_error_share=1.0)
    async with serving(server) as url, pool_of(JUDGE, tmp_path=tmp_path, processes=1) as pool:
        scores = await judged(RewardSet([(JUDGE, 1.0)], policy=policy, pool=pool), url, TEXTS)
    assert scores.failed[:, 0].nonzero().flatten().tolist() == [3]
    assert server.requests == {text: 3 if text == TEXTS[3] else 1 for text in TEXTS}
