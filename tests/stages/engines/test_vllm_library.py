"""What the vLLM engine does for each vLLM that it serves, without vLLM: the real ones are run by
``make test-vllm``."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.compat import extras
from stages.engines.protocols import (
    EngineFailed,
    EngineMissing,
    GroupRequest,
    SamplingParams,
    Token,
)
from stages.engines.responses import Responses
from stages.engines.vllm import library
from stages.engines.vllm.rows import VllmRow


@dataclass
class Arguments:
    model: str = ""
    max_num_batched_tokens: int = 0
    trust_remote_code: bool = False
    additional_config: dict[str, Any] = field(default_factory=dict)


VLLM = SimpleNamespace(AsyncEngineArgs=Arguments)


def installed(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    monkeypatch.setattr(library, "is_installed", lambda module: module in modules)


def test_further_arguments_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    found = library.engine_arguments(VLLM, {"model": "tiny"}, {"max_num_batched_tokens": 64})
    assert found == Arguments("tiny", 64)
    with pytest.raises(
        ValueError,
        match=r"rollout\.vllm\.max_num_batch_tokens = 3: .* did you mean "
        r"'max_num_batched_tok",
    ):
        library.engine_arguments(VLLM, {}, {"max_num_batch_tokens": 3})
    with pytest.raises(
        ValueError,
        match=r"rollout\.vllm\.model = 'x': is set by this engine; take "
        r"it out",
    ):
        library.engine_arguments(VLLM, {"model": "tiny"}, {"model": "x"})


def test_vllm_ascend_keeps_weights_in_a_layout_that_can_be_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers refuse updates otherwise: 0.23 by a variable, later ones by additional_config."""
    installed(monkeypatch, "vllm_ascend", "torch_npu")
    given = {"additional_config": {"enable_cpu_binding": False, "weight_nz_mode": 2}}
    found = library.engine_arguments(VLLM, {"model": "tiny"}, given)
    assert found.additional_config == {"enable_cpu_binding": False, "weight_nz_mode": 0}
    assert library.engine_arguments(VLLM, {}, {}).additional_config == {"weight_nz_mode": 0}
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ", raising=False)
    with library.vllm_environment(None):
        assert library.os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0"  # type: ignore[attr-defined]
    installed(monkeypatch)
    assert library.engine_arguments(VLLM, {}, {}).additional_config == {}
    with library.vllm_environment(None):
        assert "VLLM_ASCEND_ENABLE_NZ" not in library.os.environ  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_npus", [True, False])
def test_what_is_advised_does_not_replace_the_torch_of_a_machine_with_npus(
    has_npus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    monkeypatch.setattr(extras, "is_installed", lambda module: has_npus)
    with pytest.raises(EngineMissing, match=r"needs vLLM 0\.30 to 0\.33") as raised:
        library.import_vllm()
    assert ("pip install 'asyncdock[vllm]'" in str(raised.value)) == (not has_npus)
    assert ("vllm-ascend" in str(raised.value)) == has_npus
    assert extras.install_vllm() in str(raised.value)


# --- versions of tokens
# --------------------------------------------------------------------------------------------------


def row(alternatives: int | None = None) -> tuple[VllmRow, Responses]:
    responses = Responses(1, lambda _: None)
    request = GroupRequest(0, (0,), torch.tensor([5]), SamplingParams(9), seed=1)
    return VllmRow(request, 0, responses, alternatives), responses


def piece(*tokens: int, spans: Any = ...) -> Any:
    logprobs = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in tokens]
    versions = {} if spans is ... else {"weight_versions": spans}
    return SimpleNamespace(token_ids=[*tokens], logprobs=logprobs, **versions)


def test_tokens_have_the_version_at_which_they_arrive_where_vllm_does_not_count() -> None:
    """Before 0.32 its pieces have no versions at all."""
    made, _ = row()
    made.add(piece(1, 2), asked=3, version=3, counts_versions=False)
    made.add(piece(4), asked=3, version=4, counts_versions=False)
    made.add(piece(6, 7), asked=3, version=4, counts_versions=False)
    assert made.tokens == [1, 2, 4, 6, 7]
    assert made.versions == [(3, 2), (4, 3)]


def test_tokens_have_the_versions_that_vllm_reports_where_it_counts() -> None:
    span = lambda version, start, end: SimpleNamespace(version=version, start=start, end=end)  # noqa: E731
    made, _ = row()
    made.add(piece(1, 2, spans=None), asked=3, version=3, counts_versions=True)
    made.add(piece(4, spans=None), asked=3, version=4, counts_versions=True)
    made.add(
        piece(6, spans=[span("3", 0, 3), span("4", 3, 4)]), asked=3, version=4, counts_versions=True
    )
    assert made.versions == [(3, 3), (4, 1)], "the third token was made before the swap"


@pytest.mark.parametrize("counts", [True, False])
async def test_streamed_tokens_have_their_version_at_once(counts: bool) -> None:
    made, responses = row(alternatives=0)
    made.add(piece(1, spans=None), asked=3, version=3, counts_versions=counts)
    made.add(piece(2, spans=None), asked=3, version=4, counts_versions=counts)
    first = await anext(responses)
    assert isinstance(first, Token)
    assert first.version == 3
    if not counts:
        second = await anext(responses)
        assert isinstance(second, Token)
        assert second.version == 4


class Core:
    """vLLM's way from the engine's process to generators: a queue, a handler that works through it
    in slices, an event for each request."""

    errored = False
    output_handler: object = "it runs"  # since the first request

    def __init__(self, requests: int) -> None:
        self.engine_core = self
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.collected: list[list[int]] = [[] for _ in range(requests)]
        self.ready = [asyncio.Event() for _ in range(requests)]
        self.received: list[list[int]] = [[] for _ in range(requests)]

    async def handle(self) -> None:
        while True:
            outputs = await self.outputs_queue.get()
            for number, token in enumerate(outputs):
                self.collected[number].append(token)
                self.ready[number].set()
                await asyncio.sleep(0)  # between slices

    async def generate(self, number: int) -> None:
        while True:
            while not self.collected[number]:
                await self.ready[number].wait()
            self.ready[number].clear()
            self.received[number] += self.collected[number]
            self.collected[number] = []

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        for token in range(5):  # they were made before the pause was answered
            self.outputs_queue.put_nowait([token] * len(self.received))


async def test_a_swap_waits_for_the_tokens_made_before_it_where_vllm_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", SimpleNamespace(EngineCoreOutputs=list))  # type: ignore[arg-type]
    for counts, complete in ((False, True), (True, False)):
        core = Core(7)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(core.handle()),
                *(group.create_task(core.generate(n)) for n in range(7)),
            ]
            await library.pause(
                SimpleNamespace(counts_versions=counts), core, "keep", clear_cache=False
            )
            assert (core.received == [[0, 1, 2, 3, 4]] * 7) == complete
            for task in tasks:
                task.cancel()


class DyingLLM:
    """Its engine core ends while it loads adapters."""

    errored = False
    name = "small"

    async def add_lora(self, answer: bool) -> bool:
        if not answer:
            self.errored = True
            await asyncio.Event().wait()
        return answer

    async def remove_lora(self, number: int) -> None:
        raise OSError("gone")


async def test_a_call_ends_when_the_engine_core_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LOOK_SECONDS", 0.01)
    llm = library.WatchedLLM(DyingLLM())
    assert llm.name == "small"
    assert await llm.add_lora(True)
    async with asyncio.timeout(10):
        with pytest.raises(EngineFailed, match="engine core has ended during add_lora"):
            await llm.add_lora(False)
    assert llm.errored
    with pytest.raises(EngineFailed, match=r"OSError\('gone'\)"):
        await llm.remove_lora(1)
