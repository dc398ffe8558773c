"""What ranks do in the tests of products of strategies. Each function runs on every rank; arguments are small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stages.engines.strategies import Ranks
from stages.engines.torch.sharded import ShardedTrainEngine
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch
from tests.stages.sharded import OPTIONS, algorithm, gradients_of_step, model_of, share, weights_of


def name_of(chosen: Mapping[str, int], options: Mapping[str, Any] | None = None) -> str:
    """As in ``dp4-dp_replicate2``."""
    return "-".join([*(f"{name}{size}" for name, size in chosen.items()), *map(str, (options or {}).values())])


def first_step(ranks: Ranks, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A step in float32, and :func:`after_steps`, by a rank. Gradients are of the parameters that it has."""
    engine = ShardedTrainEngine(model_of(kind), ranks, **{**OPTIONS, **options})
    logprobs = [row.tolist() for row in engine.logprobs(share(ranks)).unbind()]
    gradients, metrics = gradients_of_step(engine, share(ranks), algorithm())
    of_rank = {name: value.numpy() for name, value in gradients.items()}
    return {"metrics": metrics, "logprobs": logprobs, "gradients": of_rank, "steps": after_steps(ranks, kind, options)}


def after_steps(ranks: Ranks | None, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All weights after three steps, in float64, by one process (None) or a rank."""
    model, options = model_of(kind, dtype=torch.float64), {**OPTIONS, "grad_clip": 0.5, "weight_decay": 0.1, **given}
    engine = TorchTrainEngine(model, **options) if ranks is None else ShardedTrainEngine(model, ranks, **options)
    for seed in range(3):
        batch = make_batch(seed=seed) if ranks is None else share(ranks, seed=seed)
        engine.train_batch(batch, algorithm())
    return {name: value.numpy() for name, value in weights_of(engine).items()}
