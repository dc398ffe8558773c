"""The fused operators of torch_npu that this project calls: their schemas in the real library, and
their maths by torch."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch

SCHEMAS = """
npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)
npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)
npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)
npu_swiglu(Tensor input, int dim=-1) -> Tensor
npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor
""".strip().splitlines()  # noqa: E501

calls: Counter[str] = Counter()  # of each operator
library = torch.library.Library("npu", "DEF")
for schema in SCHEMAS:
    library.define(schema)


def counted(function: Any) -> Any:
    """Register ``function`` for the device as the operator of its name, which is returned.

    It takes arguments by their names in the schema; those that it does not take must be as the
    schema has them by default.
    """
    schema = getattr(torch.ops.npu, function.__name__).default._schema
    taken = inspect.signature(function).parameters

    def run(*arguments: Any, **options: Any) -> Any:
        calls[function.__name__] += 1
        given = (
            dict(zip((argument.name for argument in schema.arguments), arguments, strict=False))
            | options
        )
        for argument in schema.arguments:
            if argument.name in given and argument.name not in taken:
                assert given[argument.name] == argument.default_value, (
                    f"{argument.name} is not emulated"
                )
        return function(**{name: value for name, value in given.items() if name in taken})

    library.impl(function.__name__, run, "PrivateUse1")
    return getattr(torch.ops.npu, function.__name__)


def scores(
    q: torch.Tensor,
    k: torch.Tensor,
    heads: int,
    layout: str,
    scale: float,
    mask: torch.Tensor | None,
    mode: int,
) -> torch.Tensor:
    """Scores float32 [B, H, n, m] of contiguous q [B, H, n, D] and k [B, KV heads, m, D].

    ``mask``: True where a query does not see; [n, m] in mode 0, and in mode 2 the compressed one of
    causal attention.
    """
    assert (layout, heads) == ("BNSD", q.shape[1])
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    found = (
        q.float() @ k.float().repeat_interleave(heads // k.shape[1], 1).transpose(-1, -2) * scale
    )
    if mask is None:
        assert mode == 0
        return found
    assert mask.dtype in (torch.bool, torch.uint8)
    assert mask.device == q.device
    if mode == 2:
        assert torch.equal(mask.cpu(), torch.ones(2048, 2048, dtype=torch.bool).triu_(1))
        mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    assert mode in (0, 2)
    assert mask.shape[-2:] == found.shape[-2:]
    return found.masked_fill(mask.bool(), -torch.inf)


@counted
def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    sparse_mode: int = 0,
) -> tuple[Any, ...]:
    assert value.is_contiguous()
    of_scores = scores(query, key, head_num, input_layout, scale, atten_mask, sparse_mode)
    peak = of_scores.amax(-1, keepdim=True)
    weights = (of_scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights / total @ value.float().repeat_interleave(head_num // value.shape[1], 1)
    eight = (*peak.shape[:-1], 8)  # the same number eight times
    nothing = torch.empty(0, device=query.device)
    return (
        out.to(query.dtype),
        peak.expand(eight).contiguous(),
        total.expand(eight).contiguous(),
        nothing,
        0,
        0,
        0,
    )


@counted
def npu_fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    attention_in: torch.Tensor,
    atten_mask: torch.Tensor | None = None,
    scale_value: float = 1.0,
    sparse_mode: int = 0,
) -> tuple[torch.Tensor, ...]:
    assert softmax_max.dtype == softmax_sum.dtype == torch.float32
    assert softmax_max.shape == softmax_sum.shape == (*query.shape[:3], 8)
    assert all(x.is_contiguous() for x in (value, dy, softmax_max, softmax_sum, attention_in))
    groups = head_num // key.shape[1]
    of_scores = scores(query, key, head_num, input_layout, scale_value, atten_mask, sparse_mode)
    weights = (of_scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    gradient = dy.float()
    to_weights = gradient @ value.float().repeat_interleave(groups, 1).transpose(-1, -2)
    to_scores = (
        weights
        * (to_weights - (gradient * attention_in.float()).sum(-1, keepdim=True))
        * scale_value
    )
    to_query = to_scores @ key.float().repeat_interleave(groups, 1)
    to_key = to_scores.transpose(-1, -2) @ query.float()
    to_value = weights.transpose(-1, -2) @ gradient
    to_key, to_value = (x.view(len(x), -1, groups, *x.shape[2:]).sum(2) for x in (to_key, to_value))
    nothing = torch.empty(0, device=query.device)
    return *(x.to(query.dtype) for x in (to_query, to_key, to_value)), nothing, nothing


@counted
def npu_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    assert gamma.shape == input.shape[-1:]
    scale = (input.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (input.float() * scale * gamma.float()).to(input.dtype), scale


@counted
def npu_rms_norm_backward(
    dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    unit = input.float() * rstd
    gradient = dy.float()
    to_unit = gradient * gamma.float()
    to_input = rstd * (to_unit - unit * (to_unit * unit).mean(-1, keepdim=True))
    return to_input.to(input.dtype), (gradient * unit).flatten(0, -2).sum(0)


@counted
def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


@counted
def npu_swiglu_backward(
    grad_output: torch.Tensor, input: torch.Tensor, dim: int = -1
) -> torch.Tensor:
    gate, up = input.chunk(2, dim)
    sigmoid = torch.sigmoid(gate)
    to_gate = grad_output * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
    return torch.cat([to_gate, grad_output * gate * sigmoid], dim)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, scale = npu_rms_norm(x, gamma, epsilon)
        ctx.save_for_backward(x, gamma, scale)
        ctx.mark_non_differentiable(scale)
        return out, scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        x, gamma, scale = ctx.saved_tensors
        to_x, to_gamma = npu_rms_norm_backward(gradient, x, gamma, scale)
        return to_x, to_gamma.to(gamma.dtype), None


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> Any:
        ctx.save_for_backward(x)
        ctx.dim = dim
        with torch._C._AutoDispatchBelowAutograd():
            return npu_swiglu(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return npu_swiglu_backward(gradient, *ctx.saved_tensors, ctx.dim), None


library.impl(
    "npu_rms_norm",
    lambda x, gamma, epsilon=1e-6: Norm.apply(x, gamma, epsilon),
    "AutogradPrivateUse1",
)
library.impl("npu_swiglu", lambda x, dim=-1: Swiglu.apply(x, dim), "AutogradPrivateUse1")


def histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Of integers too, which torch's kernel for the CPU does not take."""
    return torch.histc(input.cpu().float(), bins, min, max).to(input)


torch_operators = torch.library.Library("aten", "IMPL")
torch_operators.impl("histc", histc, "PrivateUse1")
