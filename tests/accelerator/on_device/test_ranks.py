"""Ranks whose tensors are on the device, in groups of its own backend: each rank has the device of
its number."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.layout import RankCoordinates
from tests.batches import make_batch
from tests.ranks import of_product
from tests.stages import sharded


def collectives(ranks: RankCoordinates) -> dict[str, Any]:
    own = torch.device("npu", ranks.rank)
    value = torch.full((3,), 1.0 + ranks.rank, device=own)
    dist.all_reduce(value)
    every = torch.empty(2, device=own)
    dist.all_gather_into_tensor(every, torch.ones(1, device=own) * ranks.rank)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))  # of the CPU
    return {
        "backend": dist.get_backend(),
        "sum": value.tolist(),
        "every": every.tolist(),
        "at": str(every.device),
    }


def statistics(ranks: RankCoordinates) -> tuple[list[float], list[float]]:
    """Sums over ranks of float64 and of int64, which come from the host."""
    engine = TorchTrainEngine(
        sharded.model_of("llama"), parallel=Sharded(ranks), **{**sharded.OPTIONS, "device": "npu"}
    )
    total = engine.parallel.total(torch.tensor([0.5, 1e-3], dtype=torch.float64) * (1 + ranks.rank))
    counts = engine.parallel.total(torch.tensor([2**40, 3]))
    assert (total.dtype, counts.dtype, engine.device.index) == (
        torch.float64,
        torch.int64,
        ranks.rank,
    )
    return total.tolist(), counts.tolist()


@cache
def of_one_process() -> tuple[list[dict[str, float]], dict[str, Any]]:
    engine = TorchTrainEngine(sharded.model_of("llama"), **sharded.OPTIONS)
    metrics = [
        dict(engine.train_batch(make_batch(seed=seed), sharded.algorithm())) for seed in range(2)
    ]
    return metrics, sharded._plain(sharded.weights_of(engine))


def test_collectives_go_over_the_devices_backend() -> None:
    found = of_product({"dp": 2}, collectives, device="npu")
    assert found == [
        {"backend": "hccl", "sum": [3, 3, 3], "every": [0, 1], "at": "npu:0"},
        {"backend": "hccl", "sum": [3, 3, 3], "every": [0, 1], "at": "npu:1"},
    ]


def test_statistics_over_ranks_need_no_float64_of_the_device() -> None:
    for total, counts in of_product({"dp": 2}, statistics, device="npu"):
        assert total == pytest.approx([1.5, 3e-3])
        assert counts == [2**41, 6]


@pytest.mark.parametrize("chosen", [{"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_steps_on_ranks_are_those_of_one_cpu(chosen: dict[str, int]) -> None:
    expected, weights = of_one_process()
    *found, last = of_product(chosen, sharded.steps, "llama", 2, {"device": "npu"}, device="npu")[0]
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)
    for name, value in last.items():
        gap = np.linalg.norm(value - weights[name]) / max(np.linalg.norm(weights[name]), 1e-6)
        assert gap < 1e-3, f"{name}: {gap}"


def test_turns_on_one_device_give_training_its_bytes_back() -> None:
    """An allgather-swap between two ranks that train and a decoder on each one's device."""
    of_product({"dp": 2}, sharded.taking_turns, "llama", "float32", "npu", device="npu")
