"""Which policies a process has open."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from orchestration.policy import served
from orchestration.policy.engines import PolicyEngines
from orchestration.policy.served import Policies
from orchestration.policy.source import PoliciesBusy, PolicyUnknown
from orchestration.state.documents import RUN_PATHS, RUN_RECIPE
from orchestration.state.paths import RunPaths
from pipeline.index.client import Index, RunConfig
from pipeline.index.embedded import EmbeddedIndex
from stages.engines.protocols import EngineClosed, EngineFailed
from stages.model.load import tiny_model, tiny_tokenizer
from tests.orchestration.runs import TINY, recipe


def models() -> set[int]:
    """Ids of the models in memory; earlier tests may have left some, which can go at any time."""
    return {id(one) for one in gc.get_objects() if issubclass(type(one), PreTrainedModel)}


async def test_the_policy_unused_for_longest_is_closed_for_another_one(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    gc.collect()
    names = ("a", "b", "c")
    before = models()
    policies = Policies(
        "redis://127.0.0.1:1", checkpoints=dict.fromkeys(names, str(tmp_path)), most=2
    )
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


@dataclass
class Run:
    """A run in an index of the test's own: its folder, and what is served of it."""

    index: Index
    policies: Policies
    folder: Path

    def checkpoint(self, version: int) -> Path:
        folder = self.folder / "checkpoints" / f"step-{version:08d}"
        tiny_model(version).save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        (folder / "run.json").write_text(
            json.dumps({"version": version, "counters": {}, "remake": []})
        )
        return folder


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    with EmbeddedIndex(tmp_path / "index") as server:
        index = Index(server.url, "a-run")
        await index.init(RunConfig(()), {})
        await RUN_RECIPE.put(index, recipe(TINY))
        await RUN_PATHS.put(index, RunPaths(tmp_path, tmp_path / "shm", None))
        await index.transition(["", "created"], "running")
        policies = Policies(server.url, checkpoints={})
        yield Run(index, policies, tmp_path)
        await policies.close()
        await index.close()


def remove_while_it_is_opened(
    monkeypatch: pytest.MonkeyPatch, folder: Path, then: Callable[[], object]
) -> None:
    """A run removes the checkpoint ``folder`` after it was listed and before its model is
    loaded."""
    opened = PolicyEngines.open
    pending = [folder]

    async def late(engines: PolicyEngines, version: int, model: Path | None) -> None:
        if model is not None and model.parent in pending:
            shutil.rmtree(pending.pop())
            then()
        await opened(engines, version, model)

    monkeypatch.setattr(PolicyEngines, "open", late)


async def test_a_version_that_is_removed_while_it_is_opened_is_unknown(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.checkpoint(2)
    remove_while_it_is_opened(monkeypatch, run.checkpoint(4), lambda: None)
    with pytest.raises(PolicyUnknown, match=r"no version 4 any more; it has \[2\] as checkpoints"):
        async with run.policies.use("a-run@4"):
            pass


async def test_the_newest_one_that_is_removed_while_it_is_opened_gives_way_to_a_newer_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_while_it_is_opened(monkeypatch, run.checkpoint(4), lambda: run.checkpoint(6))
    async with run.policies.use("a-run") as policy:
        assert policy.engines.version == 6


async def test_a_damaged_one_harms_no_other(run: Run) -> None:
    run.checkpoint(2)
    (run.checkpoint(4) / "run.json").write_text('{"version": ')
    async with run.policies.use("a-run@2") as pinned, run.policies.use("a-run") as newest:
        assert (pinned.engines.version, newest.engines.version) == (2, 2)
    with pytest.raises(PolicyUnknown, match="no version 4"):
        async with run.policies.use("a-run@4"):
            pass


async def test_tokens_that_pad_the_embedding_are_served_where_the_recipe_says_so(
    tmp_path: Path,
) -> None:
    """Of given responses, for one, trainers use all of them; what is served does not."""
    model = tiny_model(0)
    model.resize_token_embeddings(64, mean_resizing=False)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    made = recipe(TINY, model__source=str(tmp_path))
    for vocabulary, known in (("auto", 49), ("tokenizer", 49), ("model", None)):
        for responses in ([], ["answer"]):
            changed = made.model_copy(
                update={
                    "model": made.model.model_copy(update={"vocabulary": vocabulary}),
                    "prompts": made.prompts.model_copy(update={"responses": responses}),
                }
            )
            async with contextlib.AsyncExitStack() as stack:
                policies = served.Policies("redis://127.0.0.1:1", checkpoints={})
                policy = await policies._policy(changed, b"", stack, trusted=True)
                await policy.engines.open(0, None)
                (engine,) = policy.engines.all()
                assert engine._decoder._sampled == known  # type: ignore[attr-defined]
