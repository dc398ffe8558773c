"""A called model: what its calls change, what they refuse, and that models of one base do not touch
each other."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stages.calls.base import TorchBase
from stages.calls.interface import AdamOptions, CalledModel, CallRefused, Datum, ModelOptions
from stages.calls.model import TorchCalledModel
from stages.calls.packing import plan, shared_beginnings
from tests.stages.calls.data import assert_near, changed, sampled, supervised, tiny_base

STEP = AdamOptions(learning_rate=1e-2)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def model_of(
    base: TorchBase | None = None, rank: int = 4, seed: int = 1, *, head: bool = False
) -> TorchCalledModel:
    """A model whose adapters are not zero."""
    options = ModelOptions(rank=rank, seed=seed, head=head)
    model = TorchCalledModel(base or tiny_base(), options)
    model.forward_backward(supervised(seed=8), "cross_entropy", {})
    model.optimizer_step(STEP)
    return model


def gradients(model: TorchCalledModel) -> dict[str, torch.Tensor]:
    named = model._engine.trained.items()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def test_it_is_a_called_model() -> None:
    model: CalledModel = model_of()
    assert model.step == 1


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(("rank", "head"), [(0, False), (4, False), (4, True)])
def test_pieces_of_a_pass_add_up_to_one_call(size: int, rank: int, head: bool) -> None:
    data = sampled(group=5)
    whole = model_of(rank=rank, head=head)
    output = whole.forward_backward(data, "ppo", {})
    pieces = model_of(rank=rank, head=head)
    parts = [
        pieces.forward_backward(data[at : at + size], "ppo", {}) for at in range(0, len(data), size)
    ]
    assert_near(gradients(pieces), gradients(whole))
    losses = [part.metrics["loss:sum"] for part in parts]
    assert sum(losses) == pytest.approx(output.metrics["loss:sum"], rel=1e-6)
    logprobs = [row for part in parts for row in part.logprobs]
    for got, wanted in zip(logprobs, output.logprobs, strict=True):
        assert np.allclose(got, wanted, atol=1e-6)


def test_so_do_the_pieces_of_a_client_that_sends_1024_data_at_once() -> None:
    data = supervised(lengths=[2] * 1100)
    whole, pieces = model_of(), model_of()
    output = whole.forward_backward(data, "cross_entropy", {})
    parts = [
        pieces.forward_backward(part, "cross_entropy", {}) for part in (data[:1024], data[1024:])
    ]
    assert_near(gradients(pieces), gradients(whole))
    total = sum(part.metrics["loss:sum"] for part in parts)
    assert total == pytest.approx(output.metrics["loss:sum"], rel=1e-6)


@pytest.mark.parametrize("budget", [1, 24, None])
def test_micro_batches_of_any_size_give_the_same(budget: int | None) -> None:
    """In the order of the data, whatever is computed together."""
    data = [*sampled(seed=2), *sampled(seed=3, prompts=(1, 12))]
    alone = model_of()
    wanted = [alone.forward_backward([datum], "cispo", {}).logprobs[0] for datum in data]
    together = model_of(tiny_base(token_budget=budget))
    output = together.forward_backward(data, "cispo", {})
    assert_near(gradients(together), gradients(alone))
    for got, logprobs in zip(output.logprobs, wanted, strict=True):
        assert np.allclose(got, logprobs, atol=1e-6)
    largest = max(len(datum.tokens) for datum in data)
    [planned], _ = plan([datum.tokens for datum in data], budget)
    for micro_batch in planned:
        tokens = [data[number].tokens for number in micro_batch.data]
        assert plan(tokens, None)[1] <= max(budget or 10**6, largest)


def test_what_data_begin_with_is_fed_once() -> None:
    data = sampled(prompts=(50, 30), group=6)
    metrics = model_of().forward(data, "ppo", {}).metrics
    responses = sum(int((datum.inputs["sequence_ratio_mask"] != 0).sum()) - 1 for datum in data)
    assert metrics["fed_tokens:sum"] == 50 + 30 + responses
    turns = [np.arange(1, length) for length in (5, 9, 20)]
    [beginning] = shared_beginnings(turns)
    assert beginning.length == 4
    assert sorted(beginning.data) == [0, 1, 2]


def test_a_custom_loss_by_its_gradients_is_the_loss_itself() -> None:
    """A client computes a loss C of the logprobs, and sends weights −dC/dlogprobs."""
    data = [changed(datum, weights=None) for datum in supervised(seed=4)]
    zeros = [changed(d, weights=np.zeros(len(d.tokens), np.float32)) for d in data]
    model = model_of()
    output = model.forward(zeros, "cross_entropy", {})
    assert output.metrics["loss:sum"] == 0
    leaves = [torch.from_numpy(row).requires_grad_() for row in output.logprobs]
    custom: Any = sum((row.square() * row.sigmoid()).sum() for row in leaves)
    custom.backward()
    weighted = [
        changed(datum, weights=-row.grad.numpy())
        for datum, row in zip(data, leaves, strict=True)
        if row.grad is not None
    ]
    model.forward_backward(weighted, "cross_entropy", {})
    direct = model_of()
    running = direct._pass(weighted, "cross_entropy", {})
    packed = [packing() for packing in running._packings]
    logprobs, _, _ = direct._engine.packed_model.outputs(packed[0])
    (logprobs.square() * logprobs.sigmoid()).sum().backward()
    assert_near(gradients(model), gradients(direct))


@pytest.mark.parametrize("rank", [0, 4])
def test_a_step_is_that_of_torch(rank: int) -> None:
    model = TorchCalledModel(tiny_base(), ModelOptions(rank=rank))
    plain = copy.deepcopy(model._engine.trained)
    decayed = [p for p in plain.values() if p.ndim > 1]
    others = [p for p in plain.values() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], fused=True)
    for number in range(3):
        options = AdamOptions(1e-2 / (1 + number), 0.8, 0.97, 1e-8, 0.1, 0.5 * number)
        model.forward_backward(sampled(seed=number), "importance_sampling", {})
        model.forward_backward(supervised(seed=number), "cross_entropy", {})
        for name, gradient in gradients(model).items():
            plain[name].grad = gradient
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.values() if p.grad is not None])
        if options.grad_clip_norm:
            torch.nn.utils.clip_grads_with_norm_([*plain.values()], options.grad_clip_norm, norm)
        for group, decay in zip(optimizer.param_groups, (options.weight_decay, 0.0), strict=True):
            group.update(lr=options.learning_rate, betas=(0.8, 0.97), eps=1e-8, weight_decay=decay)
        optimizer.step()
        metrics = model.optimizer_step(options)
        assert metrics["grad_norm"] == pytest.approx(float(norm))
        assert_same({**model._engine.trained}, {**plain})
    assert model.step == 3


def drive(model: TorchCalledModel, seed: int) -> Any:
    """A client's calls; yields after each."""
    for number in range(3):
        yield model.forward_backward(sampled(seed=seed + number), "ppo", {}).metrics
        yield model.forward(supervised(seed=seed), "cross_entropy", {}).logprobs[0].tolist()
        yield model.forward_backward(supervised(seed=seed), "cross_entropy", {}).metrics
        yield model.optimizer_step(STEP)


def compare_interleaved(base: TorchBase, other: TorchBase, ranks: Sequence[int]) -> None:
    options = [
        ModelOptions(rank=rank, seed=number, head=number == 1) for number, rank in enumerate(ranks)
    ]
    alone = []
    for number, each in enumerate(options):
        model = TorchCalledModel(base, each)
        alone.append(([*drive(model, 10 * number)], model.adapter()))
    models = [TorchCalledModel(other, each) for each in options]
    clients = [drive(model, 10 * number) for number, model in enumerate(models)]
    together = list(zip(*clients, strict=True))
    for number, (outputs, weights) in enumerate(alone):
        assert [outputs_of_call[number] for outputs_of_call in together] == outputs
        assert_same(models[number].adapter(), weights)


def test_clients_that_take_turns_get_the_bits_that_each_gets_alone() -> None:
    compare_interleaved(tiny_base(), tiny_base(), (4, 8, 0))


def test_clients_on_smollm2_get_the_bits_that_each_gets_alone() -> None:
    base = TorchBase.load("smollm2", device="cpu", threads=1, token_budget=64)
    compare_interleaved(base, base, (4, 8))


def test_models_of_one_base_share_its_memory() -> None:
    base = tiny_base()
    before = [parameter.clone() for parameter in base.model.parameters()]
    models = [model_of(base, seed=seed) for seed in range(8)]
    storages = {p.untyped_storage().data_ptr() for p in base.model.parameters()}
    for model in models:
        frozen = [p for p in model._engine.model.parameters() if not p.requires_grad]
        assert {p.untyped_storage().data_ptr() for p in frozen} == storages
        trained = {p.untyped_storage().data_ptr() for p in model._engine.trained.values()}
        assert not trained & storages
    assert all(map(torch.equal, base.model.parameters(), before))
    models[0].close()
    models[0].close()
    gc.collect()
    assert models[1].forward(supervised(), "cross_entropy", {}).metrics["tokens:sum"] == 31


def test_a_bfloat16_base_has_float32_adapters_and_moments() -> None:
    base = tiny_base(dtype=torch.bfloat16)
    for rank in (0, 4):
        model = model_of(base, rank=rank)
        assert {p.dtype for p in model._engine.trained.values()} == {torch.float32}
        moments = model._engine.state_dict()["exp_avg"].values()
        assert {moment.dtype for moment in moments} == {torch.float32}
        assert {value.dtype for value in model.adapter().values()} == {torch.bfloat16}
        whole = model_of(rank=rank).forward(sampled(), "ppo", {})
        half = model.forward(sampled(), "ppo", {})
        for got, wanted in zip(half.logprobs, whole.logprobs, strict=True):
            assert np.abs(got - wanted).max() < 0.3


def test_adapters_are_where_the_options_say() -> None:
    base = tiny_base()
    for attention, mlp in ((True, False), (False, True)):
        model = TorchCalledModel(base, ModelOptions(rank=2, attention=attention, mlp=mlp))
        names = model.adapter()
        assert names
        assert all(("self_attn" in name) is attention for name in names)
    names = TorchCalledModel(base, ModelOptions(attention=False, mlp=False, head=True)).adapter()
    assert {name.partition(".lora_")[0] for name in names} == {"lm_head"}
    assert TorchCalledModel(base, ModelOptions(head=True)).adapter().keys() > names.keys()
    with pytest.raises(CallRefused, match="leaves no layer of LlamaForCausalLM to train"):
        TorchCalledModel(base, ModelOptions(attention=False, mlp=False))
    with pytest.raises(CallRefused, match="rank = -1: is below 0"):
        TorchCalledModel(base, ModelOptions(rank=-1))
    a, b = (TorchCalledModel(base, ModelOptions(seed=seed)).adapter() for seed in (1, 2**40 + 2))
    assert not torch.equal(next(iter(a.values())), next(iter(b.values())))


def test_a_pass_that_is_not_finite_leaves_the_gradients_as_they_were() -> None:
    model = model_of()
    model.forward_backward(supervised(), "cross_entropy", {})
    before = gradients(model)
    (datum,) = sampled(prompts=(2,), group=1)
    far = changed(datum, logprobs=np.full(len(datum.tokens), -500, np.float32))
    with pytest.raises(FloatingPointError, match=r"data\.1: its importance_sampling loss is"):
        model.forward_backward([datum, far], "importance_sampling", {})
    assert_same(gradients(model), before)
    same = {"target_tokens": np.ones(400, int), "weights": np.full(400, 5e37, np.float32)}
    with pytest.raises(FloatingPointError, match="a gradient is not finite"):
        model.forward_backward([Datum(np.ones(400, int), same)], "cross_entropy", {})
    assert_same(gradients(model), before)
    model.optimizer_step(STEP)
    assert model.step == 2


def test_a_step_on_gradients_that_are_not_finite_changes_nothing_and_forgets_them() -> None:
    model = model_of()
    weights = model.adapter()
    model.forward_backward(supervised(), "cross_entropy", {})
    for parameter in model._engine.trained.values():
        assert parameter.grad is not None
        parameter.grad *= 1e38  # as sums of finite gradients may overflow
        parameter.grad *= 1e38
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        model.optimizer_step(STEP)
    assert_same(model.adapter(), weights)
    assert model.step == 1
    with pytest.raises(CallRefused, match="no gradients"):
        model.optimizer_step(STEP)


def one(**inputs: Any) -> list[Datum]:
    """Two data, the second with other ``inputs``."""
    first, second = supervised(lengths=(4, 3))
    return [first, changed(second, **inputs)]


def tokens(*values: Any) -> list[Datum]:
    first, second = supervised(lengths=(4, 3))
    return [first, Datum(np.array(values), second.inputs)]


OF_PPO = sampled(prompts=(3,), group=2)

REFUSED: list[tuple[str, list[Datum], dict[str, Any], str]] = [
    ("dpo", one(), {}, r'loss_fn = "dpo": is no loss of this server; use one of \[.cross_entropy'),
    ("cross_entropy", one(), {"beta": 1.0}, "config.beta = 1.0: is no option of cross_entropy"),
    ("ppo", OF_PPO, {"clip_low_threshold": "a"}, 'threshold = "a": is no number of at least 0'),
    ("ppo", OF_PPO, {"clip_high_threshold": float("nan")}, "threshold = NaN: is no number"),
    ("ppo", OF_PPO, {"clip_high_threshold": 0.1}, "threshold = 0.8: is above clip_high_threshold"),
    ("cross_entropy", [], {}, "data: is empty; send at least one datum"),
    ("ppo", one(), {}, r"data\.0\.loss_fn_inputs\.logprobs: is missing, which ppo reads"),
    (
        "cross_entropy",
        one(target_tokens=None),
        {},
        r"data\.1\.loss_fn_inputs\.target_tokens: is mi",
    ),
    (
        "cross_entropy",
        one(target_tokens=np.arange(4)),
        {},
        r"shape \[4\], for 3 tokens of model_in",
    ),
    (
        "cross_entropy",
        one(target_tokens=np.ones(3)),
        {},
        '"float64": is no dtype of tokens; send in',
    ),
    ("cross_entropy", one(target_tokens=np.array([1, -1, 2])), {}, "= -1: at place 1 is no token"),
    (
        "cross_entropy",
        one(weights=np.ones((3, 2))),
        {},
        r"weights: has the shape \[3, 2\], and targ",
    ),
    ("cross_entropy", one(weights=np.array(["a"] * 3)), {}, '"<U1": is no dtype of numbers'),
    (
        "cross_entropy",
        one(weights=np.array([1, np.inf, 0])),
        {},
        '"inf": at place 1 is no finite float',
    ),
    ("cross_entropy", tokens(1, 2, 999), {}, r"data\.1\.model_input = 999: at place 2 is no token"),
    ("cross_entropy", tokens(), {}, r"data\.1\.model_input"),
    ("cross_entropy", tokens([1, 2]), {}, r"model_input: has the shape \[1, 2\]; send 1 to 512"),
    ("cross_entropy", tokens(*[1] * 513), {}, r"model_input: has the shape \[513\]; send 1 to 512"),
    ("ppo", [changed(OF_PPO[0], target_tokens=np.ones((2, 3), int))], {}, "send "),
]


@pytest.mark.parametrize(("loss", "data", "options", "message"), REFUSED)
def test_what_is_wrong_is_named_before_any_gradient(
    loss: str, data: list[Datum], options: dict[str, Any], message: str
) -> None:
    model = model_of()
    for call in (model.forward_backward, model.forward):
        with pytest.raises(CallRefused, match=message):
            call(data, loss, options)
    assert gradients(model) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": float("nan")}, "adam_params.learning_rate = NaN: is out of range"),
        ({"learning_rate": 2.0}, "learning_rate = 2.0: is out of range; use 0 to 1"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"eps": 0.0}, "eps = 0.0: is out of range; use 1e-30 to 1"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm"),
    ],
)
def test_a_step_that_is_not_defined_is_refused(options: dict[str, float], message: str) -> None:
    model = model_of()
    with pytest.raises(CallRefused, match=r"optim_step: has no gradients to step with; call forw"):
        model.optimizer_step(STEP)
    model.forward_backward(supervised(), "cross_entropy", {})
    with pytest.raises(CallRefused, match=message):
        model.optimizer_step(AdamOptions(**options))
    assert gradients(model)
    model.optimizer_step(STEP)
