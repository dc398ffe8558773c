"""The parts of an engine on torch."""

from __future__ import annotations

from functools import partial

from orchestration.calls.engines.torch_parts import TOKEN_BUDGET, open_parts
from stages.calls.interface import ServedBase


async def test_a_pass_feeds_a_bounded_number_of_tokens_at_once() -> None:
    base = ServedBase("tiny", "tiny", 512, "tiny")
    for options, budget in (({}, TOKEN_BUDGET), ({"token_budget": 64}, 64)):
        parts = await open_parts(base, {"device": "cpu", "threads": 1, **options})
        assert isinstance(parts.new_model, partial)
        assert parts.new_model.args[0].token_budget == budget
        assert parts.sampler is not None
        await parts.sampler.close()
