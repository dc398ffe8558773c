"""Real ranks swap: the rollout gets the full state's slices bit for bit, training comes back as it
was, and no rank ever holds more than the plan says."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator

import pytest

from pipeline.data.arena import shared_memory_directory
from tests.stages.resharding import swaps
from tests.stages.resharding.ranks import run_ranks
from tests.stages.resharding.swaps import CASES


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder in shared memory of which nothing is left when the test ends."""
    with tempfile.TemporaryDirectory(prefix="test-swap-", dir=shared_memory_directory()) as made:
        yield made


@pytest.fixture(params=["shared memory", "gloo"])
def exchange(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def of(exchange: str, folder: str) -> str:
    """Where ranks may share memory, so that they use ``exchange``."""
    return folder if exchange == "shared memory" else f"{folder}/none"


@pytest.mark.parametrize("world", CASES)
def test_the_rollout_gets_its_slices_and_training_comes_back(
    world: int, exchange: str, folder: str
) -> None:
    for case in CASES[world]:
        assert case.plan().world == world, case.name
    found = run_ranks(world, swaps.swapped_twice, CASES[world], of(exchange, folder))
    ways = [(case.name, exchange if case.plan().rounds else "none") for case in CASES[world]]
    assert found == [ways] * world


def test_torch_lays_out_as_we_do() -> None:
    assert run_ranks(4, swaps.torch_lays_out_as_we_do) == [["equal"]] * 4


def test_sharded_training_does_not_notice_a_swap() -> None:
    assert run_ranks(4, swaps.training_does_not_notice) == [["equal"]] * 4


def test_a_wrong_byte_is_noticed_by_all_and_the_next_swap_is_sound(
    exchange: str, folder: str
) -> None:
    found = run_ranks(3, swaps.a_byte_is_wrong, of(exchange, folder))
    assert [way for way, _ in found] == [exchange] * 3
    messages = [text for _, text in found]
    assert all("1 messages are not what was sent" in text for text in messages)
    assert re.search("rank 1: .* here from rank [02] in round 2;", messages[1])
    assert "here none" in messages[0]


def test_when_a_rank_is_killed_the_others_notice_at_once_and_have_their_training_state(
    exchange: str, folder: str
) -> None:
    found = run_ranks(3, swaps.a_rank_dies, of(exchange, folder))
    assert found[1] is None
    for rank in (0, 2):
        way, seconds, messages = found[rank]
        assert way == exchange
        assert seconds < 15, "it waited for its deadline"
        assert re.search(
            rf"rank {rank}: (round \d+ of \d+|the comparison).* did not come about .*make a new "
            rf"group",
            messages,
        )


def test_a_rank_that_is_late_is_named_and_hears_that_it_was_given_up(folder: str) -> None:
    messages = run_ranks(2, swaps.a_rank_is_late, folder)
    assert re.search(
        r"rank 0: round 3 of \d+ did not come about \(rank 1 has not come within 1 "
        r"s\)",
        messages[0],
    )
    assert re.search(
        r"rank 1: round 3 of \d+ did not come about \((rank 0 has left|.*Broken "
        r"pipe)\)",
        messages[1],
    )


def test_where_one_rank_cannot_share_memory_all_use_the_group(folder: str) -> None:
    assert run_ranks(3, swaps.one_cannot_share, folder) == [["gloo"] * 4] * 3


def test_what_is_shared_has_no_name_and_is_the_users_own(folder: str) -> None:
    assert run_ranks(3, swaps.what_is_shared, folder) == [(0, 0o600, 0)] * 3


def test_a_rank_that_does_not_come_is_not_waited_for_beyond_the_deadline() -> None:
    messages = run_ranks(2, swaps.a_rank_does_not_come)
    assert messages[1] == "stayed away"
    assert "rank 0: round 0 of" in messages[0]


def test_the_way_back_can_fail_and_be_tried_again() -> None:
    (messages,) = run_ranks(1, swaps.the_way_back)
    expected = (
        r"prefetch\(\) while training; the order is to_rollout\(\), then prefetch\(\), then "
        r"ready\(\)",
        r"to_rollout\(\) while generating;",
        r"^no room on the device$",
        r"could not be brought back \(a copy failed\); it is still in host memory: call ready\(\) "
        r"again",
        r"is not back within 0.01 s; wait again",
    )
    assert len(messages) == len(expected)
    for text, pattern in zip(messages, expected, strict=True):
        assert re.search(pattern, text)


def test_weights_that_do_not_fit_the_plan_are_named() -> None:
    (messages,) = run_ranks(1, swaps.what_does_not_fit)
    expected = (
        r"'model.norm.weight' is torch.float64 \[32\] on rank 0 where the plan has torch.float32 "
        r"\[32\]; give",
        r"'model.norm.weight' is not in weights of rank 0",
        r"'more' is not in the plan of rank 0",
        r"group: has 1 ranks, the plan 2; give the group",
        r"a storage cannot be resized, because numpy or another process shares it; train on a "
        r"clone",
        r"rollout: 'model.norm.weight' is torch.float32 \[3\] on rank 0 where the plan has "
        r"torch.float32 \[32\]; give",
        r"rollout: 'model.norm.weight' has no storage of its own that can be resized; give whole "
        r"tensors, each a clone",
    )
    assert len(messages) == len(expected)
    for text, pattern in zip(messages, expected, strict=True):
        assert re.search(pattern, text)
