"""Tokens as the torch rollout engine makes them."""

from __future__ import annotations

import pytest

from stages.engines.protocols import Completion, StreamingEngine, Token
from tests.stages.engines.torch.test_rollout import ask, collect, rows_of, running


@pytest.mark.parametrize("accelerated", [False, True])
async def test_the_tokens_before_a_completion_are_its_own(accelerated: bool) -> None:
    async with running(accelerated=accelerated, max_rows=3) as engine:
        assert isinstance(engine, StreamingEngine)
        requests = [ask(0), ask(1, places=3, stop_token_ids=(5,)), ask(2, max_tokens=1)]
        tokens = dict[tuple[int, int], list[Token]]()
        completions = dict[tuple[int, int], Completion]()
        async for item in engine.stream(requests):
            key = (item.group, item.place)
            assert key not in completions, "nothing follows the completion"
            if isinstance(item, Token):
                tokens.setdefault(key, []).append(item)
            else:
                completions[key] = item
        for key, done in completions.items():
            assert [token.token_id for token in tokens[key]] == done.token_ids.tolist()
            assert [token.logprob for token in tokens[key]] == pytest.approx(done.logprobs.tolist())
            assert {token.version for token in tokens[key]} == {
                version for version, _ in done.versions
            }
        whole = await collect(engine.generate(requests))
        assert {key: done.token_ids.tolist() for key, done in whole.items()} == {
            key: done.token_ids.tolist() for key, done in completions.items()
        }


async def test_a_stream_that_is_closed_frees_its_rows() -> None:
    async with running() as engine:
        stream = engine.stream([ask(0, max_tokens=200)])
        assert isinstance(await anext(stream), Token)
        await stream.aclose()  # type: ignore[attr-defined]
        await engine.pause()
        assert rows_of(engine) == 0
