"""Linear layers by oneDNN against those of torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stages.engines.torch.linear import linear, product, use_onednn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trained", [("x", "weight"), ("x",), ("weight",)])
def test_outputs_and_gradients_are_those_of_float64(bias: bool, trained: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    x, layer, gradient = torch.randn(2, 37, 24), nn.Linear(24, 56, bias=bias), torch.randn(2, 37, 56)
    layer.weight.requires_grad_("weight" in trained)
    found, expected = [], []
    for wide, into in ((copy.deepcopy(layer), found), (copy.deepcopy(layer).double(), expected)):
        given = x.clone().to(wide.weight.dtype).requires_grad_("x" in trained)
        if into is found:
            use_onednn(wide)
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
    x, weight = torch.randn(61, 80), torch.randn(96, 80)
    assert torch.equal(linear(x, weight, None), linear(x.clone(), weight.clone(), None))
    assert torch.equal(product(x.t(), x), product(x.clone().t(), x.clone()))


def test_other_dtypes_and_empty_inputs_are_left_to_torch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    for one, other in ((x.double(), weight.double()), (x.bfloat16(), weight.bfloat16()), (x[:0], weight)):
        assert torch.equal(linear(one, other, None), nn.functional.linear(one, other))


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    use_onednn(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[1].weight.zero_()
        other[1].bias.zero_()
    assert other(torch.ones(1, 4)).abs().max() == 0 < model(torch.ones(1, 4)).abs().max()
