"""A fault in one row of the torch rollout engine, anywhere: its request alone fails, and no other
token changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from stages.engines.protocols import (
    Completion,
    EngineFailed,
    GroupRequest,
    ResponseFailed,
    SamplingParams,
    Token,
)
from stages.engines.torch.decoding import batch as batches
from stages.engines.torch.decoding import rows as row_draws
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.rows import ResponseRow
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import tiny_model, tiny_tokenizer

STREAMS = 20
TOKENS = 16
BAD = 99  # the group whose row fails
PLACES = ["sampling", "logits", "stop strings", "forward", "uniform", "append"]


class Fault(Exception):
    """What is raised."""


def request(group: int) -> GroupRequest:
    prompt = torch.tensor([3 + group % 40, 4, 5, 6 + group % 7][: 2 + group % 3])
    temperature = (0.0, 0.7, 1.0, 1.3)[group % 4]
    stop = ("=:=",) if group == BAD or group % 5 == 0 else ()
    params = SamplingParams(TOKENS, temperature=temperature, top_k=group % 3 * 7, stop=stop)
    return GroupRequest(group, (0,), prompt, params, seed=group)


@asynccontextmanager
async def engine_of(
    accelerated: bool, max_rows: int = STREAMS + 1
) -> AsyncIterator[TorchRolloutEngine]:
    engine = TorchRolloutEngine(
        tiny_model(3),
        tiny_tokenizer(),
        max_rows=max_rows,
        threads=1,
        device="cpu",
        accelerated=accelerated,
    )
    try:
        yield engine
    finally:
        await engine.close()


async def tokens_of(engine: TorchRolloutEngine, asked: GroupRequest) -> list[int] | ResponseFailed:
    made: list[int] = []
    try:
        async for item in engine.stream([asked], alternatives=3):
            if isinstance(item, Token):
                made.append(item.token_id)
            else:
                assert isinstance(item, Completion)
                assert item.token_ids.tolist() == made
    except ResponseFailed as failed:
        return failed
    return made


async def streams(
    engine: TorchRolloutEngine, groups: Sequence[int]
) -> dict[int, list[int] | ResponseFailed]:
    await engine.pause()  # so that all begin together
    tasks = {group: asyncio.create_task(tokens_of(engine, request(group))) for group in groups}
    await asyncio.sleep(0)
    await engine.resume()
    return {group: await task for group, task in tasks.items()}


def inject(monkeypatch: pytest.MonkeyPatch, place: str, step: int) -> None:
    """Let the row of group BAD fail in ``place`` at its token number ``step``."""

    def is_due(row: ResponseRow, unread: int = 0) -> bool:
        return row.request.group == BAD and len(row.tokens) + unread >= step

    def failing(
        function: Callable[..., Any], rows_of: Callable[..., Sequence[ResponseRow]]
    ) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            if any(map(is_due, rows_of(*arguments))):
                raise Fault(place)
            return function(*arguments, **options)

        return act

    match place:
        case "sampling" | "logits":
            draw = batches.draw_next

            def broken(
                rows: Sequence[ResponseRow],
                logits: torch.Tensor,
                before: Any = None,
            ) -> Any:
                due = [is_due(row, 1 if before else 0) for row in rows]
                if place == "sampling" and any(due):
                    raise Fault(place)
                broken_rows = torch.tensor(due).nonzero()[:, 0]
                return draw(rows, logits.index_fill(0, broken_rows, torch.nan), before)

            monkeypatch.setattr(batches, "draw_next", broken)
        case "stop strings":
            act = failing(ResponseRow._has_stop_string, lambda row, tokenizer: [row])
            monkeypatch.setattr(ResponseRow, "_has_stop_string", act)
        case "append":
            monkeypatch.setattr(
                ResponseRow, "append", failing(ResponseRow.append, lambda row, *_: [row])
            )
        case "uniform":

            def uniform(
                seed: int, place: int, index: int, own: Callable[..., float] = row_draws.uniform
            ) -> float:
                if seed == BAD and index >= step:
                    raise Fault("uniform")
                return own(seed, place, index)

            monkeypatch.setattr(row_draws, "uniform", uniform)
        case "forward":
            # The prompt of BAD is the only one that begins with this token: at its row's own length
            # the forward fails.
            prefill = TorchDecoder.prefill
            decode = TorchDecoder.decode
            bad: list[Any] = []

            def begins(
                self: TorchDecoder, prompts: Sequence[torch.Tensor], adapters: Sequence[str] = ()
            ) -> Any:
                mine = [int(ids[0]) == 3 + BAD % 40 and len(ids) == 2 for ids in prompts]
                if not step and any(mine):
                    raise Fault("prefill")
                handles, logits = prefill(self, prompts, adapters)
                bad.extend(handle for handle, one in zip(handles, mine, strict=True) if one)
                return handles, logits

            def goes_on(self: TorchDecoder, tokens: Any) -> Any:
                if any(row.prompt in bad and row.length + 1 >= step for row in self.rows):
                    raise Fault("decode")
                return decode(self, tokens)

            monkeypatch.setattr(TorchDecoder, "prefill", begins)
            monkeypatch.setattr(TorchDecoder, "decode", goes_on)


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("step", [0, 1, 7, TOKENS - 1])
@pytest.mark.parametrize("place", PLACES)
async def test_twenty_streams_go_on_token_by_token(
    place: str, step: int, accelerated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group for group in range(50) if request(group).prompt_ids[0] != 3 + BAD % 40][
        :STREAMS
    ]
    async with engine_of(accelerated) as engine:
        undisturbed = await streams(engine, [*groups, BAD])
        assert all(isinstance(made, list) for made in undisturbed.values())
        inject(monkeypatch, place, step)
        middle = STREAMS // 2
        disturbed = await streams(engine, [*groups[:middle], BAD, *groups[middle:]])
        failed = disturbed.pop(BAD)
        assert isinstance(failed, ResponseFailed), failed
        assert isinstance(failed.__cause__, ValueError if place == "logits" else Fault)
        assert disturbed == {group: undisturbed[group] for group in groups}
        await engine.pause()  # at a token boundary
        assert not engine._batch.rows
        assert not engine._batch.waiting
        assert not engine._decoder.prompts, "nothing is kept of the row"
        monkeypatch.undo()
        assert await streams(engine, [*groups, BAD]) == undisturbed, "nor is the engine harmed"


async def test_a_request_fails_with_all_of_its_rows_and_others_that_wait_are_served() -> None:
    async with engine_of(False, max_rows=2) as engine:
        alone = await streams(engine, [1, 2])
        with pytest.MonkeyPatch.context() as patch:
            inject(patch, "sampling", 2)
            several = GroupRequest(
                BAD, tuple(range(6)), *[request(BAD).prompt_ids, request(BAD).params], seed=BAD
            )
            failing = asyncio.create_task(tokens_of(engine, several))
            await asyncio.sleep(0)
            assert await streams(engine, [1, 2]) == alone
            assert isinstance(await failing, ResponseFailed)


async def test_where_nothing_can_be_computed_the_engine_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine_of(False) as engine:
        await streams(engine, [1, 2])

        def fails(*_: Any) -> Any:
            raise Fault("the device is gone")

        monkeypatch.setattr(engine._decoder, "decode", fails)
        asked = [engine.generate([request(group)]) for group in range(3)]
        for each in asked:
            with pytest.raises(EngineFailed, match="the device is gone"):
                await anext(each)
