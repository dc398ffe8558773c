"""The rollout engines that need nothing installed keep the contract; so does the example for those
who write another."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from orchestration.recipe.loading.load import load_recipe
from orchestration.workers.engines import rollout_engine
from pipeline.problems import Fatal
from stages.engines.mock.engines import MockRolloutEngine
from stages.engines.mock.options import MockRolloutOptions
from stages.engines.protocols import Completion, EngineMissing, GroupRequest, RolloutEngine
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.rollout import TorchRolloutEngine
from tests.stages.engines.contract_rollout import (
    ModelContract,
    RolloutContract,
    SleepContract,
    order_of_ends,
)
from tests.stages.engines.echo import EchoRolloutEngine


class TestEcho(RolloutContract):
    long_tokens = 2000

    async def build(self, version: int) -> RolloutEngine:
        return EchoRolloutEngine(version=version)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor([1 + number])}

    def test_a_simple_engine_is_one_short_file(self) -> None:
        assert len((Path(__file__).parent / "echo.py").read_text().splitlines()) < 180


class TestMock(RolloutContract):
    @pytest.fixture
    async def engine(self) -> Any:
        built = await self.build(3)
        await built.load_weights(3, self.weights(0))  # the mock has none to begin with
        yield built
        await built.close()

    async def build(self, version: int) -> RolloutEngine:
        options = MockRolloutOptions(
            median_tokens=self.long_tokens, sigma=0, row_rate=500, swap_seconds=0.01
        )
        return MockRolloutEngine(options, version=version)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return {"head.weight": torch.full((3,), float(number)), "body.weight": torch.zeros(2, 2)}


def llama(number: int) -> LlamaForCausalLM:
    torch.manual_seed(number)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


class Letters:
    """Two letters per token, so that a stop string may begin inside one."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(65 + token // 10) + chr(97 + token % 10) for token in token_ids)


class TestTorch(ModelContract):
    models: dict[int, LlamaForCausalLM]

    @pytest.fixture(autouse=True)
    def _models(self) -> None:
        self.models = {number: llama(number) for number in (0, 1)}

    async def build(self, version: int) -> RolloutEngine:
        return TorchRolloutEngine(llama(0), Letters(), max_rows=8, initial_version=version)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().clone()
            for name, parameter in self.models[number].named_parameters()
        }

    def teacher_forced(self, number: int, request: GroupRequest, done: Completion) -> torch.Tensor:
        with torch.no_grad():
            logits = self.models[number](
                input_ids=torch.cat([request.prompt_ids, done.token_ids])[None]
            ).logits[0]
        logits = logits[len(request.prompt_ids) - 1 : -1] / (request.params.temperature or 1.0)
        return logits.log_softmax(-1).gather(-1, done.token_ids[:, None])[:, 0]

    def decode(self, tokens: list[int]) -> str:
        return Letters().decode(tokens)

    async def harm(self, engine: RolloutEngine) -> None:
        broken = self.weights(0)
        broken["model.norm.weight"].fill_(torch.nan)
        await engine.load_weights(1, broken)

    async def test_filters_leave_the_logprobs_alone(self, engine: RolloutEngine) -> None:
        requests = [
            self.ask(0, (0, 1, 2), temperature=1.7, top_k=5, top_p=0.8),
            self.ask(1, temperature=0.6, top_k=2),
        ]
        await self._check_logprobs(engine, 0, requests)


class TestTorchThatGivesItsDeviceAway(SleepContract, TestTorch):
    async def build(self, version: int) -> RolloutEngine:
        return TorchRolloutEngine(
            llama(0), Letters(), max_rows=8, initial_version=version, packed=False
        )

    def fill(self, engine: Any, number: int) -> None:
        parameters = dict(engine._decoder.model.named_parameters())
        for tensor in engine.tensors.values():
            tensor.untyped_storage().resize_(tensor.nbytes)
        for name, value in self.weights(number).items():
            parameters[name].data.copy_(value)


def test_weights_that_are_packed_cannot_be_given_away() -> None:
    decoder = TorchDecoder(llama(0), torch.device("cpu"), packed=True)
    with pytest.raises(ValueError, match="packed=False"):
        decoder.weights.tensors()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_its_engine_names_the_install_command() -> None:
    recipe = load_recipe(
        Path(__file__).parents[3] / "recipes" / "quickstart-vllm.toml",
        ["model.source=tiny"],
        files=False,
    )
    with pytest.raises(
        EngineMissing,
        match=r"rollout.engine = 'vllm' .* pip install "
        r"'asyncdock\[vllm\]'",
    ):
        rollout_engine(recipe, version=0)
    assert issubclass(EngineMissing, Fatal)  # no worker is started again for it


@pytest.mark.parametrize("kind", ["torch", "mock"])
async def test_what_goes_on_starts_before_what_is_new(kind: str) -> None:
    if kind == "torch":
        engine: RolloutEngine = TorchRolloutEngine(llama(0), Letters(), max_rows=1)
    else:
        engine = MockRolloutEngine(
            MockRolloutOptions(median_tokens=8, sigma=0, row_rate=500, max_rows=1)
        )
    assert await order_of_ends(engine) == [3, 5, 1]
    await engine.close()
