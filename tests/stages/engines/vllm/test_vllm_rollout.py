"""The vLLM engine keeps the contract, with the real vLLM and the real SmolLM2."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from pipeline.data.arena import shared_memory_directory
from stages.engines.protocols import (
    Completion,
    EngineFailed,
    GroupRequest,
    RolloutEngine,
    SamplingParams,
)
from stages.engines.vllm import rollout as vllm_rollout
from stages.engines.vllm.rollout import VllmReceivingEngine, VllmRolloutEngine
from stages.model.load import load_model, load_tokenizer, model_folder
from stages.weights.published import Published, WeightsDamaged, WeightsUnreachable
from stages.weights.transport.network import Credentials, WeightSender
from stages.weights.transport.store import WeightStore
from tests.stages.engines.contract_rollout import (
    ModelContract,
    collect,
    new_processes,
    order_of_ends,
)

pytestmark = pytest.mark.timeout(900)
TOKENIZER = load_tokenizer("smollm2")
SECRET = b"a run's secret, for the tests"


@cache
def smollm2(number: int) -> PreTrainedModel:
    """The model, or number 1: one that differs a little, as after some steps."""
    model, _ = load_model("smollm2", dtype=torch.float32, seed=0)
    if number:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(1.02)
    return model


class OnSmolLM2(ModelContract):
    long_tokens = 120
    atol = 5e-4
    temperatures = (0.0, 0.7, 1.0)
    deadline = 240.0  # vLLM starts in half a minute on idle cores
    processes: ClassVar[dict[RolloutEngine, list[psutil.Process]]] = {}

    async def build(
        self, version: int, kind: type[VllmRolloutEngine] = VllmRolloutEngine, **options: Any
    ) -> VllmRolloutEngine:
        before = set(psutil.Process().children(recursive=True))
        settings: dict[str, Any] = {
            "max_rows": 16,
            "max_model_len": 512,
            "block_size": 32,
            "kv_cache_bytes": 2**28,
        }
        settings |= {"enforce_eager": True, "threads": 2} | options
        shared = shared_memory_directory() / f"asyncdock-test-{time.monotonic_ns()}"
        engine = await asyncio.to_thread(
            lambda: kind(
                model_folder("smollm2"),
                shared=shared,
                dtype=torch.float32,
                initial_version=version,
                **settings,
            )
        )
        self.processes[engine] = new_processes(before)
        return engine

    def prompt(self, group: int) -> torch.Tensor:
        question = [
            {"role": "user", "content": f"What is {group} + 4? Answer with just the number."}
        ]
        return torch.tensor(
            TOKENIZER.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        )

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in smollm2(number).named_parameters()}

    def decode(self, tokens: list[int]) -> str:
        return TOKENIZER.decode(tokens)

    def teacher_forced(self, number: int, request: GroupRequest, done: Completion) -> torch.Tensor:
        with torch.no_grad():
            logits = smollm2(number)(
                input_ids=torch.cat([request.prompt_ids, done.token_ids])[None]
            ).logits[0]
        logits = logits[len(request.prompt_ids) - 1 : -1] / (request.params.temperature or 1.0)
        return logits.log_softmax(-1).gather(-1, done.token_ids[:, None])[:, 0]

    async def harm(self, engine: RolloutEngine) -> None:
        next(
            child for child in self.processes[engine] if "EngineCore" in " ".join(child.cmdline())
        ).kill()


@pytest.mark.asyncio(loop_scope="class")
class TestVllm(OnSmolLM2):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls) -> AsyncIterator[RolloutEngine]:
        built = await cls().build(3)
        yield built
        await built.close()

    async def test_weights_damaged_on_the_way_are_not_loaded_and_what_is_in_flight_goes_on(
        self, engine: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One bit of a published bucket is flipped: the worker's checksum finds it before the model
        is touched."""
        undisturbed = await self.made(engine, self.ask(1, max_tokens=60))
        version = engine.version
        publish = engine._weights.store.publish

        def damaged(*arguments: Any) -> Any:
            published = publish(*arguments)
            memory = engine._weights.store._maps[published.slot]
            memory[published.nbytes // 2] ^= 1
            return published

        monkeypatch.setattr(engine._weights.store, "publish", damaged)
        stream = engine.generate([self.ask(1, max_tokens=60)])
        with pytest.raises(WeightsDamaged, match=rf"keeps version {version}.*checksum"):
            await engine.load_weights(version + 1, self.weights(1))
        assert engine.version == version
        found = await collect(stream)
        assert all(self.same(done, found[place]) for place, done in undisturbed.items())
        assert {done.versions for done in found.values()} == {((version, 60),)}
        monkeypatch.undo()
        await self.load(engine, 0)

    async def test_a_bucket_that_is_dropped_is_found_before_the_model_is_touched(
        self, engine: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = await self.made(engine, self.ask(1))
        version = engine.version
        publish = engine._weights.store.publish

        def dropping(*arguments: Any) -> Published:
            published = publish(*arguments)
            return replace(published, buckets=published.buckets[:1] + published.buckets[2:])

        monkeypatch.setattr(engine._weights.store, "publish", dropping)
        with pytest.raises(WeightsDamaged, match=rf"keeps version {version}.*in no bucket"):
            await engine.load_weights(version + 1, self.weights(1))
        after = await self.made(engine, self.ask(1))
        assert engine.version == version
        assert all(self.same(done, after[place]) for place, done in before.items())
        monkeypatch.undo()
        await self.load(engine, 0)

    async def test_the_rows_of_a_group_share_their_prompt(self, engine: VllmRolloutEngine) -> None:
        """Not asked of vLLM by us, but counted by it: only one row computes the prompt's full
        blocks."""
        request = GroupRequest(0, tuple(range(4)), self.prompt(0).repeat(4), SamplingParams(1), 5)
        cached: list[int] = []
        generate = engine._llm.generate

        async def counted(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
            async for output in generate(*arguments, **options):
                cached.append(output.num_cached_tokens)
                yield output

        engine._llm.generate = counted
        try:
            await self.made(engine, request)
        finally:
            engine._llm.generate = generate
        assert len(cached) == 4
        assert sorted(cached)[1] >= len(request.prompt_ids) // 2

    @pytest.mark.parametrize(
        ("params", "complaint"),
        [
            ({"top_k": 5, "temperature": 0.7}, "filters=True"),
            ({"top_p": 0.0}, "top_p"),
            ({"max_tokens": 600}, "context 512"),
            ({"stop": ("",)}, "may not be empty"),
        ],
    )
    async def test_what_cannot_be_served_is_refused_with_its_reason(
        self, engine: VllmRolloutEngine, params: dict[str, Any], complaint: str
    ) -> None:
        with pytest.raises(ValueError, match=complaint):
            engine.generate([self.ask(0, **params)])


async def test_what_goes_on_starts_before_what_is_new() -> None:
    engine = await TestVllm().build(0, max_rows=1)
    try:
        assert await order_of_ends(engine) == [3, 5, 1]
    finally:
        await engine.close()


async def test_a_swap_that_computes_again_leaves_nothing_of_the_old_weights() -> None:
    """Tokens after the swap have the logprobs that the new weights alone give the whole response;
    with filters too."""
    contract = TestVllm()
    engine = await contract.build(0, filters=True, kv_cache="rebuild")
    try:
        request = contract.ask(1, (0, 1), max_tokens=contract.long_tokens, top_k=50, top_p=0.95)
        stream = engine.generate([request, contract.ask(2, (0,), max_tokens=1)])
        async with asyncio.timeout(contract.deadline):
            await anext(stream)
            await engine.load_weights(1, contract.weights(1))
            found = await collect(stream)
        for done in found.values():
            (old, before), (new, _) = done.versions
            assert (old, new, len(done.token_ids)) == (0, 1, contract.long_tokens)
            expected = torch.cat(
                [
                    contract.teacher_forced(0, request, done)[:before],
                    contract.teacher_forced(1, request, done)[before:],
                ]
            )
            assert torch.allclose(done.logprobs, expected, atol=contract.atol)
        with pytest.raises(ValueError, match="temperature 0 or 1"):
            engine.generate([contract.ask(1, temperature=0.7)])
    finally:
        await engine.close()


async def test_the_first_worker_receives_what_a_trainer_on_other_devices_sends(
    tmp_path: Path,
) -> None:
    """While vLLM goes on generating; what goes wrong on the way leaves it at its version."""
    contract = OnSmolLM2()
    engine = await contract.build(0, VllmReceivingEngine)
    assert isinstance(engine, VllmReceivingEngine)
    directory = engine._weights.store.directory
    Credentials(SECRET, directory).write(directory)
    sender = WeightSender(WeightStore(tmp_path), host="127.0.0.1", secret=SECRET)
    try:
        published = sender.publish(1, contract.weights(1).items())
        memory = sender._store.memory(published)
        memory[-1] ^= 1
        with pytest.raises(WeightsDamaged, match=r"keeps version 0: .*checksum"):
            await engine.receive(published)
        memory[-1] ^= 1
        with pytest.raises(WeightsDamaged, match=r"keeps version 0: .*in no bucket"):
            await engine.receive(replace(published, buckets=published.buckets[1:]))

        request = contract.ask(1, (0,), max_tokens=contract.long_tokens)
        stream = engine.generate([request])
        landed = await engine.receive(published)
        assert (engine.version, len(engine._rows)) == (0, 1)
        assert {name: tensor.shape for name, tensor in landed.items()} == {
            name: tensor.shape for name, tensor in contract.weights(1).items()
        }
        await engine.load_weights(1, landed)
        (done,) = (await collect(stream)).values()
        (old, before), (new, after) = done.versions
        assert (old, new, before + after) == (0, 1, contract.long_tokens)
        (fresh,) = (await contract.made(engine, request)).values()
        expected = contract.teacher_forced(1, request, fresh)
        assert torch.allclose(fresh.logprobs, expected, atol=contract.atol)

        # as changes: there are none
        same = await engine.receive(sender.publish(2, contract.weights(1).items()))
        assert same.keys() == landed.keys()
        never = sender.publish(3, contract.weights(1).items())
        sender.close()
        with pytest.raises(
            WeightsUnreachable,
            match=r"keeps version 1: .*not received from the "
            r"trainer",
        ):
            await engine.receive(never)
        await engine.load_weights(2, contract.weights(0))  # tensors, as any engine takes them
        (again,) = (await contract.made(engine, request)).values()
        assert torch.allclose(
            again.logprobs, contract.teacher_forced(0, request, again), atol=contract.atol
        )
    finally:
        await engine.close()


async def test_an_update_that_vllm_never_ends_fails_the_engine_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its worker stops in the middle, as one that waits for a device would; its iterators raise."""
    monkeypatch.setattr(vllm_rollout, "SHUTDOWN_SECONDS", 2.0)
    contract = OnSmolLM2()
    engine = await contract.build(0)
    try:
        await contract.load(engine, 1)
        update = engine._update

        begun = asyncio.Event()

        async def stalling(*arguments: Any) -> None:
            for process in contract.processes[engine]:
                process.suspend()
            begun.set()
            await update(*arguments)

        monkeypatch.setattr(engine, "_update", stalling)
        stream = engine.generate([contract.ask(1, max_tokens=contract.long_tokens)])
        loading = asyncio.create_task(engine.load_weights(9, contract.weights(0)))
        await begun.wait()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loading, 2)
        assert time.monotonic() - began < 30
        with pytest.raises(EngineFailed, match="has not ended its update to version 9"):
            await collect(stream)
        assert engine.version != 9
    finally:
        await asyncio.wait_for(engine.close(), 60)
    _, alive = psutil.wait_procs(contract.processes[engine], timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


OWNER = """
import sys, torch, psutil
from pathlib import Path
from stages.engines.vllm.rollout import VllmRolloutEngine
from stages.model.load import model_folder

if __name__ == "__main__":
    VllmRolloutEngine(model_folder("smollm2"), shared=Path(sys.argv[1]), dtype=torch.float32, max_rows=2,
        max_model_len=64, kv_cache_bytes=2**26, enforce_eager=True, threads=1)
    print("ready", *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
"""


def test_vllms_processes_end_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "owner.py").write_text(OWNER)
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "shared")]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        ready = next(line for line in owner.stdout if line.startswith("ready"))
        children = [psutil.Process(int(pid)) for pid in ready.split()[1:]]
        assert any("EngineCore" in " ".join(child.cmdline()) for child in children)
    finally:
        owner.kill()
        owner.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
