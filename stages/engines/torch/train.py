"""The torch training engine: whole groups, packed without padding, each group's prompt computed once.

    batch of groups ─▶ plan_micro_batches ─▶ for each micro-batch of at most token_budget tokens:
                                               pack ─▶ model ─▶ logprobs ─▶ algorithm.loss ─▶ backward
                       then once:              clip ─▶ AdamW
    epochs × mini-batches of it: all of them, or after a loss or gradient that is not finite none ─▶ the next version

The packed computation is in stages/engines/torch/packing.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
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
from stages.algorithms.batch import TrainBatch, over_steps
from stages.algorithms.named import AlgorithmLike, split_gap
from stages.engines.plans import Piece, cut_mini_batches, plan_micro_batches
from stages.engines.torch.attention_interface import PROBE, check_logits, fix_rope, replace_attention
from stages.engines.torch.experts.routing import RoutingReplay
from stages.engines.torch.head import logit_scale, values_of
from stages.engines.torch.head import value_head as value_head_of
from stages.engines.torch.layers import use_fast_layers, use_fast_norms, use_fused_layers
from stages.engines.torch.optimizer import (
    Schedule,
    Undo,
    adamw,
    add_value_head,
    all_finite,
    bound_gradients,
    changed_by_step,
    learning_rates_at,
    master_weights,
    moments_of,
    renew,
    set_rates,
    zero_gradients,
)
from stages.engines.torch.packing import (
    ATTENTION,
    Feeding,
    Group,
    PackedBatch,
    groups_of,
    pack,
    pack_pieces,
    shared_prompt_attention,
)
from stages.engines.torch.parallel.experts import ExpertLoad
from stages.engines.torch.parallel.passes import Outputs, Passes
from stages.engines.torch.token_logprobs import TokenLogprobs, scaled_logits
from stages.flow.declarations import BASE, IN_TRAINING
from stages.resharding.swap import local_part, local_weights, training_state

Result = TypeVar("Result")
Kernels = Literal["auto", "plain"]


@dataclass(frozen=True, eq=False)
class _MiniBatch:
    """One optimizer step: this rank's ``groups`` in the micro-batches ``plan``, and what its loss is divided by: the sizes
    of the whole mini-batch on all ranks. ``passes``: through the model that each rank makes. ``everywhere``: every replica
    has a row of it."""

    groups: Sequence[Group]
    plan: Sequence[Sequence[Piece]]
    passes: int
    everywhere: bool
    total_tokens: int
    total_rows: int
    total_groups: int


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
    micro-batch. ``grad_clip``: bound of the gradient's 2-norm, or None. ``weight_decay`` applies to matrices only,
    and to no bias of stacked experts. ``temperature``: of the logprobs, that at which the responses were sampled.
    ``threads``: torch's number of CPU threads, set at each call. On one device a step is deterministic bit for bit, given
    the batch and the number of threads, whatever the order of the batch's rows. The engine draws no random numbers.

    ``kernels``: "plain" leaves norms and linear layers as the model has them, without faster functions of the device.
    ``compute``: dtype of the arithmetic and of :meth:`weights` (default: the model's). A lower one than the model's is mixed
    precision: ``model`` becomes a copy in it, renewed after each step; the weights that it had are the master weights, in
    whose dtype gradients are added up and clipped and AdamW works. Checkpoints hold the master weights.

    ``undoable``: keep what :meth:`undo` takes for batches of one optimizer step too.

    ``value_head``: train a linear layer too, whose output is ``TokenBatch.values``; checkpoints hold it, exports do not.
    ``context``: tokens of the longest sequence, by which a model with longrope takes its long factors for all sequences.
    ``vocabulary``: only so many of the first tokens have a probability; None: all that the model's head has.

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
        undoable: bool = False,
        value_head: bool = False,
        adapters: AdapterOptions | None = None,
        context: int | None = None,
        vocabulary: int | None = None,
        threads: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule: {schedule!r} is not known; use 'constant', 'linear' or 'cosine'")
        if token_budget is not None and token_budget < 1:
            raise ValueError(f"token_budget: {token_budget} must be at least 1, or None for no limit")
        self.device = torch.device(device) if device is not None else devices.select()
        self.model = model
        self.step = 0  # optimizer steps that the weights have
        self.version = 0  # train batches, also those that were skipped
        self._schedule: dict[str, Any] = {"peak": learning_rate, "total_steps": total_steps}
        self._schedule |= {"warmup_steps": warmup_steps, "schedule": schedule}
        self._grad_clip, self._token_budget, self._threads = grad_clip, token_budget, threads
        self._feeding = Feeding(fix_rope(model, context), fused=kernels == "auto")
        self._routing = RoutingReplay(model, self._feeding)
        self._divisor, self._softcap = logit_scale(model.config)
        self._vocabulary = vocabulary
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
        self._optimizer = adamw(placed, learning_rate, betas, weight_decay)
        add_value_head(self._optimizer, self._value_head, weight_decay)
        self._critic_alone = False  # whether the present train batch teaches the value head alone
        self._undoable, self._undo, self._step_before = undoable, Undo(self.device), 0

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

    def all_gather_counts(self, passes: Sequence[int]) -> list[tuple[int, int]]:
        """The fewest and the most that a replica has of each of ``passes``."""
        return [(count, count) for count in passes]

    def _of_all_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [n, k] of all replicas, one after the other."""
        return rows

    def _everywhere(self, holds: bool) -> bool:
        """Whether ``holds`` is true on all ranks."""
        return holds

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` added up over all ranks."""
        return values

    def _total_of_tokens(self, counts: torch.Tensor) -> torch.Tensor:
        """``counts`` of the tokens that each rank was fed, added up over all ranks."""
        return counts

    def reduce_metrics(self, metrics: dict[str, float], everywhere: bool) -> dict[str, float]:
        """Combine the metrics of all ranks: the largest of those called ``max_…``, the sum of the others. ``everywhere``:
        all replicas have measured the same."""
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
        result counts the tokens that went through the model."""
        self._undo.forget()
        self._step_before = self.step
        try:
            metrics = self._train_batch(batch, algorithm)
        except BaseException as error:
            self._take_back()
            self.version += isinstance(error, FloatingPointError)  # skipped: the learning rate follows the versions
            raise
        self.version += 1
        return metrics

    def undo(self) -> None:
        """See :class:`stages.engines.protocols.TrainEngine`."""
        if self.step != self._step_before and not self._undo.is_kept:
            raise RuntimeError("undo: nothing was kept of the last train batch; make the engine with undoable = True")
        self._take_back()

    def _take_back(self) -> None:
        """Undo the optimizer steps since the train batch began."""
        if self._undo.is_kept:
            self._undo.put_back()
            renew(self._copies, self._trained)
            self.step = self._step_before

    def _train_batch(self, batch: TensorDictBase, algorithm: AlgorithmLike) -> Mapping[str, float]:
        groups, responses = groups_of(batch)
        experts = self._routing.rows(batch)
        wanted = {name: by for name, by in algorithm.scores.items() if by in IN_TRAINING}
        found = _scores_by(self, batch, set(wanted.values()))
        given = TrainBatch(batch, algorithm, self._total, {name: found[by] for name, by in wanted.items()})
        mini_batches = _mini_batches(self, groups, given.trained.tolist(), algorithm)
        if not mini_batches:
            raise FloatingPointError(
                f"loss is not defined at step {self.version}: loss_mask leaves no token of the batch to train on"
            )
        self._critic_alone = self.version < algorithm.policy_begins
        peaks = self._schedule["peak"], algorithm.value_rate(self._schedule["peak"])
        of_policy, of_values = learning_rates_at(self.version, self._schedule, peaks, algorithm.policy_begins)
        rates = set_rates(self._optimizer, of_policy * algorithm.signal(given), of_values)
        passes = mini_batches * algorithm.epochs
        # AdamW moves a weight by a few times the learning rate at most, so one step overflows only with a very large one.
        overflows = any(
            options["lr"] * max(1.0, options["weight_decay"]) > 1 for options in self._optimizer.param_groups
        )
        if self._undoable or overflows or len(passes) > 1:
            self._undo.keep([tensor for p in self._trained.values() for tensor in changed_by_step(self._optimizer, p)])
        steps = []
        for mini_batch in passes:
            metrics = _optimize(self, mini_batch, responses, experts, given, algorithm)
            steps.append({**metrics, **rates})
        if self._undo.is_kept and not self._everywhere(all_finite(self._trained.values())):
            raise FloatingPointError(
                f"weights are not finite after step {self.version}, so that no step was taken; lower learning_rate (it was "
                f"{rates['learning_rate']})"
            )
        return over_steps(steps)

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
        numbers of optimizer steps and of train batches. Names and shapes do not depend on the layout, nor on whether
        ``model`` is the master weights."""
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
        return {
            "model": {n: value for n, value in model.items() if n not in left},
            **moments,
            "step": self.step,
            "version": self.version,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when ``state`` belongs to another model. Its tensors may be this engine's own."""
        mine = self.state_dict()
        _check_names(mine, state)
        for part in ("model", "exp_avg", "exp_avg_sq"):
            for name, value in mine[part].items():
                local_part(value).copy_(local_part(state[part][name]))
        renew(self._copies, self._trained)
        self.step, self.version = state["step"], state["version"]
        self._undo.forget()
        for parameter in self._trained.values():
            moments_of(self._optimizer, parameter)["step"].fill_(self.step)

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        _export(self, path, state)

    def close(self) -> None:
        """Release the optimizer's memory. May be called again."""
        self._optimizer.state.clear()
        self._undo.close()
        self._forget_gradients()

    def _compute(self, packed: PackedBatch) -> Outputs:
        return self._run(self._outputs, packed)

    def _outputs(self, packed: PackedBatch) -> Outputs:
        """float32 [T], [T], [T]: the logprobs of ``packed.targets``; the entropies of the distributions that they are of,
        empty where nothing is trained; and the values of the states before the targets, empty without a value head."""
        hidden = self._hidden(packed)
        head = self.model.get_output_embeddings()
        given = hidden, head.weight, head.bias, packed.source, packed.targets, self._temperature * self._divisor
        logprobs, entropy = TokenLogprobs.apply(*given, torch.is_grad_enabled(), self._softcap, self._vocabulary)
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


def _optimize(
    engine: TorchTrainEngine,
    mini_batch: _MiniBatch,
    responses: Sequence[torch.Tensor],
    experts: Sequence[torch.Tensor],
    given: TrainBatch,
    algorithm: AlgorithmLike,
) -> dict[str, float]:
    """One optimizer step on ``mini_batch``. Raises ``FloatingPointError`` on all ranks, and takes no step, when a loss or a
    gradient of one is not finite."""
    groups, plan = mini_batch.groups, mini_batch.plan
    fed = sum(groups[piece.group].shape.tokens(piece.rows) for pieces in plan for piece in pieces)
    sums: dict[str, torch.Tensor] = {"loss": torch.zeros((), device=engine.device)}

    def loss_of(number: int, logprobs: torch.Tensor, entropy: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if number >= len(plan):
            return logprobs.sum() * 0
        pieces = plan[number]
        tokens = given.tokens(
            [groups[piece.group].rows[row] for piece in pieces for row in piece.rows],
            [at for at, piece in enumerate(pieces) for _ in piece.rows],
            logprobs,
            entropy,
            values if engine._value_head else None,
            total_tokens=mini_batch.total_tokens,
            total_rows=mini_batch.total_rows,
            total_groups=mini_batch.total_groups,
        )
        output = algorithm.loss(tokens)
        measured = {"loss": output.loss.detach(), **output.metrics, **tokens.behaviour_gap()}
        measured["entropy"] = tokens.entropy.sum() / mini_batch.total_tokens  # type: ignore[union-attr]
        _add(sums, measured)
        return output.loss

    try:
        engine.expert_load.counts.zero_()
        of = groups, responses, experts
        engine._passes.learn(
            [partial(pack_pieces, pieces, engine.device, *of) for pieces in plan], mini_batch.passes, loss_of
        )
        own = {"fed_tokens": float(fed), **engine.expert_load.metrics(engine._total_of_tokens)}
        measured = {name: value.item() for name, value in sums.items()}
        added = engine.reduce_metrics(measured | own, mini_batch.everywhere)
        loss, engine_metrics = added.pop("loss"), {name: added.pop(name) for name in own}
        gap, metrics = split_gap(added)
        gap |= engine._routing.metrics(engine._total_of_tokens)
        if engine._critic_alone:
            heads = {*engine._value_head.values()}
            zero_gradients({*engine._trained.values(), *engine.model.parameters()} - heads)
        grad_norm = engine._clip()
        if not engine._everywhere(math.isfinite(grad_norm) and math.isfinite(loss)):
            taken = engine.step - engine._step_before
            undone = f" and the {taken} before it in the batch are undone" if taken else ""
            raise FloatingPointError(
                f"gradient norm is {grad_norm} at step {engine.version} (loss {loss}): no step was taken{undone}; lower "
                "learning_rate or look for logprobs that are not finite in the batch"
            )
        reported = {"loss": loss, "grad_norm": grad_norm, **engine_metrics, **gap, **algorithm.finish(metrics)}
        engine._undo.wait()
        engine._optimizer.step()
        renew(engine._copies, engine._trained)
        engine.step += 1
    finally:
        engine._forget_gradients()
    return reported


@torch.no_grad()
def _scores(engine: TorchTrainEngine, batch: TensorDictBase) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logprobs and values of the response tokens of each row, on the CPU; values are empty without a value head."""
    groups, responses = groups_of(batch)
    experts = engine._routing.rows(batch)
    rows = [torch.empty(0)] * len(responses)
    of_values = [torch.empty(0)] * len(responses)
    alone = [plan_micro_batches([group.shape], engine._token_budget) for group in groups]
    plan = [Piece(number, piece.rows) for number, parts in enumerate(alone) for (piece,) in parts]
    [(_, passes)] = engine.all_gather_counts([len(plan)])
    packings = [partial(pack_pieces, [piece], engine.device, groups, responses, experts) for piece in plan]
    for piece, (logprobs, _, values) in zip(plan, engine._passes.score(packings, passes), strict=False):
        numbers = [groups[piece.group].rows[row] for row in piece.rows]
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
    if wrong := engine._passes.broadcast_from_last(wrong):
        raise ValueError(wrong)


def _prepare(model: PreTrainedModel, activation_checkpointing: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train(activation_checkpointing)  # transformers checkpoints only in training mode
    if activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


def _mini_batches(
    engine: TorchTrainEngine, groups: Sequence[Group], trained: Sequence[int], algorithm: AlgorithmLike
) -> list[_MiniBatch]:
    """Cut the batch of all ranks into mini-batches, of which this rank has ``groups``. ``trained``: tokens to train on of
    each of its rows."""
    whole = algorithm.unit == "group"
    own = [
        (group.number, place, trained[row])
        for group in groups
        for place, row in zip(group.places, group.rows, strict=True)
    ]
    tokens: dict[int, dict[int, int]] = {}
    for number, place, count in engine._of_all_ranks(torch.tensor(own)).tolist():
        tokens.setdefault(number, {})[place] = count
    cut = cut_mini_batches(tokens, algorithm.mini_batches, whole=whole)
    parts = [[group.part(rows.get(group.number, ())) for group in groups] for rows in cut]
    parts = [[group for group in part if group.rows] for part in parts]
    plans = [plan_micro_batches([group.shape for group in part], engine._token_budget, whole=whole) for part in parts]
    least = algorithm.least_group_size if whole else 1
    mini_batches = []
    passes = engine.all_gather_counts([len(plan) for plan in plans])
    for rows, part, plan, (fewest, most) in zip(cut, parts, plans, passes, strict=True):
        counts = [tokens[number][place] for number, places in rows.items() for place in places]
        trained_rows = sum(count > 0 for count in counts)
        compared_groups = sum(
            sum(tokens[number][place] > 0 for place in places) >= least for number, places in rows.items()
        )
        mini_batches.append(_MiniBatch(part, plan, most, fewest > 0, sum(counts), trained_rows, compared_groups))
    return mini_batches
