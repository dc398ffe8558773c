"""Each loss and its gradient against a plain float64 computation of its formula."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

from stages.calls.interface import ALPHA, AdamOptions, Datum, ModelOptions
from stages.calls.losses import BUILT_IN, LossTokens
from stages.calls.model import TorchCalledModel
from tests.stages.calls.data import assert_near, changed, sampled, supervised, tiny_base

LOSSES = {loss.name: loss for loss in BUILT_IN}
Reference = Callable[[torch.Tensor, dict[str, torch.Tensor], dict[str, float]], torch.Tensor]


def cross_entropy(logp: torch.Tensor, x: dict[str, torch.Tensor], _: Any) -> torch.Tensor:
    return -(x["weights"] * logp).sum()


def importance_sampling(logp: torch.Tensor, x: dict[str, torch.Tensor], _: Any) -> torch.Tensor:
    return -((logp - x["logprobs"]).exp() * x["advantages"]).sum()


def clipped(ratio: torch.Tensor, advantages: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    bound = torch.clamp(ratio, low, high)
    return -torch.minimum(ratio * advantages, bound * advantages).sum()


def ppo(logp: torch.Tensor, x: dict[str, torch.Tensor], options: dict[str, float]) -> torch.Tensor:
    low = x.get("clip_low_threshold", options.get("clip_low_threshold", 0.8))
    high = x.get("clip_high_threshold", options.get("clip_high_threshold", 1.2))
    return clipped((logp - x["logprobs"]).exp(), x["advantages"], low, high)


def cispo(logp: torch.Tensor, x: dict[str, torch.Tensor], options: Any) -> torch.Tensor:
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 4.0)
    weight = torch.clamp((logp - x["logprobs"]).exp(), low, high).detach()
    return -(weight * x["advantages"] * logp).sum()


def dro(logp: torch.Tensor, x: dict[str, torch.Tensor], options: Any) -> torch.Tensor:
    quadratic = (logp - x["logprobs"]) ** 2
    return -(logp * x["advantages"] - 0.5 * options.get("beta", 0.05) * quadratic).sum()


def gspo(logp: torch.Tensor, x: dict[str, torch.Tensor], options: Any) -> torch.Tensor:
    log_ratio = (logp.detach() - x["logprobs"])[x["sequence_ratio_mask"] != 0].mean()
    ratio = torch.exp(log_ratio + logp - logp.detach())
    low, high = options.get("clip_low_threshold", 0.8), options.get("clip_high_threshold", 1.2)
    return clipped(ratio, x["advantages"], low, high)


def stable_reinforce(logp: torch.Tensor, x: dict[str, torch.Tensor], options: Any) -> torch.Tensor:
    log_ratio = (logp - x["logprobs"])[(x["advantages"] != 0) | (x["logprobs"] != 0)]
    weight = (logp - x["logprobs"]).exp().clamp(max=1).detach()
    penalty = options.get("kl_coeff", 0.0) * 0.5 * (log_ratio**2).sum()
    return penalty - (weight * x["advantages"] * logp).sum()


CASES: list[tuple[Reference, dict[str, float], list[Datum]]] = [
    (cross_entropy, {}, supervised()),
    (cross_entropy, {}, supervised(k=3)),
    (importance_sampling, {}, sampled()),
    (ppo, {}, sampled()),
    (ppo, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.9}, sampled()),
    (cispo, {}, sampled()),
    (cispo, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, sampled()),
    (dro, {"beta": 0.3}, sampled()),
    (gspo, {}, sampled()),
    (gspo, {"clip_low_threshold": 0.2, "clip_high_threshold": 3.0}, sampled()),
    (stable_reinforce, {"kl_coeff": 0.2}, sampled()),
]
KINDS = {  # rank, an adapter on the head, a head that is the embedding
    "whole": (0, False, True),
    "adapter": (4, False, True),
    "with head": (4, True, True),
    "with untied head": (4, True, False),
}
NAMES = [f"{reference.__name__}-{number}" for number, (reference, _, _) in enumerate(CASES)]


def doubles(datum: Datum) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(values).double()
        for name, values in datum.inputs.items()
        if name != "target_tokens"
    }


def plain_logprobs(model: Any, weights: dict[str, torch.Tensor], datum: Datum) -> torch.Tensor:
    """By the plain forward of transformers, of one datum alone."""
    ids = torch.from_numpy(datum.tokens)[None]
    inputs = {"input_ids": ids, "use_cache": False}
    logits = functional_call(model, weights, (), inputs, tie_weights=False).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, targets if targets.ndim == 2 else targets[:, None])
    return chosen if targets.ndim == 2 else chosen[:, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reference", "options", "data"), CASES, ids=NAMES)
def test_loss_logprobs_and_gradients_are_those_of_a_float64_computation(
    reference: Reference, options: dict[str, float], data: Sequence[Datum], kind: str
) -> None:
    """Adapters after a step, as before it half of their gradients are zero."""
    rank, has_head, tied = KINDS[kind]
    base = tiny_base(token_budget=40, tied=tied)
    model = TorchCalledModel(base, ModelOptions(rank=rank, seed=5, head=has_head))
    model.forward_backward(supervised(seed=9), "cross_entropy", {})
    model.optimizer_step(AdamOptions(learning_rate=1e-2))
    name = reference.__name__

    plain = copy.deepcopy(base.model).double()
    leaves = {n: p.double().requires_grad_() for n, p in model.adapter().items()}
    weights = dict(leaves)
    if rank:
        layers = {n.partition(".lora_")[0] for n in leaves}
        weights = {
            f"{layer}.weight": plain.get_parameter(f"{layer}.weight")
            + ALPHA
            / rank
            * leaves[f"{layer}.lora_B.default.weight"]
            @ leaves[f"{layer}.lora_A.default.weight"]
            for layer in layers
        }
    else:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    expected = [plain_logprobs(plain, weights, datum) for datum in data]
    pairs = zip(expected, data, strict=True)
    loss = sum(reference(logp, doubles(datum), options) for logp, datum in pairs)
    assert isinstance(loss, torch.Tensor)
    loss.backward()

    forward = model.forward(data, name, options)
    output = model.forward_backward(data, name, options)
    scale = sum(float(np.abs(values).sum()) for values in output.logprobs)
    for got in (forward, output):
        assert got.metrics["loss:sum"] == pytest.approx(loss.item(), abs=1e-6 * scale)
        for logprobs, logp in zip(got.logprobs, expected, strict=True):
            assert logprobs.shape == logp.shape
            assert logprobs.dtype == np.float32
            assert np.allclose(logprobs, logp.detach().numpy(), rtol=0, atol=1e-6)
    gradients = {n: p.grad for n, p in model._engine.trained.items()}
    assert any("lm_head" in name for name in gradients) is has_head
    assert_near(
        {n: gradient.double() for n, gradient in gradients.items() if gradient is not None},
        {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None},
    )


def tokens_of(
    name: str, data: Sequence[Datum], logprobs: torch.Tensor, **options: float
) -> LossTokens:
    loss = LOSSES[name]
    columns: dict[str, torch.Tensor] = {}
    for column in (*loss.inputs, *loss.optional):
        default = {**loss.options, **options}.get(column, 1.0)
        columns[column] = torch.cat(
            [doubles(d).get(column, torch.full((len(d.tokens),), default).double()) for d in data]
        )
    number = torch.arange(len(data)).repeat_interleave(torch.tensor([len(d.tokens) for d in data]))
    return LossTokens(logprobs, columns, number, {**loss.options, **options})


@pytest.mark.parametrize(
    "name", ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"]
)
def test_a_ratio_that_overflows_gives_no_nan_where_the_advantage_is_zero(name: str) -> None:
    """Prompts are filled up with a logprob and an advantage of 0; here with what overflows."""
    (datum,) = sampled(prompts=(5,), group=1)
    datum = changed(datum, logprobs=np.where(datum.inputs["advantages"] == 0, -2e4, -3.0))
    logprobs = torch.full((len(datum.tokens),), -2.5, dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(name, [datum], logprobs)
    LOSSES[name].per_token(tokens).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert (logprobs.grad[:4] == 0).all()
    assert all(math.isfinite(float(value)) for value in LOSSES[name].metrics(tokens).values())


def test_a_ratio_that_overflows_is_clipped_where_the_formula_clips_it() -> None:
    (datum,) = sampled(prompts=(2,), group=1)
    size = len(datum.tokens)
    datum = changed(datum, logprobs=np.full(size, -2e4), advantages=np.ones(size))
    logprobs = torch.full((size,), -2.5, dtype=torch.float64, requires_grad=True)
    loss = LOSSES["ppo"].per_token(tokens_of("ppo", [datum], logprobs)).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-1.2 * size)
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()


def test_bounds_of_each_token_take_the_place_of_the_options() -> None:
    data = sampled(group=2)
    rng = np.random.default_rng(1)
    bounded = [
        changed(
            datum,
            clip_low_threshold=rng.uniform(0.3, 0.9, len(datum.tokens)).astype(np.float32),
            clip_high_threshold=rng.uniform(1.0, 2.0, len(datum.tokens)).astype(np.float32),
        )
        for datum in data
    ]
    output = TorchCalledModel(tiny_base(), ModelOptions()).forward(bounded, "ppo", {})
    wanted = sum(
        float(ppo(torch.from_numpy(logprobs).double(), doubles(datum), {}))
        for logprobs, datum in zip(output.logprobs, bounded, strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6)


def test_weights_are_one_where_a_datum_has_none() -> None:
    model = TorchCalledModel(tiny_base(), ModelOptions())
    data = [changed(datum, weights=None) for datum in supervised()]
    output = model.forward(data, "cross_entropy", {})
    assert output.metrics["loss:sum"] == pytest.approx(
        -sum(float(v.sum()) for v in output.logprobs)
    )


def test_metrics_have_one_colon_and_a_way_to_combine_them() -> None:
    model = TorchCalledModel(tiny_base(), ModelOptions())
    for name in LOSSES:
        data = supervised() if name == "cross_entropy" else sampled()
        metrics = model.forward(data, name, {}).metrics
        assert "loss:sum" in metrics
        assert all(key.split(":")[1] in ("sum", "mean", "min", "max") for key in metrics)
