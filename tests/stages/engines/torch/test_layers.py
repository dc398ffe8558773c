"""The layers of training against those of torch and transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from stages import device as devices
from stages.engines.torch.model.layers import (
    linear,
    product,
    rms_norm,
    use_fast_layers,
    use_fast_norms,
    use_fused_layers,
    use_plain_words,
)
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch
from tests.stages.sharded import OPTIONS, algorithm, gradients_of_step, model_of

CPU = torch.device("cpu")


class Decoder(nn.Module):
    """``body`` between embeddings and an output layer with the same weight."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.body = body
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.words.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(ids)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trained", [("x", "weight"), ("x",), ("weight",)])
def test_linear_layers_and_their_gradients_are_those_of_float64(
    bias: bool, trained: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 37, 24)
    layer = nn.Linear(24, 56, bias=bias)
    gradient = torch.randn(2, 37, 56)
    layer.weight.requires_grad_("weight" in trained)
    found = []
    expected = []
    for wide, into in ((copy.deepcopy(layer), found), (copy.deepcopy(layer).double(), expected)):
        given = x.clone().to(wide.weight.dtype).requires_grad_("x" in trained)
        if into is found:
            use_fast_layers(Decoder(wide), CPU)
        out = wide(given)
        out.backward(gradient.to(out.dtype))
        into += [out, given.grad, *(p.grad for p in wide.parameters())]
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.is_contiguous()
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_the_same_input_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    x = torch.randn(61, 80)
    weight = torch.randn(96, 80)
    assert torch.equal(linear(x, weight, None), linear(x.clone(), weight.clone(), None))
    assert torch.equal(product(x.t(), x), product(x.clone().t(), x.clone()))
    assert torch.equal(rms_norm(x, weight[0], 1e-5), rms_norm(x.clone(), weight[0].clone(), 1e-5))


def test_other_dtypes_and_empty_inputs_are_left_to_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    weight = torch.randn(3, 8)
    for one, other in (
        (x.double(), weight.double()),
        (x.bfloat16(), weight.bfloat16()),
        (x[:0], weight),
    ):
        assert torch.equal(linear(one, other, None), nn.functional.linear(one, other))


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    use_fast_layers(Decoder(model), CPU)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[1].weight.zero_()
        other[1].bias.zero_()
    assert other(torch.ones(1, 4)).abs().max() == 0 < model(torch.ones(1, 4)).abs().max()


def test_rms_norms_and_their_gradients_are_those_of_float64() -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(2, 7, 5, 24)
    gradient = torch.randn(2, 7, 5, 24)
    weight = torch.randn(24).requires_grad_()
    wide = x.double().requires_grad_()
    x.requires_grad_()
    rms_norm(x, weight, 1e-3).backward(gradient)
    exact = weight.detach().double().requires_grad_()
    nn.functional.rms_norm(wide, (24,), exact, 1e-3).backward(gradient.double())
    for found, expected in ((x.grad, wide.grad), (weight.grad, exact.grad)):
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_modules_are_replaced_where_they_compute_the_same() -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(12, eps=1e-2)
    other = GemmaRMSNorm(12)
    for module in (norm, other):
        nn.init.uniform_(module.weight, 0.5, 2.0)
    model = nn.ModuleList([norm, other])
    plain = copy.deepcopy(model)
    use_fast_norms(model)
    assert ("forward" in vars(norm), "forward" in vars(other)) == (True, False)
    x = torch.randn(3, 12)
    for one, two in zip(model, plain, strict=True):
        torch.testing.assert_close(one(x), two(x))
    half = x.bfloat16()
    assert torch.equal(norm(half), plain[0](half)), "another dtype is left to the module"


def test_fused_functions_replace_norms_and_mlps_that_compute_the_same() -> None:
    torch.manual_seed(0)
    used: list[str] = []

    def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        used.append("rms_norm")
        return nn.functional.rms_norm(x, weight.shape, weight, epsilon)

    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        used.append("swiglu")
        return nn.functional.silu(gate) * up

    sizes: dict[str, Any] = dict(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=12,
    )
    for config, expected in (
        (LlamaConfig(**sizes), ["rms_norm", "rms_norm", "swiglu", "rms_norm"]),
        (GemmaConfig(**sizes, num_key_value_heads=2), []),
    ):
        plain = AutoModelForCausalLM.from_config(config).bfloat16()
        fused = copy.deepcopy(plain)
        used.clear()
        use_fused_layers(fused, {"rms_norm": norm, "swiglu": swiglu})
        ids = torch.arange(20)[None]
        one, two = (model(input_ids=ids).logits.float() for model in (plain, fused))
        assert used == expected
        torch.testing.assert_close(two, one, rtol=0.05, atol=0.02)
        for model, out in ((plain, one), (fused, two)):
            out.square().mean().backward()
            assert all(p.grad is not None for p in model.parameters())
        for (name, a), b in zip(plain.named_parameters(), fused.parameters(), strict=True):
            gap = (a.grad.float() - b.grad.float()).norm() / a.grad.float().norm()
            assert gap < 0.05, f"{name}: {gap}"


def test_plain_kernels_compute_the_same_without_faster_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients = []
    for kernels in ("auto", "plain"):
        if kernels == "plain":
            for name in ("linear", "rms_norm"):
                monkeypatch.setattr(f"stages.engines.torch.model.layers.{name}", None)
            for name in ("_cpu", "_cpu_backward"):
                monkeypatch.setattr(f"stages.engines.torch.model.attention.{name}", None)
        engine = TorchTrainEngine(model_of("llama"), kernels=kernels, **OPTIONS)
        gradients.append(gradients_of_step(engine, make_batch(), algorithm())[0])
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() / gradient.norm() < 1e-5, name


def test_a_cpu_has_no_fused_layers_of_a_device() -> None:
    assert devices.fused_layers(torch.device("cpu")) == {}


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_embeddings_are_dense_and_those_of_float64(tied: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(nn.Linear(4, 4))
    ids = torch.tensor([[3, 3, 7, 0, 3, 7]])
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(11, 4))
    exact = copy.deepcopy(model).double()
    use_fast_layers(model, CPU)
    for _ in range(2):  # two micro-batches
        model(ids).square().sum().backward()
        exact(ids).square().sum().backward()
    for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
        assert found.grad is not None
        assert not found.grad.is_sparse
        torch.testing.assert_close(found.grad, expected.grad.float(), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_padding_stays_zero() -> None:
    torch.manual_seed(0)
    model = Decoder(nn.Linear(4, 4))
    model.words.padding_idx = 7
    exact = copy.deepcopy(model).double()
    use_fast_layers(model, CPU)
    ids = torch.tensor([[3, 7, 7, 0]])
    model(ids).square().sum().backward()
    exact(ids).square().sum().backward()
    for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad.float(), rtol=1e-5, atol=1e-5)


def test_embeddings_without_their_output_layer_have_the_gradient_of_their_module() -> None:
    model = Decoder(nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    use_fast_layers(model, CPU)
    ids = torch.tensor([[3, 7, 3]])
    for each in (model, plain):
        for _ in range(2):
            each.words(ids).square().sum().backward()
    assert model.words.weight.grad is not None
    torch.testing.assert_close(model.words.weight.grad, plain.words.weight.grad)
    use_plain_words(model)
    assert model.words(ids).grad_fn.name() == plain.words(ids).grad_fn.name()  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_of_a_model_has_gradients_of_its_own(tied: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(nn.Linear(4, 4))
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(11, 4))
    use_fast_layers(model, CPU)
    ids = torch.tensor([[3, 7, 3]])
    model(ids).square().sum().backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    other(ids).square().sum().backward()
    for found, expected in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
