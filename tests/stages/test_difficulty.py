"""Sampling by difficulty: the policy alone, without a run."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.model.load import load_tokenizer
from stages.prompts import difficulty
from stages.prompts.difficulty import (
    LEAST_SHARE,
    MOST_PASSED,
    Difficulty,
    PassRate,
    outcome,
    prompt_key,
    share,
)
from stages.prompts.rows.options import PromptOptions
from stages.prompts.sources import PromptSource, load_prompts

ROWS = 40


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"say {i}", "answer": str(i)} for i in range(ROWS)]


def others() -> list[dict[str, str]]:
    return [{"prompt": f"add {i}", "answer": str(i)} for i in range(ROWS)]


@pytest.fixture(scope="module")
def source() -> PromptSource:
    here = [
        {"source": "datasets", "path": f"tests.stages.test_difficulty:{name}"}
        for name in ("rows", "others")
    ]
    return load_prompts(PromptOptions(sources=here), load_tokenizer("tiny"), seed=3).train


def taken(of: Difficulty, groups: int) -> tuple[Counter[str], int]:
    """How often each prompt is taken by so many groups, and the position after the last one."""
    position = 0
    found = Counter[str]()
    for _ in range(groups):
        place, _, key = of.choose(position)
        assert position <= place <= position + MOST_PASSED
        found[key] += 1
        position = place + 1
    return found, position


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=32))
def test_a_group_teaches_when_its_rewards_differ(rewards: list[float]) -> None:
    mean, taught = outcome(rewards)
    assert taught == (len(set(rewards)) > 1)
    assert mean == pytest.approx(sum(rewards) / len(rewards), abs=1e-9)


@given(st.floats(0, 1), st.integers(0, 10**4))
def test_a_prompt_that_taught_keeps_its_share_longer_and_none_is_lost_for_ever(
    reward: float, streak: int
) -> None:
    taught, never = (share(PassRate(reward, of, streak)) for of in (True, False))
    assert LEAST_SHARE <= never <= taught <= 1
    assert share(PassRate(reward, True, 0)) == share(None) == 1
    assert share(PassRate(reward, True, streak + 1)) <= taught


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_prompts_that_teach_nothing_come_rarely_and_all_come(
    source: PromptSource, seed: int, data: st.DataObject
) -> None:
    of = Difficulty(source, seed)
    keys = {prompt_key(source.prompt(position)) for position in range(2 * ROWS)}
    assert len(keys) == 2 * ROWS
    solved = data.draw(st.sets(st.sampled_from(sorted(keys)), min_size=8, max_size=72))
    of.put(
        (key, PassRate(1.0, False, 3) if key in solved else PassRate(0.5, True, 0))
        for key in sorted(keys)
    )
    found, position = taken(of, 400)
    assert all(found[key] for key in keys - solved)
    passes = position / len(keys)
    mean = sum(found[key] for key in solved) / len(solved)
    assert mean == pytest.approx(LEAST_SHARE * passes, rel=0.5, abs=0.6)
    for key in keys - solved:
        assert found[key] == pytest.approx(passes, abs=1)
    again, _ = taken(of, 400)
    assert again == found


def test_without_pass_rates_it_is_the_source_in_its_order(source: PromptSource) -> None:
    of = Difficulty(source, 0)
    assert [of.choose(position)[0] for position in range(50)] == list(range(50))


def test_solved_prompts_alone_cost_a_bounded_walk(source: PromptSource) -> None:
    of = Difficulty(source, 0)
    for key in {prompt_key(source.prompt(position)) for position in range(2 * ROWS)}:
        for _ in range(9):
            of.count(key, [1.0, 1.0])
    _, position = taken(of, 50)
    assert position <= 50 * (MOST_PASSED + 1)


def test_pass_rates_are_bounded_and_the_oldest_are_forgotten(
    source: PromptSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difficulty, "MOST_PROMPTS", 3)
    of = Difficulty(source, 0)
    for key in ("a", "b", "c", "a", "d"):
        of.count(key, [0.0, 0.0])
    assert list(of.rates) == ["c", "a", "d"]
    assert of.rates["a"].streak == 2
    of.count("a", [0.0, 1.0])
    assert of.rates["a"] == PassRate(0.5, True, 0)
