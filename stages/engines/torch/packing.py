"""Micro-batches packed without padding, in which each group's prompt is computed once.

    [ prompt A | response A0 | response A1 | … | prompt B | response B0 | … ]      one row of tokens

Attention of a response is causal over [keys of its prompt; its own keys], and gradients flow into the shared prompt. The
last token of a response predicts nothing, so it is not fed; logits are computed only where a response token is predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from stages.engines.torch.attention_interface import refuse_options

ATTENTION = "asyncdock_shared_prompt"  # name of shared_prompt_attention in transformers' attention interface


@dataclass(frozen=True)
class AttentionBlock:
    """Rows of a piece that attend in one call: ``count`` rows padded to ``longest`` tokens. ``gather`` int64 [count *
    longest] indexes packed tokens for the padded block, ``scatter`` int64 indexes its real tokens; both are None when all
    rows are equally long and the block is a view of ``start:end``."""

    start: int
    end: int
    count: int
    longest: int
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    bias: torch.Tensor  # [longest, P + longest]: -inf where a token of the row is not yet visible


@dataclass(frozen=True)
class PackedPiece:
    prompt_start: int
    prompt_end: int
    blocks: tuple[AttentionBlock, ...]


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch on the device: S fed tokens, U places where logits are needed, T predicted response tokens."""

    ids: torch.Tensor  # int64 [1, S]
    positions: torch.Tensor  # int64 [1, S]
    pieces: tuple[PackedPiece, ...]
    places: torch.Tensor  # int64 [U], which of the S
    source: torch.Tensor  # int64 [T], which of the U predicts the token
    targets: torch.Tensor  # int64 [T]
    longest: int  # prompt and response together


def pack(
    prompts: Sequence[torch.Tensor], rows: Sequence[Sequence[torch.Tensor]], device: torch.device, dtype: torch.dtype
) -> PackedBatch:
    """Pack ``rows[i]``, the responses to ``prompts[i]``, longer ones first. The T tokens are counted in this order."""
    ids, positions, pieces, source = [], [], [], []
    at = 0
    for prompt, responses in zip(prompts, rows, strict=True):
        length = len(prompt)
        prompt_end = row_start = at + length
        ids += [prompt, *(response[:-1] for response in responses)]
        positions.append(torch.arange(length))
        fed = [len(response) - 1 for response in responses]
        for tokens in fed:
            positions.append(torch.arange(length, length + tokens))
            source += [torch.tensor([prompt_end - 1]), torch.arange(row_start, row_start + tokens)]
            row_start += tokens
        pieces.append(PackedPiece(at, prompt_end, tuple(_blocks(prompt_end, length, fed, device, dtype))))
        at = row_start
    places, which = torch.cat(source).unique(return_inverse=True)
    return PackedBatch(
        ids=torch.cat(ids)[None].to(device),
        positions=torch.cat(positions)[None].to(device),
        pieces=tuple(pieces),
        places=places.to(device),
        source=which.to(device),
        targets=torch.cat([response for responses in rows for response in responses]).to(device),
        longest=max(len(p) + len(r) for p, responses in zip(prompts, rows, strict=True) for r in responses),
    )


def _blocks(
    start: int, prompt: int, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Iterable[AttentionBlock]:
    """Blocks of the rows packed from ``start`` on, longest first. Within a block no row is padded to more than twice its
    length. Rows without fed tokens are in none."""
    first, count = 0, sum(length > 0 for length in lengths)
    while first < count:
        longest = lengths[first]
        last = first + sum(2 * length >= longest for length in lengths[first:count])
        members = torch.tensor(lengths[first:last])
        end = start + int(members.sum())
        gather = scatter = None
        if int(members.min()) < longest:
            columns = torch.arange(longest)
            real = columns < members[:, None]
            offsets = (start + members.cumsum(0) - members)[:, None]
            gather = torch.where(real, offsets + columns, offsets).flatten().to(device)
            scatter = real.flatten().nonzero()[:, 0].to(device)
        bias = torch.full((longest, prompt + longest), -torch.inf, dtype=dtype, device=device).triu(prompt + 1)
        yield AttentionBlock(start, end, last - first, longest, gather, scatter, bias)
        first, start = last, end


def shared_prompt_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers over a packed micro-batch: ``query`` [1, H, S, D], ``key`` and ``value`` [1, KV
    heads, S, D]. Returns [1, S, H, D]."""
    packed: PackedBatch = options["packed"]
    refuse_options(options)
    if sliding_window is not None and packed.longest > sliding_window:
        raise NotImplementedError(f"a sequence of {packed.longest} tokens over a sliding window of {sliding_window}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, heads, D]
    shared: dict[str, Any] = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    out = []
    for piece in packed.pieces:
        prompt = slice(piece.prompt_start, piece.prompt_end)
        qp, kp, vp = (x[prompt].transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, P, D]
        out.append(scaled_dot_product_attention(qp, kp, vp, is_causal=True, **shared)[0].transpose(0, 1))
        for block in piece.blocks:
            qr, kr, vr = (_rows(x, block) for x in (q, k, v))  # [count, heads, longest, D]
            kr = torch.cat([kp.expand(block.count, -1, -1, -1), kr], 2)
            vr = torch.cat([vp.expand(block.count, -1, -1, -1), vr], 2)
            rows = scaled_dot_product_attention(qr, kr, vr, attn_mask=block.bias, **shared)
            rows = rows.transpose(1, 2).flatten(0, 1)
            out.append(rows if block.scatter is None else rows.index_select(0, block.scatter))
    return torch.cat(out)[None], None


def _rows(x: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
    x = x[block.start : block.end] if block.gather is None else x.index_select(0, block.gather)
    return x.unflatten(0, (block.count, block.longest)).transpose(1, 2)
