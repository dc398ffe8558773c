"""Logprobs of given tokens from hidden states, in bounded memory, with a gradient; and the entropy
beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stages.engines.torch.model.layers import product
from stages.engines.torch.model.logits import float32_logits

LOGITS_BYTES = 256 * 2**20  # most that float32 logits may take at once
# of logits that several operations in turn work on; a CPU's caches hold them
PIECE_BYTES = {"cpu": 4 * 2**20}
TINY = torch.finfo(torch.float32).tiny  # a smaller probability adds nothing to an entropy


class TokenLogprobs(torch.autograd.Function):
    """Logprobs of ``targets`` [T] from the hidden states [U, d] that predict them, with at most
    ``LOGITS_BYTES`` of logits. If all logits fit they are kept for the backward; otherwise each
    chunk is computed again. Also returns the entropy [T] (nats) of the distribution that each target
    is of; empty without ``with_entropy``. With ``vocabulary`` only so
    many of the first tokens have a probability: the other rows of the head, which pad it, are not
    read, and get a gradient of zero. ``masks`` uint8 [U, V / 8]: bits of the tokens that have one.
    ``inner`` [U, r] and ``up`` [V, r]: :func:`~stages.engines.torch.model.logits.head_adapter`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        source: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        softcap: float | None = None,
        vocabulary: int | None = None,
        masks: torch.Tensor | None = None,
        inner: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.rows = len(weight)
        weight = weight[:vocabulary]
        bias = None if bias is None else bias[:vocabulary]
        up = None if up is None else up[:vocabulary]
        size = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
        chosen = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty(
            len(hidden) if with_entropy else 0, dtype=torch.float32, device=hidden.device
        )
        saved_logits = None
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            inner_rows = None if inner is None else inner[rows]
            logits = scaled_logits(hidden[rows], weight, bias, temperature, softcap, inner_rows, up)
            _mask(logits, masks, start)
            in_chunk = (source >= start) & (source < start + size)
            at = source[in_chunk] - start
            wanted = logits[at, targets[in_chunk]]
            peak, log_total = _softmax_in_place(
                logits, entropies[start : start + size] if with_entropy else None
            )
            chosen[in_chunk] = wanted - peak[at] - log_total[at]
            saved_logits = logits if size >= len(hidden) and softcap is None else None
        inputs = (hidden, weight, bias, source, targets, saved_logits, masks, inner, up)
        ctx.save_for_backward(*inputs, entropies)
        ctx.temperature = temperature
        ctx.size = size
        ctx.softcap = softcap
        ctx.set_materialize_grads(False)
        return chosen, entropies[source] if with_entropy else entropies

    @staticmethod
    def backward(
        ctx: Any, of_chosen: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, source, targets, saved_logits, masks, inner, up, entropies = (
            ctx.saved_tensors
        )
        if of_chosen is None:
            of_chosen = torch.zeros(len(targets), device=hidden.device)
        gradient = of_chosen / ctx.temperature  # [T]
        of_place = gradient.new_zeros(len(hidden)).index_add_(0, source, gradient)
        to_entropy = None
        if of_entropy is not None and len(of_entropy):
            to_entropy = gradient.new_zeros(len(hidden), 1)
            to_entropy[:, 0].index_add_(0, source, of_entropy / ctx.temperature)
        to_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        to_weight = weight.new_empty(ctx.rows, weight.shape[1]) if ctx.needs_input_grad[1] else None
        to_bias = bias.new_zeros(ctx.rows) if ctx.needs_input_grad[2] else None
        if to_weight is not None:
            to_weight[len(weight) :] = 0
        to_inner = None if inner is None else torch.zeros_like(inner)
        to_up = None if up is None else inner.new_zeros(ctx.rows, up.shape[1])
        for start in range(0, len(hidden), ctx.size):
            rows = slice(start, start + ctx.size)
            part = hidden[rows]
            if (probabilities := saved_logits) is None:
                inner_rows = None if inner is None else inner[rows]
                probabilities = scaled_logits(
                    part, weight, bias, ctx.temperature, ctx.softcap, inner_rows, up
                )
                if ctx.softcap is not None:
                    # of the cap
                    slope = 1 - (probabilities * (ctx.temperature / ctx.softcap)).square_()
                _mask(probabilities, masks, start)
                _softmax_in_place(probabilities, None)
            in_chunk = (source >= start) & (source < start + ctx.size)
            for words in _pieces(len(weight), len(part), weight.device):
                to_logits = probabilities[:, words] * -of_place[rows, None]
                in_slice = in_chunk & (targets >= words.start) & (targets < words.stop)
                at = source[in_slice] - start, targets[in_slice] - words.start
                to_logits.index_put_(at, gradient[in_slice], accumulate=True)
                if to_entropy is not None:
                    surprise = probabilities[:, words].clamp(min=TINY).log_()
                    surprise.add_(entropies[rows, None]).mul_(probabilities[:, words])
                    to_logits.sub_(surprise.mul_(to_entropy[rows]))
                if ctx.softcap is not None:
                    to_logits.mul_(slope[:, words])
                if to_inner is not None and to_up is not None:
                    to_inner[rows] += product(to_logits, up[words].float())
                    to_up[words] += product(inner[rows].t(), to_logits).t()
                to_logits = to_logits.to(weight.dtype)
                to_hidden[rows] += product(to_logits, weight[words])
                if to_weight is None:
                    pass
                elif start == 0:
                    to_weight[words] = product(to_logits.t(), part)
                else:
                    to_weight[words] += product(to_logits.t(), part)
                if to_bias is not None:
                    to_bias[words] += to_logits.sum(0)
        of_adapter = to_inner, None if to_up is None else to_up.to(up.dtype)
        return to_hidden.to(hidden.dtype), to_weight, to_bias, *[None] * 7, *of_adapter


@torch.no_grad()
def top_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    temperature: float,
    softcap: float | None = None,
    vocabulary: int | None = None,
    masks: torch.Tensor | None = None,
    inner: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``k`` largest logprobs float32 [U, k] of the distribution that each hidden state
    predicts, and their tokens int32 [U, k], with at most ``LOGITS_BYTES`` of logits. Other
    arguments are those of :class:`TokenLogprobs`. Raises ValueError where there are fewer tokens.
    """
    weight = weight[:vocabulary]
    if k > len(weight):
        raise ValueError(f"top_k: {k} is more than the {len(weight)} tokens of the model")
    bias = None if bias is None else bias[:vocabulary]
    up = None if up is None else up[:vocabulary]
    largest = torch.empty(len(hidden), k, dtype=torch.float32, device=hidden.device)
    tokens = torch.empty(len(hidden), k, dtype=torch.int32, device=hidden.device)
    size = max(1, LOGITS_BYTES // (4 * len(weight)))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        inner_rows = None if inner is None else inner[rows]
        logits = scaled_logits(hidden[rows], weight, bias, temperature, softcap, inner_rows, up)
        _mask(logits, masks, start)
        of_rows, tokens[rows] = logits.topk(k)
        peak, log_total = _softmax_in_place(logits, None)
        largest[rows] = of_rows - (peak + log_total)[:, None]
    return largest, tokens


def scaled_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    softcap: float | None = None,
    inner: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits divided by ``temperature``, after ``softcap`` · tanh(logit /
    ``softcap``). ``inner`` float32 [U, r] and ``up`` [V, r]: factors of what is added before."""
    logits = float32_logits(hidden, weight, bias)
    if inner is not None and up is not None:
        up_columns = up.float().t()
        for rows in _pieces(len(logits), logits.shape[1], logits.device):
            logits[rows] += product(inner[rows], up_columns)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1 else logits.div_(temperature)


def _mask(logits: torch.Tensor, masks: torch.Tensor | None, start: int) -> None:
    """Overwrite those of ``logits`` [U, V] whose bit in ``masks``, from row ``start`` on, is 0."""
    if masks is None:
        return
    bits = masks[start : start + len(logits), :, None] >> torch.arange(
        8, dtype=torch.uint8, device=masks.device
    )
    logits.masked_fill_((bits & 1 == 0).flatten(1)[:, : logits.shape[1]], -torch.inf)


def _softmax_in_place(
    logits: torch.Tensor, entropy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn ``logits`` [U, V] into probabilities, and write the entropy of each row to ``entropy``
    [U]. Returns each row's largest logit, and the log of the sum of the exponentials of logits
    minus it; their sum is the row's logsumexp."""
    peak = logits.new_empty(len(logits), 1)
    total = logits.new_empty(len(logits), 1)
    # memory that is new for each piece costs more than all that is computed in it
    logs: torch.Tensor | None = None
    for rows in _pieces(len(logits), logits.shape[1], logits.device):
        part = logits[rows]
        torch.amax(part, -1, keepdim=True, out=peak[rows])
        torch.sum(part.sub_(peak[rows]).exp_(), -1, keepdim=True, out=total[rows])
        part.div_(total[rows])
        if entropy is not None:
            logs = torch.empty_like(part) if logs is None else logs
            torch.clamp(part, min=TINY, out=logs[: len(part)])
            torch.sum(logs[: len(part)].log_().mul_(part), -1, out=entropy[rows])
    if entropy is not None:
        entropy.neg_()
    return peak[:, 0], total[:, 0].log()


def _pieces(count: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yield the slices of ``count`` rows of ``width`` numbers, of at most ``PIECE_BYTES`` each."""
    size = max(1, PIECE_BYTES.get(device.type, LOGITS_BYTES // 8) // (4 * max(1, width)))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
