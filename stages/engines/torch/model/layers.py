"""Layers of a model that is trained, computed faster than its modules do it. In float32 on a CPU:

Linear layers: torch multiplies matrices by MKL, which uses 256-bit instructions on processors of
other makers than Intel; oneDNN asks the processor what it has. RMS norms: fewer passes over memory.
Embeddings that are the output layer too: the gradient of the words that were fed, added to that of
the output layer. Layers with an adapter: both in one function, which has gradients of the adapter
alone. In other dtypes, and for DTensors (matrices of tensor-parallel ranks), modules compute as
before. On accelerators: RMS norms and SwiGLU by the fused functions that are installed
(:func:`stages.device.fused_layers`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.func import functional_call

from stages.adapters.options import is_adapted


@torch.no_grad()
def use_fast_layers(model: Any, device: torch.device) -> None:
    """Compute the linear layers of ``model`` by :func:`linear`. ``device``: where it is trained."""
    words = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if (
        device.type == "cpu"
        and isinstance(words, nn.Embedding)
        and words.weight is getattr(head, "weight", None)
    ):
        words.sparse = True
        # a subclass computes more than the lookup: Gemma's scales its output
        if type(words) is nn.Embedding and words.weight.requires_grad:
            words.forward = TiedWords(words)  # type: ignore[method-assign]
    for module in model.modules():
        if "forward" in vars(module):  # replaced before
            continue
        if is_adapted(module):
            module.forward = partial(_adapted_of, module, module.forward)  # type: ignore[method-assign]
        elif type(module) is nn.Linear:
            module.forward = partial(_linear_of, module)  # type: ignore[method-assign]


def use_plain_words(model: Any) -> None:
    """Compute the embeddings of ``model`` as their module does: no output layer of the same weight
    is in its graph."""
    words = model.get_input_embeddings()
    words.sparse = False
    vars(words).pop("forward", None)


@torch.no_grad()
def use_fast_norms(model: Any) -> None:
    """Compute by :func:`rms_norm` the modules of ``model`` that return the same.

    Weights may be on the device meta; they are no DTensors yet: ranks cut the model afterwards, and
    gather a norm's weight before its forward.
    """
    for module in model.modules():
        if (
            torch.backends.mkldnn.is_available()
            and _is_rms_norm(module)
            and module.weight.dtype == torch.float32
        ):
            module.forward = partial(_norm_of, module, module.forward)


@torch.no_grad()
def use_fused_layers(model: Any, fused: Mapping[str, Callable[..., torch.Tensor]]) -> None:
    """Compute by the functions ``fused`` (:func:`stages.device.fused_layers`) the modules of
    ``model`` that return the same, up to rounding."""
    for module in model.modules():
        if "rms_norm" in fused and _is_rms_norm(module):
            module.forward = partial(_fused_norm, module, fused["rms_norm"])
        elif "swiglu" in fused and _is_swiglu(module):
            module.forward = partial(_fused_mlp, module, fused["swiglu"])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute torch's ``linear``, up to the order of sums."""
    if not _in_float32_on_cpu(x, weight):
        return nn.functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a`` [n, k] @ ``b`` [k, m], without a gradient.

    ``b`` may be a transposed view; such an ``a`` is copied.
    """
    if not _in_float32_on_cpu(a, b):
        return a @ b
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")  # type: ignore[no-any-return]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x`` [..., n] divided by the root of its mean square plus ``epsilon``, times
    ``weight`` [n]."""
    return _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return, no-untyped-call]


def _linear_of(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return linear(input, module.weight, module.bias)


def _adapted_of(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    base = module.base_layer
    down = module.lora_A["default"].weight
    up = module.lora_B["default"].weight
    if module.disable_adapters or not (
        _in_float32_on_cpu(x, base.weight) and _in_float32_on_cpu(x, down)
    ):
        return plain(x)  # type: ignore[no-any-return]
    scale = module.scaling["default"]
    return _Adapted.apply(x, base.weight, base.bias, down, up, scale)  # type: ignore[no-any-return, no-untyped-call]


def _norm_of(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    known = _in_float32_on_cpu(x, module.weight)
    return rms_norm(x, module.weight, module.variance_epsilon) if known else plain(x)


def _fused_norm(module: Any, fused: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    return fused(x, module.weight, module.variance_epsilon) if x.numel() else x * module.weight


def _fused_mlp(module: Any, fused: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return module.down_proj(fused(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-any-return]


def _is_swiglu(module: Any) -> bool:
    """Return whether ``module`` is a gated MLP of three linear layers with SiLU, as its code
    multiplies them."""
    children = dict(module.named_children())
    activation = children.pop("act_fn", None)
    if children.keys() != {"gate_proj", "up_proj", "down_proj"} or activation is None:
        return False
    kind: Any = type(module)
    small = kind.__new__(kind)
    nn.Module.__init__(small)
    for name in children:
        small.add_module(name, nn.Linear(2, 2, bias=False, device="cpu"))
        nn.init.uniform_(small.get_submodule(name).weight, 0.5, 1.5)  # type: ignore[arg-type]
    small.act_fn = activation
    probe = torch.tensor([[-1.0, 2.0]])
    try:
        plain = small(probe)
    except AttributeError:  # it needs more than these
        return False
    return torch.allclose(
        plain, _fused_mlp(small, lambda gate, up: nn.functional.silu(gate) * up, probe)
    )


def _is_rms_norm(module: Any) -> bool:
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.weight.ndim != 1 or not hasattr(module, "variance_epsilon"):
        return False
    probe = torch.linspace(-2, 3, 3 * len(module.weight)).sin().view(3, -1)
    weight = torch.linspace(0.5, 2, len(module.weight))
    plain = functional_call(module, {"weight": weight}, (probe,))
    return torch.allclose(
        plain, rms_norm(probe, weight, module.variance_epsilon), rtol=1e-5, atol=1e-6
    )


def _in_float32_on_cpu(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether both are plain float32 tensors on a CPU that oneDNN computes on.

    ``x`` may still be on its way from other ranks: its first use waits for it.
    """
    plain = type(x) in (torch.Tensor, AsyncCollectiveTensor) and type(weight) in (
        torch.Tensor,
        nn.Parameter,
    )
    wide = x.dtype == weight.dtype == torch.float32
    return (
        plain
        and wide
        and x.device.type == "cpu"
        and x.numel() > 0
        and torch.backends.mkldnn.is_available()
    )


class TiedWords:
    """Replaces the forward of the embeddings ``words``, which share their weight with the output
    layer.

    The gradient of the embeddings has a row for each token that was fed. Autograd adds it to the
    gradient of the output layer by copying all of that. Here a hook adds it in place, when the
    gradient of the output layer is in ``weight.grad``. If another weight has replaced this one, as
    in a copy of the model, the module computes its own forward. Raises RuntimeError if the hook was
    not called in the backward before.
    """

    def __init__(self, words: nn.Embedding) -> None:
        self._words = words
        self._weight = weakref.ref(words.weight)
        self._fed: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids [n], gradient [n, d]
        # registered first: the hook of master weights moves the gradient to the master
        words.weight.register_post_accumulate_grad_hook(self._add_fed)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if self._fed:
            raise RuntimeError(
                "the gradient of the embeddings was not added in the backward before: the output "
                "layer, which has the same weight, gave none"
            )
        weight = self._words.weight
        if weight is not self._weight():
            return type(self._words).forward(self._words, input)
        return _TiedWords.apply(weight, input, self)  # type: ignore[no-any-return, no-untyped-call]

    def feed(self, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep the ``gradient`` [..., d] of the tokens ``ids`` [...] until the hook adds it."""
        if (padding := self._words.padding_idx) is not None:
            gradient = gradient * (ids != padding)[..., None]
        self._fed.append((ids.flatten(), gradient.flatten(0, -2)))

    def _add_fed(self, weight: torch.Tensor) -> None:
        if weight.grad is None and self._fed:  # the output layer is not in the graph
            weight.grad = torch.zeros_like(weight)
        for ids, gradient in self._fed:
            weight.grad.index_add_(0, ids, gradient.to(weight.dtype))  # type: ignore[union-attr]
        self._fed.clear()


class _TiedWords(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, ids: torch.Tensor, words: TiedWords
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.words = words
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.words.feed(ids, gradient)
        return None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        gradient = gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            to_x = product(gradient, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = product(gradient.t(), x.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum(0)
        return to_x, to_weight, to_bias


class _Adapted(torch.autograd.Function):
    """x·Wᵀ + bias + scale · (x·Aᵀ)·Bᵀ of an adapted layer, whose W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        inner = torch.ops.mkldnn._linear_pointwise(x, down, None, "none", [], "")
        ctx.save_for_backward(x, weight, down, up, inner)
        ctx.scale = scale
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(inner, out, up * scale, None, "add")  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, down, up, inner = ctx.saved_tensors
        gradient = gradient.flatten(0, -2)
        rows = x.flatten(0, -2)
        to_inner = product(gradient, up).mul_(ctx.scale)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = product(gradient, weight).add_(product(to_inner, down)).view(x.shape)
        to_up = product(gradient.t(), inner.flatten(0, -2)).mul_(ctx.scale)
        return to_x, None, None, product(to_inner.t(), rows), to_up, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        unit = (x * scale).reshape(-1, x.shape[-1])
        gradient = gradient.reshape(unit.shape)
        products = gradient * unit
        mean = (products @ weight).div_(x.shape[-1])[:, None]
        to_x = (gradient * weight).addcmul_(unit, mean, value=-1).mul_(scale.reshape(-1, 1))
        return to_x.view(x.shape), products.sum(0), None
