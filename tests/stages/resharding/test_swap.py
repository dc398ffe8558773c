"""Real ranks swap: the rollout gets the full state's slices bit for bit, training comes back as it was, and no rank ever
holds more than the plan says."""

from __future__ import annotations

import pytest

from tests.stages.resharding.ranks import run_ranks
from tests.stages.resharding.swaps import CASES, swapped_twice


@pytest.mark.parametrize("world", CASES)
def test_the_rollout_gets_its_slices_and_training_comes_back(world: int) -> None:
    for case in CASES[world]:
        assert case.plan().world == world, case.name
    names = run_ranks(world, swapped_twice, CASES[world])
    assert names == [[case.name for case in CASES[world]]] * world
