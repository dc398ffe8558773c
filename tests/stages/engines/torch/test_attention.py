"""Attention of packed micro-batches against a plain softmax over every row alone, in float64."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stages.engines.torch.model import attention
from stages.engines.torch.model.packing import Feeding, PackedBatch, pack, shared_prompt_attention

PROMPTS = [21, 3]
ROWS = [[30, 29, 17, 9, 2, 1], [40]]


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``q`` [H, n, D], ``k`` and ``v`` [KV heads, n, …]."""
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * 0.3
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    scores = scores.masked_fill((distance < 0) | (distance >= (window or 10**9)), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[1]] @ v


def by_rows(
    packed: PackedBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """``plain`` for each row with its prompt. Returns [S, H, E]."""
    out = torch.empty(q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype)
    at = 0
    for prompt, responses in zip(PROMPTS, ROWS, strict=True):
        first = torch.arange(at, at + prompt)
        at = at + prompt
        for response in responses:
            ids = torch.cat([first, torch.arange(at, at := at + response - 1)])
            out[ids] = plain(*(x[0][:, ids] for x in (q, k, v)), **options).transpose(0, 1)
    return out


@pytest.mark.parametrize("chunk", [2**20, 200])
@pytest.mark.parametrize("few_keys", [128, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"window": 8},
        {"window": 25},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 8, "softcap": 2.0, "sinks": True},
        {"values": 8},
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_each_row_alone(
    case: dict[str, Any],
    dtype: torch.dtype,
    few_keys: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "CHUNK", chunk)
    for module in ("attention", "packing"):
        monkeypatch.setattr(f"stages.engines.torch.model.{module}.FEW_KEYS", few_keys)
    torch.manual_seed(0)
    ids = [[torch.zeros(n, dtype=torch.int64) for n in rows] for rows in ROWS]
    packed = pack([torch.zeros(n, dtype=torch.int64) for n in PROMPTS], ids, torch.device("cpu"))
    tokens = packed.ids.shape[1]
    window = case.get("window")
    softcap = case.get("softcap")
    sizes = [(1, tokens, 4, 16), (1, tokens, 2, 16), (1, tokens, 2, case.get("values", 16))]
    given = [torch.randn(size).to(dtype).transpose(1, 2) for size in sizes]
    given += [torch.randn(4).to(dtype)] if case.get("sinks") else []
    inputs = [x.clone().requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    module = nn.Module()
    options = dict(scaling=0.3, sliding_window=window, softcap=softcap)
    module._attention_state = Feeding(10**6, packed=packed)  # type: ignore[assignment]
    found, _ = shared_prompt_attention(
        module, *inputs[:3], None, s_aux=[*inputs, None][3], **options
    )  # type: ignore[arg-type]
    expected = by_rows(packed, *exact[:3], sinks=[*exact, None][3], window=window, softcap=softcap)  # type: ignore[arg-type]
    gradient = torch.randn_like(expected)
    found[0].backward(gradient.to(dtype))
    expected.backward(gradient.to(dtype).double())
    limit = 2e-6 if dtype == torch.float32 else 0.02
    for name, got, want in [
        ("out", found[0], expected),
        *(
            (name, x.grad, y.grad)
            for name, x, y in zip(("q", "k", "v", "sinks"), inputs, exact, strict=False)
        ),
    ]:
        assert got is not None
        assert want is not None
        assert got.dtype == dtype
        assert (
            float((got.double() - want).detach().abs().max() / want.detach().abs().max()) < limit
        ), name


class Documented:
    """torch_npu's fused attention by its documentation, with matmuls: BNSD, masks that are True
    where a query does not see, mode 2 for causal ones, and a softmax given by its maximum and sum.
    """

    def __init__(self) -> None:
        self.calls = list[str]()

    def _weights(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        heads: int,
        layout: str,
        scale: float,
        **options: Any,
    ) -> torch.Tensor:
        assert (heads, layout, q.is_contiguous(), k.is_contiguous()) == (
            q.shape[1],
            "BNSD",
            True,
            True,
        )
        mask = options.get("atten_mask")
        mode = options.get("sparse_mode", 0)
        scores = (
            q.float()
            @ k.float().repeat_interleave(heads // k.shape[1], 1).transpose(-1, -2)
            * scale
        )
        if mask is None:
            return scores
        assert mask.dtype == torch.bool
        assert mode == 0 or (mode, mask.shape) == (2, (2048, 2048))
        return scores.masked_fill(mask[: scores.shape[-2], : scores.shape[-1]], -torch.inf)

    def npu_fusion_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        layout: str,
        *,
        scale: float,
        **options: Any,
    ) -> tuple[Any, ...]:
        self.calls.append("forward")
        scores = self._weights(q, k, heads, layout, scale, **options)
        peak = scores.amax(-1, keepdim=True)
        total = (scores - peak).exp().sum(-1, keepdim=True)
        out = (scores - peak).exp() / total @ v.float().repeat_interleave(heads // v.shape[1], 1)
        return (
            out.to(q.dtype),
            peak.expand(*peak.shape[:-1], 8),
            total.expand(*total.shape[:-1], 8),
            None,
            0,
            0,
            0,
        )

    def npu_fusion_attention_grad(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gradient: torch.Tensor,
        heads: int,
        layout: str,
        *,
        softmax_max: torch.Tensor,
        softmax_sum: torch.Tensor,
        attention_in: torch.Tensor,
        scale_value: float,
        **options: Any,
    ) -> tuple[Any, ...]:
        self.calls.append("backward")
        assert softmax_max.shape == softmax_sum.shape == (*q.shape[:3], 8)
        many = heads // k.shape[1]
        scores = self._weights(q, k, heads, layout, scale_value, **options)
        weights = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
        of_weights = gradient.float() @ v.float().repeat_interleave(many, 1).transpose(-1, -2)
        of_scores = (
            weights
            * (of_weights - (gradient.float() * attention_in.float()).sum(-1, keepdim=True))
            * scale_value
        )
        to_k = of_scores.transpose(-1, -2) @ q.float()
        to_v = weights.transpose(-1, -2) @ gradient.float()
        to_k, to_v = (x.view(x.shape[0], -1, many, *x.shape[2:]).sum(2) for x in (to_k, to_v))
        to_q = of_scores @ k.float().repeat_interleave(many, 1)
        return to_q.to(q.dtype), to_k.to(q.dtype), to_v.to(q.dtype), None


@pytest.mark.parametrize("case", [{}, {"window": 8}, {"sinks": True}], ids=str)
def test_a_plugins_kernel_computes_the_same(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Documented()
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    on_npu: Any = SimpleNamespace(
        device=SimpleNamespace(type="npu"), dtype=torch.bfloat16, shape=(1, 4, 9, 16)
    )
    kernel, masks = attention._fused(on_npu, on_npu, on_npu, torch.arange(9), attention.Scores(0.3))
    assert kernel is not None
    assert masks
    monkeypatch.setattr(
        attention, "_fused", lambda q, k, v, at, scores: (kernel, int(at.max()) < k.shape[2])
    )
    test_outputs_and_gradients_are_those_of_each_row_alone(
        case, torch.bfloat16, 128, 2**20, monkeypatch
    )
    assert set(library.calls) == {"forward", "backward"}
