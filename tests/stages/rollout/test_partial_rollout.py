"""A response that was cut and continued, here or elsewhere, is the response that would have been
made in one piece."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from stages.engines.mock.engines import MockRolloutEngine
from stages.engines.mock.options import MockRolloutOptions
from stages.engines.protocols import Begun, Completion, GroupRequest, SamplingParams
from tests.stages.engines.mock.test_engines import LoopClock, request, weights
from tests.stages.engines.test_rollout_engines import Letters
from tests.stages.engines.torch.test_rollout import (
    Brake,
    ask,
    collect,
    llama,
    parameters,
    running,
    teacher_forced,
)

Responses = dict[tuple[int, int], Completion]
BUDGET = 7
LONGEST = 24


def begun(done: Completion) -> Begun:
    return Begun(done.token_ids, done.logprobs, done.versions)


def next_visit(requests: Sequence[GroupRequest], done: Responses) -> list[GroupRequest]:
    """What is still to be generated of ``requests``, in the same order."""
    left = []
    for asked in requests:
        cut = {
            place: done[asked.group, place]
            for place in asked.places
            if done[asked.group, place].finish_reason == "cut"
        }
        if cut:
            progress = {place: begun(so_far) for place, so_far in cut.items()}
            left.append(dataclasses.replace(asked, places=tuple(cut), begun=progress))
    return left


async def in_visits(
    requests: Sequence[GroupRequest], visit: Callable[[list[GroupRequest]], Awaitable[Responses]]
) -> tuple[Responses, int]:
    """Responses in as many visits as they need, and how many that were."""
    ended: Responses = {}
    left = list(requests)
    visits = 0
    while left:
        done = await visit(left)
        visits += 1
        for asked in left:
            for place, before in asked.begun.items():
                after = done[asked.group, place]
                assert torch.equal(after.token_ids[: len(before.token_ids)], before.token_ids)
                assert torch.equal(after.logprobs[: len(before.token_ids)], before.logprobs)
        ended |= {key: one for key, one in done.items() if one.finish_reason != "cut"}
        left = next_visit(left, done)
    return ended, visits


def asks(**params: Any) -> list[GroupRequest]:
    """Three groups of three, prompts of different lengths."""
    return [
        ask(group, places=3, length=5 + 4 * group, max_tokens=LONGEST, **params)
        for group in range(3)
    ]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "seeded"]
)
async def test_each_visit_at_another_engine_gives_the_same_tokens(sampling: dict[str, Any]) -> None:
    async with running() as one, running() as other:
        stops = {"stop_token_ids": (11, 23)}
        whole = await collect(one.generate(asks(**sampling, **stops)))
        engines = [other, one]

        async def visit(requests: list[GroupRequest]) -> Responses:
            engines.reverse()
            return await collect(engines[0].generate(requests))

        pieces, visits = await in_visits(asks(**sampling, **stops, budget=BUDGET), visit)
    assert visits == -(-LONGEST // BUDGET)
    assert {done.finish_reason for done in whole.values()} == {"stop", "length"}, (
        "nothing is shown of either end"
    )
    assert pieces.keys() == whole.keys()
    for key, done in pieces.items():
        assert torch.equal(done.token_ids, whole[key].token_ids)
        assert torch.allclose(done.logprobs, whole[key].logprobs, atol=1e-4)
        assert (done.versions, done.finish_reason) == (
            whole[key].versions,
            whole[key].finish_reason,
        )


@pytest.mark.parametrize(("max_rows", "prefill_tokens"), [(8, 4096), (8, 20), (3, 4096)])
async def test_rows_that_go_on_and_rows_that_begin_share_their_prompt(
    max_rows: int, prefill_tokens: int
) -> None:
    """Two places of each group were cut after different numbers of tokens, the third has not
    begun."""
    async with running() as engine:
        whole = await collect(engine.generate(asks()))
        halves = []
        for asked in asks():
            params = [dataclasses.replace(asked.params, budget=budget) for budget in (3, 9)]
            parts = [dataclasses.replace(asked, places=(i,), params=params[i]) for i in range(2)]
            done = await collect(engine.generate(parts))
            halves.append(
                dataclasses.replace(asked, begun={i: begun(done[asked.group, i]) for i in range(2)})
            )
    async with running(max_rows=max_rows, prefill_tokens=prefill_tokens) as other:
        brake = Brake(other, 2)
        stream = other.generate(halves)
        await brake.pause()
        decoding = {row.group.request.group for row in other._batch.rows}
        assert len(other._batch.decoder.prompts) == len(decoding), (
            "a prompt is kept once for all rows of its group"
        )
        await other.resume()
        ended = await collect(stream)
        await other.pause()  # the last row has left
        assert not other._batch.decoder.prompts, "no prompt is kept any more"
    assert ended.keys() == whole.keys()
    for key, one in ended.items():
        assert torch.equal(one.token_ids, whole[key].token_ids)
        assert torch.allclose(one.logprobs, whole[key].logprobs, atol=1e-4)


async def test_a_stop_string_that_lies_across_a_cut_ends_the_response() -> None:
    async with running(tokenizer=Letters()) as engine:
        free = (await collect(engine.generate([ask(3, places=1, max_tokens=40)])))[
            3, 0
        ].token_ids.tolist()
        stop = Letters().decode(free[20:24])[1:7]
        assert Letters().decode(free).find(stop) == 41
        first = (
            await collect(
                engine.generate([ask(3, places=1, max_tokens=40, stop=(stop,), budget=22)])
            )
        )[3, 0]
        assert (len(first.token_ids), first.finish_reason) == (22, "cut")
        again = next_visit(
            [ask(3, places=1, max_tokens=40, stop=(stop,), budget=22)], {(3, 0): first}
        )
        last = (await collect(engine.generate(again)))[3, 0]
    assert (last.token_ids.tolist(), last.finish_reason) == (free[:24], "stop")


async def test_cut_at_a_swap_it_goes_on_as_if_the_new_weights_had_read_it_all() -> None:
    """And what waited for room is not touched: it begins with the new weights."""
    old = llama(0)
    new = llama(1)
    asked = ask(0, places=3, max_tokens=60)
    async with running(max_rows=2, initial_version=3) as engine:
        brake = Brake(engine, 10)
        stream = engine.generate([asked])
        await brake.pause()
        await engine.load_weights(4, parameters(new), cut=True)
        await engine.resume()
        done = await collect(stream)
        assert {place: one.versions for (_, place), one in done.items()} == {
            0: ((3, 11),),
            1: ((3, 11),),
            2: ((4, 60),),
        }
        assert [done[0, place].finish_reason for place in range(3)] == ["cut", "cut", "length"]
        ended = await collect(engine.generate(next_visit([asked], done)))
    for one in ended.values():
        assert one.versions == ((3, 11), (4, 49))
        assert one.oldest_version == 3
        assert torch.allclose(one.logprobs[:11], teacher_forced(old, asked, one)[:11], atol=1e-4)
        assert torch.allclose(one.logprobs[11:], teacher_forced(new, asked, one)[11:], atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "place", "logprobs", "complaint"),
    [
        (
            9,
            0,
            9,
            "place 0 is begun with 9 tokens; give begun only places of .* with 1 to 8 tokens",
        ),
        (3, 5, 3, "place 5 is begun with 3 tokens"),
        (0, 0, 0, "place 0 is begun with 0 tokens"),
        (3, 0, 2, "begun with 3 tokens, 2 logprobs and versions of 3 tokens"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    tokens: int, place: int, logprobs: int, complaint: str
) -> None:
    progress = Begun(torch.zeros(tokens, dtype=torch.int64), torch.zeros(logprobs), ((0, tokens),))
    with pytest.raises(ValueError, match=complaint):
        GroupRequest(
            0,
            (0, 1),
            torch.ones(1, dtype=torch.int64),
            SamplingParams(max_tokens=9),
            0,
            {place: progress},
        )


# ── the mock engine ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_mock_engine_continues_too_and_its_time_is_that_of_the_tokens_made() -> None:
    options = MockRolloutOptions(
        row_rate=10, median_tokens=20, sigma=0.6, prefill_rate=1e12, saturation_rows=1000
    )
    clock = LoopClock()

    def asked(budget: int) -> list[GroupRequest]:
        params = SamplingParams(max_tokens=40, budget=budget, stop_token_ids=(7,))
        return [dataclasses.replace(request(group, range(4)), params=params) for group in range(5)]

    async def main() -> None:
        whole = await collect(MockRolloutEngine(options).generate(asked(0)))
        spent = clock.now
        began = clock.now

        async def visit(requests: list[GroupRequest]) -> Responses:
            return await collect(MockRolloutEngine(options).generate(requests))

        pieces, visits = await in_visits(asked(6), visit)
        assert visits == -(-max(len(one.token_ids) for one in whole.values()) // 6) > 3
        assert clock.now - began == pytest.approx(spent), "every token is made once"
        for key, one in whole.items():
            assert torch.equal(pieces[key].token_ids, one.token_ids)
            assert torch.equal(pieces[key].logprobs, one.logprobs)
            assert (pieces[key].versions, pieces[key].finish_reason) == (
                one.versions,
                one.finish_reason,
            )

    clock.run(main())


def test_the_mock_engine_cuts_at_a_swap() -> None:
    options = MockRolloutOptions(
        row_rate=10, median_tokens=100, sigma=0, prefill_rate=1e12, swap_seconds=1, max_rows=2
    )

    async def main() -> None:
        engine = MockRolloutEngine(options, version=3)
        asked = request(0, range(3))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(collect(engine.generate([asked])))
            await asyncio.sleep(4.05)
            await engine.load_weights(4, weights(1.0), cut=True)
        done = task.result()
        assert {place: one.versions for (_, place), one in done.items()} == {
            0: ((3, 40),),
            1: ((3, 40),),
            2: ((4, 100),),
        }
        ended = await collect(engine.generate(next_visit([asked], done)))
        assert all(one.versions == ((3, 40), (4, 60)) for one in ended.values())
        whole = await collect(engine.generate([asked]))
        assert torch.equal(ended[0, 1].token_ids[40:], whole[0, 1].token_ids[40:])

    LoopClock().run(main())
