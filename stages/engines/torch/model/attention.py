"""Attention in memory that is linear in the tokens, with what decoders add to it, and its gradient.

    queries × keys, in tiles ─▶ output and log-sum-exp of each tile ─▶ merged        (forward)
    each tile again, with the merged output and log-sum-exp ─▶ its share of the gradients    (backward)

A tile is computed by the device's fused kernel (no matrix of scores) where that has what the layer
needs and is faster, and else by matmuls over chunks of at most ``CHUNK`` scores. Both parts are
exact: with the softmax's total taken over all keys, gradients of a union of tiles are sums over its
tiles (FlashAttention-2, arXiv 2307.08691; Ring Attention, 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stages import device as devices

CHUNK = 2**20  # scores held at once on a CPU: 4 MiB, so that they stay in its cache
CHUNK_DEVICE = 2**25  # on an accelerator: 128 MiB
FEW_KEYS = 128  # with at most as many, the CPU's fused kernel is faster in float32 than in 16 bits
Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Scores:
    """The way in which a layer makes attention weights from queries and keys: products times
    ``scaling``, then ``softcap`` · tanh(score / ``softcap``), of the last ``window`` keys (the
    query's own is one of them). ``fused``: by fused kernels."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    fused: bool = True

    @classmethod
    def of(cls, query: torch.Tensor, options: Mapping[str, Any], fused: bool = True) -> Scores:
        """Build it from the arguments of a transformers attention function."""
        scaling = options.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return cls(scaling, options.get("sliding_window"), options.get("softcap"), fused)


@dataclass(frozen=True)
class _Chunk:
    queries: slice
    keys: slice
    causal: bool = False  # queries and keys are the same tokens
    hidden: torch.Tensor | None = None  # bool [n, m]: keys that a query does not see


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, scores: Scores
) -> Parts:
    """Return the attention of ``q`` [B, H, n, D] over ``k`` [B, KV heads, m, D] and ``v`` [B, KV
    heads, m, E], without a gradient. ``at`` int64 [n], on the CPU: the queries' positions, counted
    from the first key; a query sees no key after its own position. Returns the output [B, H, n, E],
    and float32 [B, H, n] log-sum-exps of the scores, which are -inf for a query that sees none of
    the keys (its output is 0)."""
    kernel, masks = _fused(q, k, v, at, scores)
    chunks = list(_chunks(q, k.shape[2], at, scores, kernel is not None))

    def compute(chunk: _Chunk) -> Parts:
        part = q[:, :, chunk.queries], k[:, :, chunk.keys], v[:, :, chunk.keys]
        if kernel is not None and (chunk.hidden is None or masks):
            return kernel[0](*part, chunk.causal, chunk.hidden, scores.scaling)
        return _by_matmul(*part, chunk.hidden, scores)

    if len(chunks) == 1 and chunks[0].queries == slice(0, len(at)):
        return compute(chunks[0])
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    total = q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q))
    for chunk in chunks:
        out[:, :, chunk.queries], total[:, :, chunk.queries] = compute(chunk)
    return out, total


def attend_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    at: torch.Tensor,
    scores: Scores,
) -> Parts:
    """Return what these keys add to the gradients of ``q``, ``k`` and ``v``, given the
    ``gradient`` of ``out``. ``out`` and ``total`` (log-sum-exps) are those over all keys that the
    queries see, here and elsewhere."""
    kernel, masks = _fused(q, k, v, at, scores)
    chunks = list(_chunks(q, k.shape[2], at, scores, kernel is not None))

    def compute(chunk: _Chunk) -> Parts:
        g, part, o, t = (x[:, :, chunk.queries] for x in (gradient, q, out, total))
        inputs = g, part, k[:, :, chunk.keys], v[:, :, chunk.keys], o, t
        if kernel is not None and (chunk.hidden is None or masks):
            return kernel[1](inputs, chunk.causal, chunk.hidden, scores.scaling)
        return _by_matmul_backward(inputs, chunk.hidden, scores)

    if len(chunks) == 1 and (chunks[0].queries, chunks[0].keys) == (
        slice(0, len(at)),
        slice(0, k.shape[2]),
    ):
        return compute(chunks[0])
    to_q, to_k, to_v = (torch.zeros_like(x, dtype=wide(q)) for x in (q, k, v))
    for chunk in chunks:
        parts = compute(chunk)
        to_q[:, :, chunk.queries] += parts[0]
        to_k[:, :, chunk.keys] += parts[1]
        to_v[:, :, chunk.keys] += parts[2]
    return to_q, to_k, to_v


def merge(
    out: torch.Tensor, total: torch.Tensor, other: torch.Tensor | None, other_total: torch.Tensor
) -> Parts:
    """Return the output and log-sum-exp over two sets of keys, from those of each.

    ``other`` None: a set with values of 0, as an attention sink.
    """
    both = torch.logaddexp(total, other_total)
    merged = out * (total - both).exp()[..., None].to(out.dtype)
    if other is not None:
        merged += other * (other_total - both).exp()[..., None].to(out.dtype)
    return merged, both


def _chunks(
    q: torch.Tensor, keys: int, at: torch.Tensor, scores: Scores, fused: bool
) -> Iterator[_Chunk]:
    """Yield the chunks of a tile of ``keys`` keys.

    ``fused``: a kernel computes chunks without hidden keys in constant memory.
    """
    count = len(at)
    reach = keys if scores.window is None else min(keys, scores.window)
    first = int(at.min())
    last = int(at.max())
    everything = slice(0, count), slice(0, keys)
    inside = scores.window is None or last < scores.window
    if fused and inside and first >= keys - 1:
        yield _Chunk(*everything)
        return
    if fused and inside and first == 0 and count == keys == last + 1:
        yield _Chunk(*everything, causal=True)
        return
    held = CHUNK if q.device.type == "cpu" else CHUNK_DEVICE
    size = max(16, min(held // (q.shape[0] * q.shape[1] * min(keys, 2 * reach)), reach))
    for start in range(0, count, size):
        part = at[start : start + size]
        first = int(part.min())
        last = int(part.max())
        begin = 0 if scores.window is None else max(0, first - scores.window + 1)
        end = min(keys, last + 1)
        if begin >= end:
            continue
        hidden = None
        if end - 1 > first or (scores.window is not None and begin <= last - scores.window):
            columns = torch.arange(begin, end)
            rows = part[:, None]
            hidden = columns > rows
            if scores.window is not None:
                hidden |= columns <= rows - scores.window
            hidden = hidden.to(q.device)
        yield _Chunk(slice(start, min(start + size, count)), slice(begin, end), hidden=hidden)


def _weights(
    q: torch.Tensor, k: torch.Tensor, scores: Scores, hidden: torch.Tensor | None
) -> Parts:
    """Return scores [B, KV heads, H / KV heads · n, m], and the tanh that they come from (without
    a cap, themselves)."""
    logits = q @ k.transpose(-1, -2)
    capped = logits
    if scores.softcap is not None:
        capped = logits.div_(scores.softcap).tanh_()
        logits = capped * scores.softcap
    if hidden is not None:
        logits.view(*logits.shape[:2], -1, *hidden.shape).masked_fill_(hidden, -torch.inf)
    return logits, capped


def _by_matmul(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scores: Scores
) -> Parts:
    weights, _ = _weights(
        _grouped(q.to(wide(q)) * scores.scaling, k), k.to(wide(q)), scores, hidden
    )
    # of a query without keys: finite
    peak = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    total = weights.sub_(peak).exp_().sum(-1, keepdim=True)
    out = (weights @ v.to(wide(q))).div_(total.clamp(min=torch.finfo(torch.float32).tiny))
    return out.view(*q.shape[:-1], -1).to(q.dtype), (peak + total.log()).view(q.shape[:-1])


def _by_matmul_backward(given: Parts, hidden: torch.Tensor | None, scores: Scores) -> Parts:
    gradient, q, k, v, out, total = given
    scaled = _grouped(q.to(wide(q)) * scores.scaling, k)
    of_out = _grouped(gradient, k)
    keys = k.to(wide(q))
    weights, capped = _weights(scaled, keys, scores, hidden)
    weights = weights.sub_(total.reshape(*scaled.shape[:3], 1)).exp_()
    to_v = weights.transpose(-1, -2) @ of_out
    mean = (of_out * _grouped(out, k)).sum(-1, keepdim=True)
    to_logits = (of_out @ v.to(wide(q)).transpose(-1, -2)).sub_(mean).mul_(weights)
    if scores.softcap is not None:
        to_logits.mul_(1 - capped.square())
    to_q = (to_logits @ keys).mul_(scores.scaling)
    return to_q.view(q.shape), to_logits.transpose(-1, -2) @ scaled, to_v


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [B, H, n, D] as [B, KV heads, H / KV heads · n, D] in float32 or wider: the
    queries of a key are one matrix."""
    grouped = x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])
    return grouped.to(wide(x))


def wide(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums over numbers like ``x``: float32, or float64."""
    return torch.promote_types(x.dtype, torch.float32)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, scores: Scores
) -> tuple[tuple[Callable[..., Parts], ...] | None, bool]:
    """Return the forward and backward of the device's fused kernel, or None where it cannot compute
    ``scores`` or is slower; and whether it computes chunks with hidden keys too."""
    if not scores.fused or scores.softcap is not None or q.shape[-1] != v.shape[-1]:
        return None, False
    if q.device.type == "cpu" and (k.shape[2] > FEW_KEYS or wide(q) == torch.float32):
        # each query sees a key, at least its own
        sees = scores.window is None or int(at.max()) < k.shape[2]
        return (_cpu, _cpu_backward), sees
    halves = q.dtype in (torch.bfloat16, torch.float16)
    if (
        devices.has_flash_attention(q.device)
        and halves
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    ):
        return (_flash, _flash_backward), False
    if (
        halves
        and q.shape[-1] % 16 == 0
        and (kernels := devices.fused_attention(q.device)) is not None
    ):
        return kernels, scores.window is None or int(at.max()) < k.shape[2]
    return None, False


def _cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    hidden: torch.Tensor | None,
    scale: float,
) -> Parts:
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    inputs = _in_float32_of_few(k, q, k, v)
    out, total = forward(*inputs, 0.0, causal, attn_mask=_bias(hidden, inputs[0]), scale=scale)
    return out.to(q.dtype), total


def _cpu_backward(given: Parts, causal: bool, hidden: torch.Tensor | None, scale: float) -> Parts:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    values = _in_float32_of_few(given[2], *given[:-1])
    return backward(
        *values, given[-1], 0.0, causal, attn_mask=_bias(hidden, values[0]), scale=scale
    )  # type: ignore[no-any-return]


def _in_float32_of_few(keys: torch.Tensor, *given: torch.Tensor) -> Parts:
    return tuple(x.to(wide(x)) for x in given) if keys.shape[2] <= FEW_KEYS else given


def _bias(hidden: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    return None if hidden is None else q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, hidden: None, scale: float
) -> Parts:
    out, total, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, total


def _flash_backward(given: Parts, causal: bool, hidden: None, scale: float) -> Parts:
    _, q, k, *_ = given
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state of dropout
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = None, None, q.shape[2], k.shape[2]
    return backward(*given, *lengths, 0.0, causal, unused, unused, scale=scale)  # type: ignore[no-any-return]
