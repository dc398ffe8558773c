"""Sampling: from logits on a device to tokens and logprobs, without a synchronisation with the
device in between.

logits [R, V] ─▶ processors of some rows ─▶ temperature ─▶ weights = softmax ─▶ top-k, top-p, min-p ─▶ inverse of
the cumulative sum at each row's own number in [0, 1) ─▶ Drawn: tokens on the device, copied to the host by read()
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from stages import device as devices
from stages.engines.protocols import SamplingParams

if TYPE_CHECKING:
    from stages.engines.torch.sampling.processors import ProcessedRow

BLOCK = 256  # columns that one level of a search looks at


class Drawn:
    """One token per row: ``tokens`` int64 [R] on the logits' device, and more candidates with their
    ``logprobs``. :meth:`read` copies them to the host. ``candidates`` int64 and ``logprobs``
    float32 [R, 1 + alternatives]: the token itself, then the likeliest ones."""

    def __init__(
        self, tokens: torch.Tensor, candidates: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        self.tokens = tokens
        # One copy for both: float32 holds a token's number bit by bit.
        self._arrive = devices.fetch(
            torch.stack([candidates.int(), logprobs.float().view(torch.int32)])
        )

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return of each row its token and the alternatives, and their logprobs.

        Those of a row with logits that were not finite are NaN, since an earlier check would wait
        for the device.
        """
        tokens, bits = self._arrive()
        return tokens.tolist(), bits.view(torch.float32).tolist()


def uniform(seed: int, place: int, index: int) -> float:
    """Return the number in [0, 1) that token ``index`` of response ``place`` is drawn with: a hash
    of the arguments alone. It has 52 bits, so that scaling never rounds it up to the end of a
    range."""
    digest = hashlib.blake2b(f"{seed} {place} {index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) * 2.0**-52


def draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    points: Sequence[float],
    alternatives: int = 0,
    processed: Mapping[int, ProcessedRow] = MappingProxyType({}),
) -> Drawn:
    """Draw one token per row of ``logits`` float32 [R, V] (overwritten), by inverting the
    cumulative distribution at ``points`` in [0, 1). Its logprob, and those of the ``alternatives``
    likeliest tokens, or of those that ``params`` name, are those after temperature (before it where
    they are raw) and before the changes of ``processed`` rows, top-k, top-p and min-p. NaN: no
    token of the row may be made."""
    device = logits.device
    named = {i: p.logprob_token_ids for i, p in enumerate(params) if p.logprob_token_ids}
    alternatives = max(alternatives, *map(len, named.values())) if named else alternatives
    apart = [
        i
        for i, p in enumerate(params)
        if i in processed or (p.raw_logprobs and p.temperature not in (0.0, 1.0))
    ]
    changed = devices.put(torch.tensor(apart), device) if apart else None
    if changed is not None:
        temperatures = [
            [1.0 if params[i].raw_logprobs else params[i].temperature or 1.0] for i in apart
        ]
        plain = (logits[changed] / devices.put(torch.tensor(temperatures), device)).log_softmax(-1)
        for i, row in processed.items():
            row.change(logits[i])
    if any(p.temperature not in (0.0, 1.0) for p in params):
        logits /= devices.put(torch.tensor([p.temperature or 1.0 for p in params]), device)[:, None]
    greedy = [not p.temperature for p in params]
    likeliest = _likeliest(logits) if any(greedy) else None
    # Of tokens so unlikely that their weight below is 0; the sampled token is none of them.
    exact = logits.log_softmax(-1) if alternatives else None
    # On a CPU in place, and with softmax's exponentials: a fresh tensor of this size, or exp_,
    # takes longer than all else.
    weights = torch.softmax(logits, -1, out=logits if device.type == "cpu" else None)
    if changed is not None:
        plain += 0.0 * weights[changed]
        if exact is not None:
            exact[changed] = plain
    chosen = weights
    filtered = [
        i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1.0 or p.min_p)
    ]
    if filtered:
        rows = devices.put(torch.tensor(filtered), device)
        some = weights[rows]
        threshold = keep_from(
            some, [params[i].top_k for i in filtered], [params[i].top_p for i in filtered]
        )
        if any(shares := [params[i].min_p for i in filtered]):
            least = devices.put(torch.tensor(shares), device) * some.amax(-1)
            threshold = torch.maximum(threshold, least)
        chosen = weights.index_copy(0, rows, some.masked_fill_(some < threshold[:, None], 0.0))
    if likeliest is not None and all(greedy):
        tokens = likeliest
    else:
        tokens = invert(
            chosen, devices.put(torch.tensor(points, dtype=devices.widest_float(device)), device)
        )
        if likeliest is not None:
            tokens = torch.where(devices.put(torch.tensor(greedy), device), likeliest, tokens)
    # Softmax makes NaN of a row with a logit that is NaN or infinite.
    index = tokens[:, None]
    if exact is None:
        logprobs = weights.gather(-1, index).log()
        if changed is not None:
            logprobs[changed] = plain.gather(-1, index[changed])
        return Drawn(tokens, index, logprobs)
    logprobs, others = exact.topk(min(alternatives, exact.shape[1]))
    for i, ids in named.items():
        others[i, : len(ids)] = devices.put(torch.tensor(ids), device)
        logprobs[i] = exact[i, others[i]]
    return Drawn(
        tokens,
        torch.cat([index, others], 1),
        torch.cat([exact.gather(-1, index), logprobs], 1),
    )


def ranked(
    logits: torch.Tensor, tokens: torch.Tensor, alternatives: int
) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Return of each row of ``logits`` [R, V] its token of ``tokens`` int64 [R] and the
    ``alternatives`` likeliest ones, their logprobs, and the rank of the token (1: the likeliest)."""
    logprobs = logits.log_softmax(-1)
    index = tokens.to(logits.device)[:, None]
    chosen = logprobs.gather(-1, index)
    top = logprobs.topk(min(alternatives, logprobs.shape[1]))
    ranks = (logprobs > chosen).sum(-1) + 1
    candidates = torch.cat([index, top.indices], 1)
    return candidates.tolist(), torch.cat([chosen, top.values], 1).tolist(), ranks.tolist()


def keep_from(weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Return the least weight [R] that top-k and then top-p keep of ``weights`` [R, V] >= 0 (0 and
    1.0: off; ties are kept).

    On CPU only the largest weights are sorted: 64, or the largest k, and eight times more while
    top-p needs more. On an accelerator all are sorted, because a check whether those were enough
    would wait for the device.
    """
    vocabulary = weights.shape[1]
    k = devices.put(torch.tensor([min(k, vocabulary) or vocabulary for k in top_k]), weights.device)
    p = devices.put(torch.tensor(top_p, dtype=torch.float32), weights.device)
    width = max(64, *top_k) if weights.device.type == "cpu" else vocabulary
    while True:
        width = min(width, vocabulary)
        top = weights.topk(width).values
        ranked = torch.arange(width, device=weights.device) < k[:, None]
        mass = torch.where(k <= width, (top * ranked).sum(-1), weights.sum(-1))
        is_kept = ranked & (top.cumsum(-1) - top < (p * mass)[:, None])
        if width == vocabulary or not bool((is_kept[:, -1] & (k > width)).any()):
            # the likeliest is kept, also of weights that are NaN
            last = (is_kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
            return top.gather(-1, last)[:, 0]
        width *= 8


def invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return for each row of ``weights`` [R, V] >= 0 the index at which its cumulative sum exceeds
    ``points`` [R] of the total. Works in two levels, blocks and then the members of one block, so
    that weights are read once. Never returns an index of weight 0. Sums have the dtype of
    ``points``."""
    blocks = _in_blocks(weights, 0.0)
    dtype = points.dtype
    below_one = 1.0 - torch.finfo(dtype).eps  # this part of a sum is not rounded up to the sum

    def pass_point(masses: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index at which the sum exceeds the point, and how far inside it the point is,
        in [0, 1)."""
        ends = masses.to(dtype).cumsum(-1)
        target = (points * ends[:, -1])[:, None]
        index = torch.searchsorted(ends, target, right=True).clamp_(max=masses.shape[1] - 1)
        mass = masses.gather(-1, index).to(dtype)
        inside = (target - ends.gather(-1, index) + mass) / mass
        return index[:, 0], inside[:, 0].clamp(0.0, below_one)

    # Weights that are not finite pass no point: their row is refused when it is read, and must not
    # fail before (clamps).
    block, inside = pass_point(blocks.sum(-1), points.clamp(max=below_one))
    member, _ = pass_point(_one_block(blocks, block), inside)
    return (block * blocks.shape[-1] + member).clamp_(max=weights.shape[1] - 1)


def _in_blocks(rows: torch.Tensor, filling: float) -> torch.Tensor:
    """Return [R, V] as [R, V / size, size]. Only odd vocabularies are padded, because padding
    copies."""
    vocabulary = rows.shape[1]
    size = math.gcd(vocabulary, BLOCK)
    if size < 32:
        size = BLOCK
        rows = torch.nn.functional.pad(rows, (0, -vocabulary % size), value=filling)
    return rows.view(len(rows), -1, size)


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the first index [R] of each row's maximum, in two levels: the plain argmax is slow on
    CPU."""
    blocks = _in_blocks(logits, -torch.inf)
    block = blocks.amax(-1).argmax(-1)
    return block * blocks.shape[-1] + _one_block(blocks, block).argmax(-1)


def _one_block(blocks: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Block number ``index`` [R] of each row."""
    return blocks[torch.arange(len(blocks), device=blocks.device), index]
