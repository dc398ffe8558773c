"""Every train engine keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.mock.engines import MockTrainEngine
from stages.engines.mock.options import MockTrainOptions
from stages.engines.protocols import TrainEngine
from stages.engines.torch.parallel.mesh import join
from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.layout import ALONE
from tests.batches import make_batch
from tests.stages.engines.contract_train import TrainEngineContract
from tests.stages.sharded import OPTIONS, model_of


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class TestMock(TrainEngineContract):
    transformers = False

    def make(self, seed: int) -> TrainEngine:
        return MockTrainEngine(MockTrainOptions(time_scale=1e-6), seed=seed)


class TestTorch(TrainEngineContract):
    def make(self, seed: int) -> TrainEngine:
        return TorchTrainEngine(model_of("qwen3", seed=seed), **OPTIONS)


class TestMixedPrecision(TrainEngineContract):
    def make(self, seed: int) -> TrainEngine:
        return TorchTrainEngine(model_of("qwen3", seed=seed), compute=torch.bfloat16, **OPTIONS)


class TestShardedOnOneRank(TrainEngineContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _group(cls) -> Iterator[None]:
        join(ALONE, dist.HashStore(), torch.device("cpu"), 60)
        yield
        dist.destroy_process_group()

    def make(self, seed: int) -> TrainEngine:
        return TorchTrainEngine(model_of("qwen3", seed=seed), parallel=Sharded(ALONE), **OPTIONS)

    def test_it_is_the_torch_engine_but_for_rounding(self) -> None:
        sharded = self.make(0)
        plain = TorchTrainEngine(model_of("qwen3"), **OPTIONS)
        for seed in range(3):
            batch = make_batch(seed=seed)
            got = dict(sharded.train_batch(batch, GRPO()))
            expected = dict(plain.train_batch(batch, GRPO()))
            assert got == pytest.approx(expected, rel=1e-4)


class TestShardedOwningItsGroup(TrainEngineContract):
    """In mixed precision."""

    @pytest.fixture(autouse=True)
    def _one_at_a_time(self) -> Iterator[None]:
        self.made: list[TorchTrainEngine] = []
        yield
        for engine in self.made:
            engine.close()
        assert not dist.is_initialized()

    def make(self, seed: int) -> TrainEngine:
        store = None if dist.is_initialized() else dist.HashStore()
        options = {**OPTIONS, "compute": torch.bfloat16, "parallel": Sharded(ALONE, store=store)}
        self.made.append(TorchTrainEngine(model_of("llama", seed=seed), **options))
        return self.made[-1]
