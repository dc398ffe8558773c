"""What the rollout stage claims, and what it records of responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from pipeline.data.columns import Packed
from pipeline.worker.outputs import Parked
from stages.engines.protocols import Completion, FinishReason, GroupRequest, SamplingParams
from stages.rollout.stage import Rollout, responses


class OneToken:
    """An engine of which each response is one token."""

    version = 0

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            for place in request.places:
                yield Completion(
                    request.group, place, torch.tensor([1]), torch.tensor([0.0]), ((0, 1),), "stop"
                )


def prompts_alone() -> SimpleNamespace:
    """A dock with the prompts of four rows, none of which was begun."""

    async def begun(*_: Any) -> tuple[list[int], None]:
        return [], None

    async def fetch_packed(*_: Any) -> dict[str, Packed]:
        prompts = Packed(torch.tensor([5, 6] * 4), torch.arange(0, 10, 2))
        return {"prompt_ids": prompts}

    return SimpleNamespace(schema=(), begun=begun, fetch_packed=fetch_packed)


async def test_the_first_claim_is_of_one_step_and_later_ones_fill_the_engine() -> None:
    dock: Any = prompts_alone()
    engine = OneToken()
    params = SamplingParams(max_tokens=1)
    options: dict[str, Any] = {"seed": 0, "group_size": 2, "most_rows": 8}
    stage = Rollout(dock, engine, params, **options, first_rows=4)  # type: ignore[arg-type]
    assert [stage.room(held) for held in (0, 2, 4)] == [2, 1, 0]
    rows = [SimpleNamespace(group=group, place=place) for group in (0, 1) for place in (0, 1)]
    made = TensorDict({}, batch_size=[4])
    rooms = [stage.room(4) async for _ in stage.process(SimpleNamespace(rows=rows), made)]  # type: ignore[arg-type]
    assert set(rooms) == {0}
    assert [stage.room(held) for held in (0, 4)] == [4, 2]
    assert Rollout(dock, engine, params, **options).room(0) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["stop", "cut"])
@pytest.mark.parametrize("versions", [((3, 2), (5, 1)), ((5, 1), (3, 2)), ((3, 3),)])
def test_a_response_is_as_old_as_the_oldest_of_its_tokens(
    versions: tuple[tuple[int, int], ...], end: FinishReason
) -> None:
    """The staleness bound is judged by it, whatever newer weights have made the end of the
    response."""
    done = Completion(4, 0, torch.tensor([7, 8, 9]), torch.zeros(3), versions, end)
    output = responses([0], [done], parked=end == "cut")
    assert output.generated == [(3, 3)]
    assert output.rows is not None
    assert output.rows["versions"][0].tolist() == [number for pair in versions for number in pair]


@pytest.mark.parametrize(
    ("parks", "own", "limits"),
    [(True, 0, [0, 22, 15]), (True, 18, [18, 18, 15]), (False, 0, [0] * 3)],
)
async def test_a_visit_ends_after_four_times_the_mean_length(
    parks: bool, own: int, limits: list[int]
) -> None:
    """Of the responses that have ended here; one that was cut says nothing about how long responses
    are."""

    class Ending(OneToken):
        lengths: tuple[int, ...] = ()

        async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
            asked.append(requests[0].params.budget)
            for place, length in enumerate(self.lengths):
                end: FinishReason = "cut" if length > 20 else "stop"
                yield Completion(
                    0, place, torch.ones(length).long(), torch.zeros(length), ((0, length),), end
                )

    asked: list[int] = []
    dock: Any = prompts_alone()
    engine = Ending()
    params = SamplingParams(max_tokens=99, budget=own)
    options: dict[str, Any] = {"seed": 0, "group_size": 4, "most_rows": 8}
    stage = Rollout(dock, engine, params, **options, parks_stragglers=parks)  # type: ignore[arg-type]
    rows = [SimpleNamespace(group=0, place=place) for place in range(4)]
    claimed = SimpleNamespace(rows=rows)
    made = TensorDict({}, batch_size=[4])
    for engine.lengths in ((9, 4, 3, 50), (2, 2, 2, 4), (1, 1, 1, 1)):
        outputs = [output async for output in stage.process(claimed, made)]  # type: ignore[arg-type]
        assert sum(isinstance(output, Parked) for output in outputs) == (50 in engine.lengths)
    assert asked == limits
