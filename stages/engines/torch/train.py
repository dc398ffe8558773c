"""The torch training engine: whole groups, packed without padding, each group's prompt computed once.

    batch of groups ─▶ plan_micro_batches ─▶ for each micro-batch of at most token_budget tokens:
                                               pack ─▶ model ─▶ logprobs ─▶ algorithm.loss ─▶ backward
                       then once:              clip ─▶ AdamW ─▶ learning rate of the next step

The packed computation is in stages/engines/torch/packing.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn
from transformers import PreTrainedModel

from stages import device as devices
from stages.adapters.export import ADAPTER, save_adapter, write_merged
from stages.adapters.options import AdapterOptions
from stages.adapters.training import adapters_off, add_adapters
from stages.algorithms.batch import TrainBatch, jagged_rows, over_steps
from stages.algorithms.named import AlgorithmLike, split_gap
from stages.engines.plans import GroupShape, Piece, plan_micro_batches
from stages.engines.torch.attention_interface import PROBE, check_logits, fix_rope, replace_attention
from stages.engines.torch.experts.routing import RoutingReplay
from stages.engines.torch.head import logit_scale, values_of
from stages.engines.torch.head import value_head as value_head_of
from stages.engines.torch.layers import use_fast_layers, use_fast_norms, use_fused_layers
from stages.engines.torch.optimizer import (
    Schedule,
    adamw,
    add_value_head,
    bound_gradients,
    learning_rates_at,
    master_weights,
    moments_of,
    renew,
    set_rates,
    zero_gradients,
)
from stages.engines.torch.packing import ATTENTION, Feeding, PackedBatch, pack, shared_prompt_attention
from stages.engines.torch.parallel.experts import ExpertLoad
from stages.engines.torch.parallel.passes import Outputs, Passes
from stages.engines.torch.token_logprobs import TokenLogprobs, scaled_logits
from stages.flow.declarations import BASE, IN_TRAINING
from stages.resharding.swap import local_part, local_weights, training_state

Result = TypeVar("Result")
Kernels = Literal["auto", "plain"]


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


def _repeatable(compute: Callable[..., Result]) -> Callable[..., Result]:
    """Of an engine's methods: with its number of threads, which decides the order of sums, and deterministic algorithms."""

    @wraps(compute)
    def wrapped(self: TorchTrainEngine, *arguments: Any) -> Result:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with devices.deterministic(self.device):
            return compute(self, *arguments)

    return wrapped


class TorchTrainEngine:
    """Trains a Hugging Face decoder-only ``model``. The engine moves it to ``device`` (default: the accelerator if there is
    one, else the CPU) and replaces its attention, norms, linear layers and dropout.

    ``token_budget``: tokens fed to the model at once, which bounds the memory of activations; None: the whole batch is one
    micro-batch. ``grad_clip``: bound of the gradient's 2-norm, or None. ``weight_decay`` applies to matrices only.
    ``temperature``: sampling temperature of the rollouts. ``threads``: torch's number of CPU threads, set at each call. On
    one device a step is deterministic bit for bit, given the batch and the number of threads, whatever the order of the
    batch's rows. The engine draws no random numbers.

    ``kernels``: "plain" leaves norms and linear layers as the model has them, without faster functions of the device.
    ``compute``: dtype of the arithmetic and of :meth:`weights` (default: the model's). A lower one than the model's is mixed
    precision: ``model`` becomes a copy in it, renewed after each step; the weights that it had are the master weights, in
    whose dtype gradients are added up and clipped and AdamW works. Checkpoints hold the master weights.

    ``value_head``: train a linear layer too, whose output is ``TokenBatch.values``; checkpoints hold it, exports do not.
    ``context``: tokens of the longest sequence, by which a model with longrope takes its long factors for all sequences.

    ``adapters``: freeze the model, and train low-rank matrices beside its linear layers. They alone are in :meth:`weights`
    and :meth:`state_dict`; an export is the merged model, and beside its folder ``adapter``, for peft. Where an algorithm
    has scores by the "base", they are logprobs of the model without adapters.

    Raises ValueError for a model with logits that the packed computation does not reproduce; it is compared with the model's
    plain forward once.
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
        kernels: Kernels = "auto",
        compute: torch.dtype | None = None,
        value_head: bool = False,
        adapters: AdapterOptions | None = None,
        context: int | None = None,
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
        self._schedule: dict[str, Any] = {"peak": learning_rate, "total_steps": total_steps}
        self._schedule |= {"warmup_steps": warmup_steps, "schedule": schedule}
        self._grad_clip, self._token_budget, self._threads = grad_clip, token_budget, threads
        self._feeding = Feeding(fix_rope(model, context), fused=kernels == "auto")
        self._routing = RoutingReplay(model, self._feeding)
        self._divisor, self._softcap = logit_scale(model.config)
        self._temperature = temperature or 1.0  # greedy rollouts record logprobs at temperature 1
        _prepare(model, activation_checkpointing)
        self._kernels = kernels
        if self.device.type == "cpu" and kernels == "auto":
            use_fast_norms(model)
        self._dtype = model.dtype  # of the arithmetic
        self.expert_load = ExpertLoad(model, self.device)
        self._adapters = adapters
        self._adapter_config = add_adapters(model, adapters) if adapters else {}
        self._plain_forward = model.forward
        self._copies: dict[str, nn.Parameter] = {}  # of master weights, by name; the model's own parameters
        self._passes = Passes(self)
        self._value_head = value_head_of(model, self.device) if value_head else {}
        placed = self._place(compute or model.dtype)
        self._trained = {**placed, **self._value_head}
        self._optimizer = adamw(list(placed.values()), learning_rate, betas, weight_decay)
        add_value_head(self._optimizer, list(self._value_head.values()), weight_decay)
        self._critic_alone = False  # whether the present train batch teaches the value head alone

    def shards(self) -> dict[str, torch.Tensor]:
        """The weights that are trained, as this process holds them, by name, tied ones once: the master weights where there
        are any."""
        return local_weights(self.model) | {name: self._trained[name].detach() for name in self._copies}

    def held(self) -> Iterator[torch.Tensor]:
        """What this process holds beside :meth:`shards`: gradients, optimizer state, and the copies of master weights."""
        yield from training_state(self._optimizer)
        yield from (copy.detach() for copy in self._copies.values())

    # What an engine of several ranks does otherwise (``torch_sharded``): where the parameters lie, and all that depends
    # on the other ranks' share of the batch.

    def _place(self, compute: torch.dtype) -> dict[str, nn.Parameter]:
        """Move the model to its device, to compute in ``compute``. Returns the parameters for the optimizer, by name."""
        nn.Module.to(self.model, self.device)
        take_over(self)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if all(parameter.dtype == compute for parameter in trained.values()):
            return trained
        self._dtype, self._copies = compute, trained
        return master_weights(self.model, trained, compute)

    def _run(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``compute`` while the model's own parameters, which belong to no layer, are whole."""
        return compute(*arguments)

    def _agree(self, tokens: int, rows: int, groups: int, passes: int) -> tuple[int, int, int, int]:
        """Tokens, rows and groups of the whole mini-batch, and the passes through the model that each rank makes."""
        return tokens, rows, groups, passes

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` added up over all ranks."""
        return values

    def _total_of_tokens(self, counts: torch.Tensor) -> torch.Tensor:
        """``counts`` of the tokens that each rank was fed, added up over all ranks."""
        return counts

    def _add_up(self, metrics: dict[str, float]) -> dict[str, float]:
        """Combine the metrics of all ranks: the largest of those called ``max_…``, the sum of the others."""
        return metrics

    def _clip(self) -> float:
        """Bound the gradient's norm. Returns the norm before."""
        return bound_gradients(self._trained.values(), self._grad_clip)

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _saved(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """``value``, of the same shape as the optimizer's parameter ``name``, in the form that a checkpoint stores."""
        return value

    @_repeatable
    def train_batch(self, batch: TensorDictBase, algorithm: AlgorithmLike) -> Mapping[str, float]:
        """The algorithm's epochs and mini-batches; see :class:`stages.engines.protocols.TrainEngine`. ``fed_tokens`` in the
        result counts the tokens that went through the model. Raises ``FloatingPointError``, and takes no further step, when
        a loss or a gradient is not finite."""
        groups, responses = _groups(batch)
        experts = self._routing.rows(batch)
        wanted = {name: by for name, by in algorithm.scores.items() if by in IN_TRAINING}
        found = _scores_by(self, batch, set(wanted.values()))
        given = TrainBatch(batch, algorithm, self._total, {name: found[by] for name, by in wanted.items()})
        whole = algorithm.unit == "group"
        groups = groups if whole else _with_trained(groups, given.trained.tolist(), algorithm.mini_batches)
        parts = [
            (part, plan_micro_batches([group.shape for group in part], self._token_budget, whole=whole))
            for part in _mini_batches(groups, algorithm.mini_batches, whole)
        ]
        version = self.step // (algorithm.epochs * len(parts))
        self._critic_alone = version < algorithm.policy_begins
        peaks = self._schedule["peak"], algorithm.value_rate(self._schedule["peak"])
        of_policy, of_values = learning_rates_at(version, self._schedule, peaks, algorithm.policy_begins)
        rates = set_rates(self._optimizer, of_policy * algorithm.signal(given), of_values)
        steps = []
        for part, plan in parts * algorithm.epochs:
            metrics = self._optimize(part, plan, responses, experts, given, algorithm)
            steps.append({**metrics, **rates})
        return over_steps(steps)

    def _optimize(
        self,
        groups: Sequence[_Group],
        plan: Sequence[Sequence[Piece]],
        responses: Sequence[torch.Tensor],
        experts: Sequence[torch.Tensor],
        given: TrainBatch,
        algorithm: AlgorithmLike,
    ) -> dict[str, float]:
        """One optimizer step on ``groups`` in the micro-batches ``plan``."""
        rows = [number for group in groups for number in group.numbers]
        trained = given.trained[rows]
        total_tokens, total_rows, total_groups, passes = self._agree(
            int(trained.sum()), int((trained > 0).sum()), len(groups), len(plan)
        )
        if not total_tokens:
            raise ValueError("loss_mask: leaves no token of a mini-batch to train on; drop such groups before training")
        fed = sum(groups[piece.group].shape.tokens(piece.rows) for pieces in plan for piece in pieces)
        sums: dict[str, torch.Tensor] = {"loss": torch.zeros((), device=self.device)}

        def loss_of(number: int, logprobs: torch.Tensor, entropy: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if number >= len(plan):
                return logprobs.sum() * 0
            pieces = plan[number]
            tokens = given.tokens(
                [groups[piece.group].numbers[row] for piece in pieces for row in piece.rows],
                [at for at, piece in enumerate(pieces) for _ in piece.rows],
                logprobs,
                entropy,
                values if self._value_head else None,
                total_tokens=total_tokens,
                total_rows=total_rows,
                total_groups=total_groups,
            )
            if not len(tokens.row):  # all are left out: nothing to learn, but other ranks compute with this one
                return tokens.logprobs.sum()
            output = algorithm.loss(tokens)
            measured = {"loss": output.loss.detach(), **output.metrics, **tokens.behaviour_gap()}
            measured["entropy"] = tokens.entropy.sum() / total_tokens  # type: ignore[union-attr]
            _add(sums, measured)
            return output.loss

        try:
            self.expert_load.counts.zero_()
            of = groups, responses, experts
            self._passes.learn([partial(_packed, pieces, self.device, *of) for pieces in plan], passes, loss_of)
            own = {"fed_tokens": float(fed), **self.expert_load.metrics(self._total_of_tokens)}
            added = self._add_up({name: value.item() for name, value in sums.items()} | own)
            loss, engine_metrics = added.pop("loss"), {name: added.pop(name) for name in own}
            gap, metrics = split_gap(added)
            gap |= self._routing.metrics(self._total_of_tokens)
            if self._critic_alone:
                zero_gradients({*self._trained.values(), *self.model.parameters()} - {*self._value_head.values()})
            grad_norm = self._clip()
            if not (math.isfinite(grad_norm) and math.isfinite(loss)):
                raise FloatingPointError(
                    f"gradient norm is {grad_norm} at step {self.step} (loss {loss}): no step was taken; lower "
                    "learning_rate or look for logprobs that are not finite in the batch"
                )
            self._optimizer.step()
            renew(self._copies, self._trained)
            self.step += 1
        finally:
            self._forget_gradients()
        return {"loss": loss, "grad_norm": grad_norm, **engine_metrics, **gap, **algorithm.finish(metrics)}

    @torch.no_grad()
    @_repeatable
    def logprobs(self, batch: TensorDictBase) -> torch.Tensor:
        """Logprobs of the response tokens, float32 jagged [B, T_i] on the CPU. Each group is computed alone, so its bits do
        not depend on the other groups."""
        return torch.nested.nested_tensor(_scores(self, batch)[0], layout=torch.jagged)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.detach()

    def state_dict(self) -> dict[str, Any]:
        """The live tensors (not copies) of the model and of AdamW's moments, by parameter name, tied ones once, and the
        number of steps. Names and shapes do not depend on the layout, nor on whether ``model`` is the master weights."""
        own = [*self._copies, *self._value_head]
        model = self.model.state_dict() | {name: self._trained[name].detach() for name in own}
        once = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        moments = {
            moment: {
                name: self._saved(name, moments_of(self._optimizer, p)[moment]) for name, p in self._trained.items()
            }
            for moment in ("exp_avg", "exp_avg_sq")
        }
        left = model.keys() - self._trained.keys() if self._adapters else tied
        return {"model": {n: value for n, value in model.items() if n not in left}, **moments, "step": self.step}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when ``state`` belongs to another model. Its tensors may be this engine's own."""
        mine = self.state_dict()
        _check_names(mine, state)
        for part in ("model", "exp_avg", "exp_avg_sq"):
            for name, value in mine[part].items():
                local_part(value).copy_(local_part(state[part][name]))
        renew(self._copies, self._trained)
        self.step = state["step"]
        for parameter in self._trained.values():
            moments_of(self._optimizer, parameter)["step"].fill_(self.step)

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        _export(self, path, state)

    def close(self) -> None:
        """Release the optimizer's memory. May be called again."""
        self._optimizer.state.clear()
        self._forget_gradients()

    def _compute(self, packed: PackedBatch) -> Outputs:
        return self._run(self._outputs, packed)

    def _outputs(self, packed: PackedBatch) -> Outputs:
        """float32 [T], [T], [T]: the logprobs of ``packed.targets``; the entropies of the distributions that they are of,
        empty where nothing is trained; and the values of the states before the targets, empty without a value head."""
        hidden = self._hidden(packed)
        head = self.model.get_output_embeddings()
        given = hidden, head.weight, head.bias, packed.source, packed.targets, self._temperature * self._divisor
        logprobs, entropy = TokenLogprobs.apply(*given, torch.is_grad_enabled(), self._softcap)
        return logprobs, entropy, values_of(hidden, self._value_head, packed.source)

    def _hidden(self, packed: PackedBatch) -> torch.Tensor:
        """[U, d]: last hidden states at the places that predict a response token."""
        return self._decode(packed)[0].index_select(0, packed.places)

    def _decode(self, packed: PackedBatch) -> torch.Tensor:
        """[1, S, d]: last hidden states."""
        decoder: Any = self.model.base_model
        self._feeding.feed(packed)
        out = decoder(input_ids=packed.ids, position_ids=packed.positions, use_cache=False)
        return out.last_hidden_state  # type: ignore[no-any-return]


@torch.no_grad()
def _scores(engine: TorchTrainEngine, batch: TensorDictBase) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logprobs and values of the response tokens of each row, on the CPU; values are empty without a value head."""
    groups, responses = _groups(batch)
    experts = engine._routing.rows(batch)
    rows = [torch.empty(0)] * len(responses)
    of_values = [torch.empty(0)] * len(responses)
    alone = [plan_micro_batches([group.shape], engine._token_budget) for group in groups]
    plan = [Piece(number, piece.rows) for number, parts in enumerate(alone) for (piece,) in parts]
    *_, passes = engine._agree(0, 0, 0, len(plan))
    packings = [partial(_packed, [piece], engine.device, groups, responses, experts) for piece in plan]
    for piece, (logprobs, _, values) in zip(plan, engine._passes.score(packings, passes), strict=False):
        numbers = [groups[piece.group].numbers[row] for row in piece.rows]
        lengths = [len(responses[n]) for n in numbers]
        for found, kept in ((logprobs, rows), (values, of_values)):
            for n, part in zip(numbers, found.cpu().split(lengths) if len(found) else (), strict=False):
                kept[n] = part
    return rows, of_values


def _scores_by(engine: TorchTrainEngine, batch: TensorDictBase, wanted: set[str]) -> dict[str, list[torch.Tensor]]:
    """What each of ``wanted``, which are of ``IN_TRAINING``, computes of the response tokens of each row."""
    found: dict[str, list[torch.Tensor]] = {}
    if wanted - {BASE}:
        found = dict(zip(IN_TRAINING, _scores(engine, batch), strict=False))
    if BASE in wanted:
        if engine._adapters is None:
            raise ValueError("scores: 'base' is the model without its adapters, and it has none")
        with adapters_off(engine.model):
            found[BASE] = _scores(engine, batch)[0]
    return found


def _export(engine: TorchTrainEngine, path: Path, state: Mapping[str, Any] | None) -> None:
    # The config of a checkpoint that came from a quantised file says so, which would be untrue of what is written.
    engine.model.config.__dict__.pop("quantization_config", None)
    learned = dict(engine.model.named_parameters())  # buffers keep their dtype: experts are chosen in float32
    known = state["model"] if state else engine.state_dict()["model"] if engine._adapters else {}
    saved = {name: v for name, v in known.items() if name not in engine._value_head}
    weights = {n: v.to(engine._dtype) if n in learned else v for n, v in saved.items()}
    if engine._adapters is None:
        engine.model.save_pretrained(path, state_dict=weights or None)
    else:
        save_adapter(path.with_name(ADAPTER), engine._adapter_config, weights)
        write_merged(path, engine.model, weights, engine._adapters.scale)


def _packed(
    pieces: Sequence[Piece],
    device: torch.device,
    groups: Sequence[_Group],
    responses: Sequence[torch.Tensor],
    experts: Sequence[torch.Tensor],
) -> PackedBatch:
    """The pieces' response tokens, piece by piece, row by row. ``responses``, ``experts``: of each row; the latter may be
    empty."""
    numbers = [[groups[piece.group].numbers[row] for row in piece.rows] for piece in pieces]
    rows, chosen = ([[of[number] for number in some] for some in numbers if len(of)] for of in (responses, experts))
    return pack([groups[piece.group].prompt for piece in pieces], rows, device, chosen)


def _add(sums: dict[str, torch.Tensor], measured: Mapping[str, torch.Tensor]) -> None:
    """Add a micro-batch's metrics to ``sums``; of those called ``max_…`` keep the largest."""
    for name, value in measured.items():
        together = torch.maximum if name.startswith("max_") else torch.add
        sums[name] = together(sums[name], value) if name in sums else value


def _check_names(mine: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for part in ("model", "exp_avg", "exp_avg_sq"):
        if other := mine[part].keys() ^ state[part].keys():
            raise ValueError(f"state: {part} differs from the model's in {sorted(other)[:4]}; was it saved of another?")


@torch.no_grad()
def take_over(engine: TorchTrainEngine) -> None:
    """Replace the attention of ``engine``'s model, and compare logits of two responses with the plain forward's."""
    probe = torch.arange(PROBE) * 7919 % engine.model.config.get_text_config().vocab_size
    with devices.trimmed_by_layer(engine.model):
        ids = probe[None].to(engine.device)
        plain = engine._passes.probe(
            PROBE,
            lambda: engine.model.base_model(input_ids=ids, use_cache=False).last_hidden_state,
            lambda: engine._plain_forward(input_ids=ids, use_cache=False).logits,
        )
    replace_attention(engine.model, ATTENTION, shared_prompt_attention, engine._feeding)
    if engine._kernels == "auto":
        use_fast_layers(engine.model, engine.device)
        use_fused_layers(engine.model, devices.fused_layers(engine.device))
    packed = pack([probe[:8]], [[probe[8:], probe[8:15]]], engine.device)

    def logits() -> torch.Tensor:
        hidden, head = engine._hidden(packed)[packed.source], engine.model.get_output_embeddings()
        return scaled_logits(hidden, head.weight, head.bias, engine._divisor, engine._softcap)

    def of_packed() -> Any:
        return engine._passes.probe(packed.ids.shape[1], lambda: engine._decode(packed), logits)

    wrong = ""
    with devices.trimmed_by_layer(engine.model):
        if plain is None:
            of_packed()
        else:
            expected = torch.cat([plain[0, 7:-1], plain[0, 7:14]]).float()
            try:
                check_logits(engine.model, "a packed batch", of_packed, expected, engine._dtype)
            except ValueError as error:
                wrong = str(error)
    if wrong := engine._passes.told(wrong):
        raise ValueError(wrong)


def _prepare(model: PreTrainedModel, activation_checkpointing: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train(activation_checkpointing)  # transformers checkpoints only in training mode
    if activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


def _groups(batch: TensorDictBase) -> tuple[list[_Group], list[torch.Tensor]]:
    """Returns the groups of ``batch`` in the order of their numbers, rows by place, and all responses by row number."""
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


def _with_trained(groups: Sequence[_Group], trained: Sequence[int], least: int) -> list[_Group]:
    """``groups`` without the rows that have no token to train on, which need no computation; all of them where fewer than
    ``least`` rows would be left."""
    parts = [(group, [at for at, row in enumerate(group.numbers) if trained[row]]) for group in groups]
    enough = sum(len(places) for _, places in parts) >= least
    return [group.part(places) for group, places in parts if places] if enough else list(groups)


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
