"""What ranks do in the tests of called models. Each function runs on every rank, or with None in one
process; a checkpoint of the model ``tiny`` is their base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.calls.base import TorchBase
from stages.calls.interface import AdamOptions, Datum, ModelOptions, PassOutput
from stages.calls.model import TorchCalledModel
from stages.engines.torch.parallel.sharded import Sharded
from stages.parallel.layout import RankCoordinates
from stages.resharding.tensors import local_weights
from tests.stages.calls.data import changed, sampled, supervised

STEP = AdamOptions(learning_rate=1e-2, grad_clip_norm=0.5)
KINDS: dict[str, dict[str, Any]] = {
    "adapter": {"rank": 4, "seed": 7},
    "head": {"rank": 4, "seed": 7, "head": True},
    "whole": {"rank": 0, "seed": 7},
}


def base_of(ranks: RankCoordinates | None, source: str, **options: Any) -> TorchBase:
    parallel = None if ranks is None else Sharded(ranks)
    options = {"device": "cpu", "threads": 1, "token_budget": 24, **options}
    return TorchBase.load(source, ranks=parallel, **options)


def model_of(base: TorchBase, kind: str) -> TorchCalledModel:
    return TorchCalledModel(base, ModelOptions(**KINDS[kind]))


def plain(output: PassOutput) -> tuple[list[np.ndarray], dict[str, float]]:
    return [row.copy() for row in output.logprobs], dict(output.metrics)


def weights_of(model: TorchCalledModel) -> dict[str, bytes]:
    return {name: value.float().numpy().tobytes() for name, value in model.adapter().items()}


def step(model: TorchCalledModel, seed: int, loss: str = "ppo") -> dict[str, Any]:
    """A pass without gradients, two with, and an optimizer step."""
    data = sampled(seed=seed, group=4)
    one_datum = supervised(seed=seed, k=2)[:1]  # fewer than there are replicas
    outputs = [
        model.forward(data, loss, {}),
        model.forward_backward(data, loss, {}),
        model.forward_backward(one_datum, "cross_entropy", {}),
    ]
    metrics = model.optimizer_step(STEP)
    return {"outputs": [plain(output) for output in outputs], "norm": metrics["grad_norm"]}


def steps(ranks: RankCoordinates | None, source: str, kind: str) -> list[dict[str, Any]]:
    model = model_of(base_of(ranks, source), kind)
    return [step(model, seed, loss) for seed, loss in enumerate(("ppo", "gspo", "cispo"))]


def side_by_side(ranks: RankCoordinates, source: str) -> dict[str, Any]:
    """The weights of models that are trained alone, and by turns on one base, which all of their
    ranks' shards are of."""
    alone = {}
    for kind in KINDS:
        model = model_of(base_of(ranks, source), kind)
        for seed in range(2):
            step(model, seed)
        alone[kind] = weights_of(model)
    base = base_of(ranks, source)
    models = {kind: model_of(base, kind) for kind in KINDS}
    for seed in range(2):
        for model in models.values():
            step(model, seed)
    together = {kind: weights_of(model) for kind, model in models.items()}
    frozen = [
        {n.replace(".base_layer", ""): value.data_ptr() for n, value in shards.items()}
        for shards in (local_weights(models[kind]._engine.model) for kind in ("adapter", "head"))
    ]
    copied = {n for n, at in frozen[0].items() if "lora_" not in n and frozen[1][n] != at}
    models["adapter"].close()
    step(models["head"], 2)
    return {"same": alone == together, "copied": copied}


def message_of(operation: Callable[[], Any]) -> str:
    try:
        operation()
    except (FloatingPointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(ranks: RankCoordinates, source: str, folder: str) -> dict[str, Any]:
    """What calls say that cannot be served, and a step after them, beside one without them."""
    base = base_of(ranks, source)
    undisturbed, model = model_of(base, "adapter"), model_of(base, "adapter")
    undisturbed.save(Path(folder) / "saved", optimizer=True, merged=False)
    for each in (undisturbed, model):
        each.forward_backward(sampled(), "ppo", {})
    long, short = sampled(prompts=(12,), group=1)[0], sampled(prompts=(2,), group=1)[0]
    far = changed(short, logprobs=np.full(len(short.tokens), -500, np.float32))
    steep = {"target_tokens": np.ones(400, int), "weights": np.full(400, 5e37, np.float32)}
    # one rank alone finds no folder
    loaded = Path(folder) / ("saved" if ranks.rank == 0 else "missing")
    messages = [
        message_of(operation)
        for operation in (
            lambda: model.forward_backward([long, far], "importance_sampling", {}),
            lambda: model.forward([long, far], "importance_sampling", {}),
            lambda: model.forward_backward([Datum(np.ones(400, int), steep)], "cross_entropy", {}),
            lambda: model.forward_backward([], "ppo", {}),
            lambda: model.load(loaded, optimizer=True),
        )
    ]
    norms = [each.optimizer_step(STEP)["grad_norm"] for each in (undisturbed, model)]
    messages.append(message_of(lambda: model.optimizer_step(STEP)))
    same = weights_of(undisturbed) == weights_of(model) and norms[0] == norms[1]
    return {"messages": messages, "same": same}


def saved(ranks: RankCoordinates | None, source: str, kind: str, folder: str, begin: str) -> Any:
    """Load ``begin``, if that is named; make a step, save the model as ``folder``, and make one
    more, of which this is the norm."""
    torch.set_num_threads(1)
    model = model_of(base_of(ranks, source), kind)
    if begin:
        model.load(Path(begin), optimizer=True)
    step(model, model.step)
    model.save(Path(folder), optimizer=True, merged=True)
    return step(model, model.step)["norm"]
