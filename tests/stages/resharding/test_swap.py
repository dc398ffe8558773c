"""Real ranks swap: the rollout gets the full state's slices bit for bit, training comes back as it was, and no rank ever
holds more than the plan says."""

from __future__ import annotations

import re

import pytest

from tests.stages.resharding import swaps
from tests.stages.resharding.ranks import run_ranks
from tests.stages.resharding.swaps import CASES


@pytest.mark.parametrize("world", CASES)
def test_the_rollout_gets_its_slices_and_training_comes_back(world: int) -> None:
    for case in CASES[world]:
        assert case.plan().world == world, case.name
    names = run_ranks(world, swaps.swapped_twice, CASES[world])
    assert names == [[case.name for case in CASES[world]]] * world


def test_torch_lays_out_as_we_do() -> None:
    assert run_ranks(4, swaps.torch_lays_out_as_we_do) == [["equal"]] * 4


def test_sharded_training_does_not_notice_a_swap() -> None:
    assert run_ranks(4, swaps.training_does_not_notice) == [["equal"]] * 4


def test_a_wrong_byte_is_noticed_by_all_and_the_next_swap_is_sound() -> None:
    said = run_ranks(3, swaps.a_byte_is_wrong)
    assert all("1 messages are not what was sent" in text for text in said)
    assert re.search("rank 1: .* here from rank [02] in round 2;", said[1])
    assert "here none" in said[0]


def test_when_a_rank_dies_the_others_have_their_training_state() -> None:
    said = run_ranks(3, swaps.a_rank_dies)
    assert said[1] is None
    for rank in (0, 2):
        assert re.search(
            rf"rank {rank}: (round \d+ of \d+|the comparison).* did not come about .*make a new group", said[rank]
        )


def test_a_rank_that_does_not_come_is_not_waited_for_beyond_the_deadline() -> None:
    said = run_ranks(2, swaps.a_rank_does_not_come)
    assert said[1] == "stayed away"
    assert "rank 0: round 0 of" in said[0]


def test_the_way_back_can_fail_and_be_tried_again() -> None:
    (said,) = run_ranks(1, swaps.the_way_back)
    expected = (
        r"prefetch\(\) while training; the order is to_rollout\(\), then prefetch\(\), then ready\(\)",
        r"to_rollout\(\) while generating;",
        r"^no room on the device$",
        r"could not be brought back \(a copy failed\); it is still in host memory: call ready\(\) again",
        r"is not back within 0.01 s; wait again",
    )
    assert len(said) == len(expected)
    for text, pattern in zip(said, expected, strict=True):
        assert re.search(pattern, text)


def test_weights_that_do_not_fit_the_plan_are_named() -> None:
    (said,) = run_ranks(1, swaps.what_does_not_fit)
    expected = (
        r"'model.norm.weight' is torch.float64 \[32\] on rank 0 where the plan has torch.float32 \[32\]; give",
        r"'model.norm.weight' is not in weights of rank 0",
        r"'more' is not in the plan of rank 0",
        r"group: has 1 ranks, the plan 2; give the group",
        r"a storage cannot be resized, because numpy or another process shares it; train on a clone",
        r"rollout: 'model.norm.weight' is torch.float32 \[3\] on rank 0 where the plan has torch.float32 \[32\]; give",
        r"rollout: 'model.norm.weight' has no storage of its own that can be resized; give whole tensors, each a clone",
    )
    assert len(said) == len(expected)
    for text, pattern in zip(said, expected, strict=True):
        assert re.search(pattern, text)
