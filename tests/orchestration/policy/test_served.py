"""Which policies a process has open."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from orchestration.policy.served import Policies
from orchestration.policy.source import PoliciesBusy, PolicyUnknown
from stages.engines.protocols import EngineClosed, EngineFailed
from stages.models import tiny_model, tiny_tokenizer


def models() -> set[int]:
    """Ids of the models in memory; earlier tests may have left some, which can go at any time."""
    return {id(one) for one in gc.get_objects() if issubclass(type(one), PreTrainedModel)}


async def test_the_policy_unused_for_longest_is_closed_for_another_one(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    gc.collect()
    names, before = ("a", "b", "c"), models()
    policies = Policies("redis://127.0.0.1:1", checkpoints=dict.fromkeys(names, str(tmp_path)), most=2)
    gc.disable()  # a model is not left to it
    try:
        async with policies.use("a") as a, policies.use("b") as b:
            with pytest.raises(PoliciesBusy, match=r"\(2\) are in use: a, b"):
                async with policies.use("c"):
                    pass
        async with policies.use("a") as again:
            assert again is a, "it stays open"
        async with policies.use("c"), policies.use("a") as again:
            assert again is a
        async with b.engines.engine(mixed=False) as engine:
            with pytest.raises(EngineClosed):
                engine.generate([])
        with pytest.raises(EngineFailed):
            async with policies.use("a"):
                raise EngineFailed("out of memory")
        async with policies.use("a") as again:
            assert again is not a, "an engine that has failed is not used again"
        del a, b, again, engine
        with pytest.raises(PolicyUnknown, match="RUN@VERSION"):
            async with policies.use("a@b"):
                pass
    finally:
        await policies.close()
        gc.enable()
    assert models() <= before, "a closed policy has no memory"
