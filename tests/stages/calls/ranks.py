"""What ranks do in the tests of called models, and one process (None) by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.calls.base import TorchBase
from stages.calls.interface import AdamOptions, ModelOptions, PassOutput
from stages.calls.model import TorchCalledModel
from stages.engines.torch.parallel.sharded import Sharded
from stages.parallel.layout import RankCoordinates
from tests.stages.calls.data import sampled, supervised

STEP = AdamOptions(learning_rate=1e-2, grad_clip_norm=0.5)


def base_of(ranks: RankCoordinates | None, source: str, **options: Any) -> TorchBase:
    parallel = None if ranks is None else Sharded(ranks)
    options = {"device": "cpu", "threads": 1, "seed": 3, "token_budget": 24, **options}
    return TorchBase.load(source, ranks=parallel, **options)


def plain(output: PassOutput) -> tuple[list[np.ndarray], dict[str, float]]:
    return [row.copy() for row in output.logprobs], dict(output.metrics)


def weights_of(model: TorchCalledModel) -> dict[str, np.ndarray]:
    return {name: value.float().numpy() for name, value in model.adapter().items()}


def training(
    ranks: RankCoordinates | None, source: str, model_options: dict[str, Any]
) -> dict[str, Any]:
    """Passes of several losses, more and fewer data than ranks, and steps."""
    model = TorchCalledModel(base_of(ranks, source), ModelOptions(**model_options))
    outputs = []
    norms = []
    for seed, loss in enumerate(("ppo", "gspo", "cispo")):
        data = sampled(seed=seed, group=4)
        outputs.append(plain(model.forward(data, loss, {})))
        outputs.append(plain(model.forward_backward(data, loss, {})))
        outputs.append(
            plain(model.forward_backward(supervised(seed=seed, k=2)[:1], "cross_entropy", {}))
        )
        norms.append(model.optimizer_step(STEP)["grad_norm"])
    return {"outputs": outputs, "norms": norms, "weights": weights_of(model)}
