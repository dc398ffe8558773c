"""The torch training engine: whole groups, packed without padding, each group's prompt computed once.

    batch of groups ─▶ plan_micro_batches ─▶ for each micro-batch of at most token_budget tokens:
                                               pack ─▶ model ─▶ logprobs ─▶ algorithm.loss ─▶ backward
                       then once:              clip ─▶ AdamW ─▶ learning rate of the next step

A micro-batch is one row of tokens, so linear layers and norms see no padding and every prompt only once:

    [ prompt A | response A0 | response A1 | … | prompt B | response B0 | … ]

Attention of a response is causal over [prompt's KV; own KV], and gradients flow into the shared prompt's KV. A
response's last token predicts nothing, so it is not even fed; logits are made only where a response token is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from stages import device as devices
from stages.algorithms.batch import TrainBatch, jagged_rows, over_steps
from stages.algorithms.named import AlgorithmLike, split_gap
from stages.engines.plans import GroupShape, Piece, plan_micro_batches
from stages.engines.torch.head import float32_logits
from stages.resharding.swap import training_state

Schedule = Literal["constant", "linear", "cosine"]

ATTENTION = "asyncdock_shared_prompt"
LOGITS_BYTES = 256 * 2**20  # most that float32 logits may take at once


def learning_rate_at(step: int, *, peak: float, total_steps: int, warmup_steps: int, schedule: Schedule) -> float:
    """Learning rate of optimizer step ``step`` (from 0): rising over ``warmup_steps`` to ``peak`` at step
    ``warmup_steps - 1``, then constant, or falling to 0 at step ``total_steps``.

    >>> [learning_rate_at(s, peak=1.0, total_steps=6, warmup_steps=2, schedule="linear") for s in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


# --- one micro-batch: packed tokens and their attention --------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Rows of a piece that attend in one call: ``count`` rows padded to ``longest`` tokens. ``gather`` int64
    [count * longest] takes packed positions into the padded block, ``scatter`` int64 takes its real tokens back; both
    are None when all rows are equally long and the block is a plain view of ``start:end``."""

    start: int
    end: int
    count: int
    longest: int
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    bias: torch.Tensor  # [longest, P + longest]: -inf where a token of the row is not yet visible


@dataclass(frozen=True)
class _PackedPiece:
    prompt_start: int
    prompt_end: int
    blocks: tuple[_Block, ...]


@dataclass(frozen=True)
class _Packed:
    """A micro-batch on the device: S fed tokens, U places where logits are needed, T response tokens predicted."""

    ids: torch.Tensor  # int64 [1, S]
    positions: torch.Tensor  # int64 [1, S]
    pieces: tuple[_PackedPiece, ...]
    places: torch.Tensor  # int64 [U], which of the S
    source: torch.Tensor  # int64 [T], which of the U predicts the token
    targets: torch.Tensor  # int64 [T]
    longest: int  # prompt and response together


def _pack(
    prompts: Sequence[torch.Tensor], rows: Sequence[Sequence[torch.Tensor]], device: torch.device, dtype: torch.dtype
) -> _Packed:
    """``rows[i]`` are the responses to ``prompts[i]``, longer ones first; T is counted in this order."""
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
        pieces.append(_PackedPiece(at, prompt_end, tuple(_blocks(prompt_end, length, fed, device, dtype))))
        at = row_start
    places, which = torch.cat(source).unique(return_inverse=True)
    return _Packed(
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
) -> Iterable[_Block]:
    """Blocks of the rows packed from ``start`` on, longest first; within a block no row is padded to more than twice
    its length. Rows that feed nothing are in none."""
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
        yield _Block(start, end, last - first, longest, gather, scatter, bias)
        first, start = last, end


def _shared_prompt_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over a packed micro-batch: ``query`` [1, H, S, D], ``key`` and ``value``
    [1, KV heads, S, D]; returns [1, S, H, D]."""
    packed: _Packed = options["packed"]
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention option {name}")
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


def _rows(x: torch.Tensor, block: _Block) -> torch.Tensor:
    x = x[block.start : block.end] if block.gather is None else x.index_select(0, block.gather)
    return x.unflatten(0, (block.count, block.longest)).transpose(1, 2)


class _TokenLogprobs(torch.autograd.Function):
    """Logprobs of ``targets`` [T] from the hidden states [U, d] that predict them, with ``LOGITS_BYTES`` of logits at
    most. When all fit they are kept for the backward, which turns them into their own gradient in place; otherwise each
    chunk is made again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        source: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        size = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
        chosen = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        kept = None
        for start in range(0, len(hidden), size):
            logits = _logits(hidden[start : start + size], weight, bias, temperature)
            mine = (source >= start) & (source < start + size)
            at = source[mine] - start
            wanted = logits[at, targets[mine]]
            peak, log_total = _softmax_in_place(logits)
            chosen[mine] = wanted - peak[at] - log_total[at]
            kept = logits if size >= len(hidden) else None
        ctx.save_for_backward(hidden, weight, bias, source, targets, kept)
        ctx.temperature, ctx.size = temperature, size
        return chosen

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, source, targets, kept = ctx.saved_tensors
        gradient = gradients[0] / ctx.temperature  # [T]
        of_place = gradient.new_zeros(len(hidden)).index_add_(0, source, gradient)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if kept is None else None
        to_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), ctx.size):
            part = hidden[start : start + ctx.size]
            if (probabilities := kept) is None:
                _softmax_in_place(probabilities := _logits(part, weight, bias, ctx.temperature))
            mine = (source >= start) & (source < start + ctx.size)
            to_logits = probabilities.mul_(-of_place[start : start + ctx.size, None])
            to_logits.index_put_((source[mine] - start, targets[mine]), gradient[mine], accumulate=True)
            to_logits = to_logits.to(weight.dtype)
            to_hidden[start : start + ctx.size] = to_logits @ weight
            to_weight = to_logits.t() @ part if to_weight is None else to_weight.addmm_(to_logits.t(), part)
            if to_bias is not None:
                to_bias += to_logits.sum(0)
        return to_hidden, to_weight, to_bias, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = float32_logits(hidden, weight, bias)
    return logits if temperature == 1 else logits.div_(temperature)


def _softmax_in_place(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns ``logits`` [U, V] into probabilities; returns each row's largest logit, and the log of the sum of the
    exponentials of what the others are below it: together the row's logsumexp."""
    peak = logits.amax(-1, keepdim=True)
    total = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    logits.div_(total)
    return peak[:, 0], total[:, 0].log()


# --- the engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Group:
    """One group of a batch: its prompt, and the batch's row numbers of its responses, by place."""

    prompt: torch.Tensor
    numbers: tuple[int, ...]
    shape: GroupShape

    def part(self, places: Sequence[int]) -> _Group:
        """The group with the rows at ``places`` alone."""
        shape = GroupShape(self.shape.prompt, tuple(self.shape.responses[at] for at in places))
        return _Group(self.prompt, tuple(self.numbers[at] for at in places), shape)


class TorchTrainEngine:
    """Trains a Hugging Face decoder-only ``model``, which it owns from here on: it is moved to ``device`` (default: the
    accelerator if there is one, else the CPU) and its attention and dropout are replaced.

    ``token_budget`` bounds the tokens fed to the model at once, so the memory of activations; None puts the whole
    batch into one micro-batch. ``grad_clip`` bounds the gradient's 2-norm; None does not. ``weight_decay`` acts on
    matrices only. ``temperature`` is the sampling temperature of the rollouts. ``threads``, when given, is set as
    torch's number of CPU threads at each call. On the CPU a step is deterministic bit for bit, given the batch and the
    number of threads; the order of the batch's rows does not matter. The engine draws no random numbers.

    Raises ValueError for a model whose logits the packed computation does not reproduce: it is compared with the
    model's plain forward here, once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        total_steps: int,
        schedule: Schedule = "constant",
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        grad_clip: float | None = 1.0,
        token_budget: int | None = None,
        temperature: float = 1.0,
        activation_checkpointing: bool = False,
        threads: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule: {schedule!r} is not known; use 'constant', 'linear' or 'cosine'")
        if token_budget is not None and token_budget < 1:
            raise ValueError(f"token_budget: {token_budget} must be at least 1, or None for no limit")
        self.device = torch.device(device) if device is not None else devices.select()
        self.model = model
        self.step = 0
        self._schedule: dict[str, Any] = {
            "peak": learning_rate,
            "total_steps": total_steps,
            "warmup_steps": warmup_steps,
            "schedule": schedule,
        }
        self._grad_clip, self._token_budget, self._threads = grad_clip, token_budget, threads
        self._temperature = temperature or 1.0  # greedy rollouts record logprobs at temperature 1
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.train(activation_checkpointing)  # transformers checkpoints only in training mode
        if activation_checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self._dtype = model.dtype  # of the arithmetic
        self._trained = self._place()
        self._optimizer = _adamw(list(self._trained.values()), learning_rate, betas, weight_decay)

    def held(self) -> Iterator[torch.Tensor]:
        """The gradients and the optimizer's state of this moment, as this process holds them."""
        return training_state(self._optimizer)

    # What an engine of several ranks does otherwise (``torch_sharded``): where the parameters lie, and all that depends
    # on the other ranks' share of the batch.

    def _place(self) -> dict[str, nn.Parameter]:
        """Bring the model to where it is trained; what the optimizer shall work on, by the parameters' names."""
        nn.Module.to(self.model, self.device)
        self._take_over(self.device)
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _agree(self, tokens: int, rows: int, groups: int, passes: int) -> tuple[int, int, int, int]:
        """Tokens, rows and groups of the whole mini-batch, and the passes through the model that each rank makes."""
        return tokens, rows, groups, passes

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` added up over all ranks."""
        return values

    def _idle_pass(self) -> torch.Tensor:
        """One pass through the model with nothing to learn from, while other ranks have work: a logprob [1]."""
        token = torch.zeros(1, dtype=torch.int64)
        return self._compute(_pack([token], [[token]], self.device, self._dtype))

    def _add_up(self, sums: dict[str, float], largest: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Each rank's share of what is reported, put together."""
        return sums, largest

    def _clip(self) -> float:
        """Bound the gradient's norm; returns what it was before."""
        return nn.utils.clip_grad_norm_(self._trained.values(), self._grad_clip or math.inf).item()

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _saved(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """``value``, which belongs to each element of the optimizer's parameter ``name``, as it goes into a checkpoint."""
        return value

    def train_batch(self, batch: TensorDictBase, algorithm: AlgorithmLike) -> Mapping[str, float]:
        """The algorithm's epochs and mini-batches; see :class:`stages.engines.protocols.TrainEngine`. ``fed_tokens`` in the
        result counts the tokens that went through the model. Raises ``FloatingPointError``, and takes no further step, when
        a loss or a gradient is not finite."""
        self._set_threads()
        groups, responses = _groups(batch)
        by_policy = [name for name, by in algorithm.scores.items() if by == "policy"]
        computed = dict.fromkeys(by_policy, self.logprobs(batch).unbind()) if by_policy else {}
        given = TrainBatch(batch, algorithm, self._total, computed)
        whole = algorithm.unit == "group"
        parts = [
            (part, plan_micro_batches([group.shape for group in part], self._token_budget, whole=whole))
            for part in _mini_batches(groups, algorithm.mini_batches, whole)
        ]
        learning_rate = learning_rate_at(self.step // (algorithm.epochs * len(parts)), **self._schedule)
        for options in self._optimizer.param_groups:
            options["lr"] = learning_rate
        steps = []
        for part, plan in parts * algorithm.epochs:
            metrics = self._optimize(part, plan, responses, given, algorithm)
            steps.append({**metrics, "learning_rate": learning_rate})
        return over_steps(steps)

    def _optimize(
        self,
        groups: Sequence[_Group],
        plan: Sequence[Sequence[Piece]],
        responses: Sequence[torch.Tensor],
        given: TrainBatch,
        algorithm: AlgorithmLike,
    ) -> dict[str, float]:
        """One optimizer step on ``groups``, whose micro-batches are ``plan``."""
        rows = [number for group in groups for number in group.numbers]
        own = int(given.trained[rows].sum())
        if not own:
            raise ValueError("loss_mask: leaves no token of a mini-batch to train on; drop such groups before training")
        total_tokens, total_rows, total_groups, passes = self._agree(own, len(rows), len(groups), len(plan))
        fed = sum(groups[piece.group].shape.tokens(piece.rows) for pieces in plan for piece in pieces)
        sums: dict[str, torch.Tensor] = {"loss": torch.zeros((), device=self.device)}
        try:
            for pieces in plan:
                numbers = [groups[piece.group].numbers[row] for piece in pieces for row in piece.rows]
                tokens = given.tokens(
                    numbers,
                    [at for at, piece in enumerate(pieces) for _ in piece.rows],
                    self._piece_logprobs(groups, pieces, responses),
                    total_tokens=total_tokens,
                    total_rows=total_rows,
                    total_groups=total_groups,
                )
                if not len(tokens.row):  # all are left out: nothing to learn, but other ranks compute with this one
                    tokens.logprobs.sum().backward()
                    continue
                output = algorithm.loss(tokens)
                output.loss.backward()
                measured = {"loss": output.loss.detach(), **output.metrics, **tokens.behaviour_gap()}
                for name, value in measured.items():
                    before = sums.get(name)
                    together = torch.maximum if name.startswith("max_") else torch.add
                    sums[name] = value if before is None else together(before, value)
            for _ in range(passes - len(plan)):
                idle = self._idle_pass()
                idle.backward(torch.zeros_like(idle))
            added, largest = self._add_up(
                {name: value.item() for name, value in sums.items() if not name.startswith("max_")}
                | {"fed_tokens": float(fed)},
                {name: value.item() for name, value in sums.items() if name.startswith("max_")},
            )
            loss, fed_tokens = added.pop("loss"), added.pop("fed_tokens")
            gap, metrics = split_gap(added | largest)
            grad_norm = self._clip()
            if not (math.isfinite(grad_norm) and math.isfinite(loss)):
                raise FloatingPointError(
                    f"gradient norm is {grad_norm} at step {self.step} (loss {loss}): no step was taken; lower "
                    "learning_rate or look for logprobs that are not finite in the batch"
                )
            self._optimizer.step()
            self.step += 1
        finally:
            self._forget_gradients()
        return {"loss": loss, "grad_norm": grad_norm, "fed_tokens": fed_tokens, **gap, **algorithm.finish(metrics)}

    @torch.no_grad()
    def logprobs(self, batch: TensorDictBase) -> torch.Tensor:
        """Logprobs of the response tokens, float32 jagged [B, T_i] on the CPU. Each group is computed alone, so its
        bits do not depend on the groups that came with it."""
        self._set_threads()
        groups, responses = _groups(batch)
        rows: list[torch.Tensor] = [torch.empty(0)] * len(responses)
        alone = [plan_micro_batches([group.shape], self._token_budget) for group in groups]
        plan = [Piece(number, piece.rows) for number, parts in enumerate(alone) for (piece,) in parts]
        *_, passes = self._agree(0, 0, 0, len(plan))
        for piece in plan:
            numbers = [groups[piece.group].numbers[row] for row in piece.rows]
            values = self._piece_logprobs(groups, [piece], responses).cpu()
            for n, part in zip(numbers, values.split([len(responses[n]) for n in numbers]), strict=True):
                rows[n] = part
        for _ in range(passes - len(plan)):
            self._idle_pass()
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def state_dict(self) -> dict[str, Any]:
        """The live tensors (not copies) of the model and of AdamW's moments, by parameter name, tied ones once, and the
        number of steps taken: the same names and shapes whatever the layout."""
        model = self.model.state_dict()
        once = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        moments = {
            moment: {name: self._saved(name, self._moments(p)[moment]) for name, p in self._trained.items()}
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return {"model": {n: value for n, value in model.items() if n not in tied}, **moments, "step": self.step}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when ``state`` is not of this model. Its tensors may be this engine's own, filled in place."""
        mine = self.state_dict()
        for part in ("model", "exp_avg", "exp_avg_sq"):
            if other := mine[part].keys() ^ state[part].keys():
                raise ValueError(
                    f"state: {part} differs from the model's in {sorted(other)[:4]}; was it saved of another?"
                )
            for name, value in mine[part].items():
                _local(value).copy_(_local(state[part][name]))
        self.step = state["step"]
        for parameter in self._trained.values():
            self._moments(parameter)["step"].fill_(self.step)

    def _moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """AdamW's state of ``parameter``, as it makes it before its first step."""
        state = self._optimizer.state[parameter]
        if not state:
            fused = bool(self._optimizer.param_groups[0]["fused"])
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else None)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def save_pretrained(self, path: Path) -> None:
        # The config of a checkpoint that came from a quantised file says so, which would be untrue of what is written.
        self.model.config.__dict__.pop("quantization_config", None)
        self.model.save_pretrained(path)

    def close(self) -> None:
        """Release the optimizer's memory; harmless when repeated."""
        self._optimizer.state.clear()
        self._forget_gradients()

    def _set_threads(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    def _piece_logprobs(
        self, groups: Sequence[_Group], pieces: Sequence[Piece], responses: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """float32 [T]: the logprobs of the pieces' response tokens, piece by piece, row by row."""
        rows = [[responses[groups[piece.group].numbers[row]] for row in piece.rows] for piece in pieces]
        prompts = [groups[piece.group].prompt for piece in pieces]
        return self._compute(_pack(prompts, rows, self.device, self._dtype))

    def _compute(self, packed: _Packed) -> torch.Tensor:
        """float32 [T]: the logprobs of ``packed.targets``."""
        hidden = self._hidden(packed)
        head = self.model.get_output_embeddings()
        return _TokenLogprobs.apply(hidden, head.weight, head.bias, packed.source, packed.targets, self._temperature)  # type: ignore[no-any-return]

    def _hidden(self, packed: _Packed) -> torch.Tensor:
        """[U, d]: last hidden states at the places that predict a response token."""
        decoder: Any = self.model.base_model
        out = decoder(input_ids=packed.ids, position_ids=packed.positions, use_cache=False, packed=packed)
        return out.last_hidden_state[0].index_select(0, packed.places)

    @torch.no_grad()
    def _take_over(self, device: torch.device) -> None:
        """Put the shared-prompt attention into the model, and compare its logits with those of the plain forward. The
        model lies on ``device``, whole."""
        kind, vocabulary = type(self.model).__name__, self.model.config.get_text_config().vocab_size
        probe = torch.arange(9) * 7919 % vocabulary
        prompt, rows = probe[:4], [probe[4:9], probe[4:7]]
        plain = [self.model(input_ids=torch.cat([prompt, row])[None].to(device), use_cache=False) for row in rows]
        AttentionInterface.register(ATTENTION, _shared_prompt_attention)
        self.model.set_attn_implementation(ATTENTION)
        packed = _pack([prompt], [rows], device, self.model.dtype)
        head = self.model.get_output_embeddings()
        try:
            got = _logits(self._hidden(packed), head.weight, head.bias, 1.0)[packed.source]
        except (KeyError, TypeError, AttributeError, NotImplementedError) as error:
            raise ValueError(f"model: {kind} cannot be packed through the attention interface: {error!r}") from error
        expected = torch.cat([out.logits[0, 3:-1] for out in plain]).float()
        gap = float((got - expected).abs().max())
        limit = torch.finfo(self.model.dtype).eps ** 0.5 * max(1.0, float(expected.abs().max()))
        if not gap <= limit:
            raise ValueError(f"model: packed {kind} gives logits that are off by {gap:.2g} (limit {limit:.2g})")


def _adamw(
    parameters: Sequence[nn.Parameter], learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    options = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    try:
        return torch.optim.AdamW(options, lr=learning_rate, betas=betas, fused=True)
    except RuntimeError:  # this device has no fused kernel
        return torch.optim.AdamW(options, lr=learning_rate, betas=betas)


def _local(value: torch.Tensor) -> torch.Tensor:
    """What this process holds of ``value``."""
    return value.to_local() if isinstance(value, DTensor) else value


def _groups(batch: TensorDictBase) -> tuple[list[_Group], list[torch.Tensor]]:
    """The groups of ``batch`` in the order of their numbers, their rows by place, and all responses by row number."""
    prompts, responses = jagged_rows(batch, "prompt_ids"), jagged_rows(batch, "response_ids")
    by_group: dict[int, list[tuple[int, int]]] = {}
    for number, (group, place) in enumerate(zip(batch["group"].tolist(), batch["place"].tolist(), strict=True)):
        by_group.setdefault(group, []).append((place, number))
    groups = []
    for group, members in sorted(by_group.items()):
        numbers = tuple(number for _, number in sorted(members))
        prompt = prompts[numbers[0]]
        for number in numbers:
            if not torch.equal(prompts[number], prompt):
                raise ValueError(f"prompt_ids: rows {numbers[0]} and {number} of group {group} do not share one prompt")
            if len(prompt) < 1 or len(responses[number]) < 1:
                raise ValueError(f"row {number} of group {group}: prompt_ids and response_ids need at least one token")
        groups.append(_Group(prompt, numbers, GroupShape(len(prompt), tuple(len(responses[n]) for n in numbers))))
    return groups, responses


def _mini_batches(groups: Sequence[_Group], count: int, whole: bool) -> list[list[_Group]]:
    """``groups`` in ``count`` parts, in order, of as many groups each as can be; where there are fewer groups than parts, of
    as many rows. ``whole``: no group may be cut."""
    if len(groups) >= count:
        edges = [len(groups) * at // count for at in range(count + 1)]
        return [list(groups[a:b]) for a, b in pairwise(edges)]
    rows = [(group, at) for group in groups for at in range(len(group.numbers))]
    if whole or len(rows) < count:
        what = f"{len(groups)} groups" if whole else f"{len(rows)} rows"
        raise ValueError(f"mini_batches: {count} are more than the {what} of this rank; lower mini_batches")
    parts = []
    for a, b in pairwise([len(rows) * at // count for at in range(count + 1)]):
        members = [(group, [at for _, at in some]) for group, some in groupby(rows[a:b], key=lambda row: row[0])]
        parts.append([group.part(places) for group, places in members])
    return parts
