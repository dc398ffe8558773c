"""The bound holds and is reached, and nothing ever deadlocks, whatever the order in which groups
are completed."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.schedule.staleness import StalenessPlan, max_age, slack_for
from tests.pipeline.staleness_model import Plan, windowed_pick

plans = st.builds(
    Plan,
    bound=st.integers(0, 5),
    groups_per_step=st.integers(1, 6),
    window=st.integers(1, 14),
)


def simulate(plan: Plan, rng: random.Random, steps: int, engines: int) -> list[int]:
    """Run the flow with ``engines`` rollout engines that load versions late and finish groups in
    any order; returns the staleness of each trained group. Raises when nothing can move any more.
    """
    version = 0
    admitted = 0
    loaded = [0] * engines
    waiting: list[int] = []
    working: dict[int, int] = {}  # group -> version of its first token
    ready: dict[int, int] = {}
    consumed: set[int] = set()
    ages: list[int] = []
    while version < steps:
        moves = []
        if admitted < plan.admissible(version):
            moves.append("admit")
        if min(loaded) < version:
            moves.append("load")
        claims = [(e, q) for e in range(engines) for q in waiting if plan.may_claim(q, loaded[e])]
        if claims:
            moves.append("claim")
        if working:
            moves.append("complete")
        oldest = next(q for q in range(admitted + 1) if q not in consumed)
        picked = plan.pick(oldest, ready.keys(), consumed)
        if picked:
            moves.append("train")
        assert moves, f"deadlock at version {version}: admitted {admitted}, ready {sorted(ready)}"
        move = rng.choice(moves)
        if move == "admit":
            waiting.append(admitted)
            admitted += 1
        elif move == "load":
            behind = rng.choice([e for e in range(engines) if loaded[e] < version])
            loaded[behind] = rng.randint(loaded[behind] + 1, version)
        elif move == "claim":
            engine, group = rng.choice(claims)
            waiting.remove(group)
            working[group] = loaded[engine]
            assert loaded[engine] >= plan.required_version(group)
        elif move == "complete":
            group = rng.choice(list(working))
            ready[group] = working.pop(group)
        else:
            assert picked is not None
            for group in picked:
                ages.append(version - ready.pop(group))
                consumed.add(group)
            version += 1
    return ages


@given(plan=plans, seed=st.integers(0, 2**32), engines=st.integers(1, 3))
def test_no_order_of_events_exceeds_the_bound_or_deadlocks(
    plan: Plan, seed: int, engines: int
) -> None:
    ages = simulate(plan, random.Random(seed), steps=12, engines=engines)
    assert len(ages) == 12 * plan.groups_per_step
    assert max(ages) <= plan.max_age <= plan.bound


@given(plan=plans)
@example(Plan(bound=1, groups_per_step=4))
@example(Plan(bound=3, groups_per_step=4, window=6))
def test_the_age_promised_is_really_reached(plan: Plan) -> None:
    """The worst case of the derivation: the last group of step S is made by version 0, and finishes
    last of all."""
    slowest = plan.admissible(0) - 1
    consumed: set[int] = set()
    for version in range(plan.max_age + plan.slack + plan.window + 2):
        oldest = next(q for q in range(slowest + plan.window + 1) if q not in consumed)
        alive = [q for q in range(plan.admissible(version)) if q not in consumed]
        picked = plan.pick(oldest, [q for q in alive if q != slowest], consumed)
        if picked is None:  # the window is closed: the step has to wait for the straggler
            assert version == plan.max_age
            return
        consumed.update(picked)
    raise AssertionError("the straggler was passed for ever")


@given(plan=plans)
def test_slack_is_the_largest_within_the_bound(plan: Plan) -> None:
    assert plan.max_age <= plan.bound
    assert max_age(plan.slack + 1, plan.groups_per_step, plan.window) > plan.bound


@given(bound=st.integers(0, 9), groups=st.integers(1, 9))
def test_in_order_the_slack_is_the_bound(bound: int, groups: int) -> None:
    assert slack_for(bound, groups, window=1) == bound


@given(plan=plans, version=st.integers(0, 40))
def test_required_version_and_gate_are_two_views_of_one_rule(plan: Plan, version: int) -> None:
    for group in range(plan.admissible(version) + plan.groups_per_step):
        assert plan.may_claim(group, version) == (version >= plan.required_version(group))


def _any_order_exists(
    oldest: int, ready: frozenset[int], groups: int, window: int, gone: frozenset[int]
) -> bool:
    """By trying every choice."""
    if groups == 0:
        return True
    while oldest in gone:
        oldest += 1
    return any(
        _any_order_exists(oldest, ready - {q}, groups - 1, window, gone | {q})
        for q in ready
        if q < oldest + window
    )


@given(
    ready=st.frozensets(st.integers(0, 9), max_size=6),
    passed=st.frozensets(st.integers(1, 9)),
    groups=st.integers(1, 4),
    window=st.integers(1, 6),
)
def test_the_pick_obeys_the_window_and_finds_a_step_whenever_one_exists(
    ready: frozenset[int], passed: frozenset[int], groups: int, window: int
) -> None:
    ready -= passed
    picked = windowed_pick(0, ready, groups, window, passed)
    assert (picked is not None) == _any_order_exists(0, ready, groups, window, passed)
    if picked is None:
        return
    assert len(picked) == groups
    assert picked == sorted(picked)
    gone = set(passed)
    for group in picked:
        assert group in ready
        assert group < next(q for q in range(20) if q not in gone) + window
        gone.add(group)


def test_window_one_is_admission_order() -> None:
    assert windowed_pick(4, [5, 6, 7], groups=2, window=1) is None
    assert windowed_pick(4, [7, 5, 4], groups=2, window=1) == [4, 5]


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ((-1, 1, 1), "bound: -1 is too small; use at least 0"),
        ((0, 0, 1), "groups_per_step: 0 is too small; use at least 1"),
        ((0, 1, 0), "window: 0 is too small; use at least 1"),
    ],
)
def test_limits_without_a_meaning_are_refused(limits: tuple[int, int, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        StalenessPlan(*limits)
    assert StalenessPlan(0, 1, 1).groups_in_flight == 1
