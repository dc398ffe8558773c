"""One response of a hundred times the mean length: the run keeps to its window and its bound, and
trains lengths as they are generated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.rollout.stage import group_seed
from tests.orchestration.run.test_partial_rollout import Spy
from tests.orchestration.run.test_run import assert_each_sample_once
from tests.orchestration.runs import MOCK, complete, recipe
from tests.orchestration.stalling import LONG_GROUP, LongTailedEngine, Visit, long_tailed

STEPS = 12
GROUPS = 4
SIZE = 4
LIMIT = 3000  # tokens; the longest response has 2000


def ks_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """The Kolmogorov-Smirnov statistic of two samples: the largest distance of their distribution
    functions."""
    points = sorted({*a, *b})
    return max(
        abs(sum(x <= p for x in a) / len(a) - sum(x <= p for x in b) / len(b)) for p in points
    )


def ks_limit(n: int, m: int, alpha: float = 0.01) -> float:
    """The distance that two samples of one distribution pass with probability ``alpha`` (Smirnov's
    asymptotic formula)."""
    return math.sqrt(-math.log(alpha / 2) / 2 * (n + m) / (n * m))


async def generated(of: Any, groups: Sequence[int], seed: int) -> list[int]:
    """The lengths of the responses of ``groups``, in their order, each generated in one piece, with
    no run around it."""
    engine = long_tailed(of, version=0, weights=None)
    places = tuple(range(SIZE))
    prompt = torch.ones(4, dtype=torch.int64)
    params = SamplingParams(max_tokens=LIMIT)
    requests = [
        GroupRequest(group, places, prompt, params, group_seed(seed, group)) for group in groups
    ]
    lengths = {
        (done.group, done.place): len(done.token_ids) async for done in engine.generate(requests)
    }
    return [lengths[key] for key in sorted(lengths)]


@pytest.mark.parametrize("straggler", ["wait", "park"])
async def test_a_response_of_a_hundred_times_the_mean_is_trained_and_no_length_is_favoured(
    straggler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    visits = list[Visit]()
    window = 3
    monkeypatch.setattr(LongTailedEngine, "visits", visits)
    of = recipe(
        MOCK,
        train__steps=STEPS,
        train__groups_per_step=GROUPS,
        algorithm__group_size=SIZE,
        pipeline__staleness=2,
        pipeline__window=window,
        rollout__workers=2,
        rollout__max_tokens=LIMIT,
        rollout__engine="tests.orchestration.stalling:long_tailed",
        rollout__mock={},
        rollout__straggler=straggler,
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    trained = {key: len(tokens) for key, (tokens, _, _) in spy.ended.items()}
    assert sorted(trained) == [
        (group, place) for group in range(STEPS * GROUPS) for place in range(SIZE)
    ]
    assert trained[LONG_GROUP, 0] == 2000
    for visit in visits:
        assert visit.made <= (visit.budget or LIMIT), (
            "a visit ends after the tokens that it may have"
        )
    assert len(spy.parked) == sum(visit.is_cut for visit in visits), (
        "each that was cut was parked, and nothing else"
    )
    # A worker has a limit as soon as one of its responses has ended, and two workers cannot hold
    # all responses at once.
    assert any(visit.budget for visit in visits) == (straggler == "park")

    # Training passes a straggler only inside the window that begins at the oldest group not
    # trained.
    steps = {group: step["step"] for step in watched.of("step") for group in step["groups"]}
    left = set(range(STEPS * GROUPS))
    for step in watched.of("step"):
        for group in sorted(step["groups"]):
            assert group < min(left) + window
            left.remove(group)
    assert not left

    # The whole is what the engine generates. So is each half of the run: nothing long was put off.
    lengths = list(trained.values())
    expected = await generated(of, range(STEPS * GROUPS), of.seed)
    assert ks_distance(lengths, expected) == 0
    late = [trained[group, place] for group, place in trained if steps[group] > STEPS // 2]
    others = await generated(of, range(1000, 1200), of.seed)
    assert ks_distance(late, others) < ks_limit(len(late), len(others))


async def test_the_statistic_finds_the_bias_of_taking_the_first_of_two_draws() -> None:
    """As a duplicate with random numbers of its own would: the shorter one ends first."""
    of = recipe(MOCK)
    first, second, others = [await generated(of, range(at, at + 50), 1) for at in (100, 200, 300)]
    assert ks_distance(first, others) < ks_limit(200, 200)
    shorter = [min(pair) for pair in zip(first, second, strict=True)]
    assert ks_distance(shorter, others) > ks_limit(200, 200)
