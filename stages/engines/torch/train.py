"""The torch training engine: whole groups, packed without padding, each prompt computed once.

    train_batch = prepare ─▶ for epochs × mini-batches: forward_backward ─▶ optimizer_step
                          ─▶ all steps, or after a loss or gradient that is not finite none
                          ─▶ the next version

Mini-batches, and the forward and backward pass of one: stages/engines/torch/step.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stages import device as devices
from stages.adapters.options import AdapterOptions
from stages.algorithms.batch import TrainBatch, over_steps
from stages.algorithms.named import AlgorithmLike
from stages.engines.protocols import CONTROL
from stages.engines.torch.model.packed_model import Kernels, Outputs, PackedModel
from stages.engines.torch.model.packing import MasksOf
from stages.engines.torch.optimizers.interface import (
    COUNT,
    Trained,
    hidden_matrices,
    make,
    saved_state,
    set_rates,
)
from stages.engines.torch.optimizers.rates import Schedule, learning_rates_at
from stages.engines.torch.optimizers.weights import Undo, all_finite, renew, zero_gradients
from stages.engines.torch.parallel.interface import Parallel
from stages.engines.torch.parallel.runner import LossOf, Packing
from stages.engines.torch.step import MiniBatch, TrainingStep
from stages.model.files import copy_part
from stages.resharding.tensors import local_part, local_weights, training_state

Result = TypeVar("Result")
COUNTS = {"step", "version", CONTROL}  # what a state has beside tables of tensors


def _repeatable(compute: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a method of an engine: it runs with the engine's number of threads, which decides the
    order of sums, and deterministic algorithms."""

    @wraps(compute)
    def wrapped(self: TorchTrainEngine, *arguments: Any) -> Result:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with devices.deterministic(self.device):
            return compute(self, *arguments)

    return wrapped


class TorchTrainEngine:
    """Trains a Hugging Face decoder-only ``model``.

    The engine moves it to ``device`` (default: the accelerator if there is one, else the CPU) and
    replaces its attention, norms, linear layers and dropout.

    ``token_budget``: tokens fed to the model at once, which bounds the memory of activations; None:
    the whole batch is one micro-batch. ``grad_clip``: bound of the gradient's 2-norm, or None.
    ``schedule_floor``: share of the peak that the schedule falls to.
    ``weight_decay`` applies to matrices only, and to no bias of stacked experts. ``temperature``:
    of the logprobs, that at which the responses were sampled. ``threads``: torch's number of CPU
    threads, set at each call. On one device a step is deterministic bit for bit, given the batch
    and the number of threads, whatever the order of the batch's rows. The engine draws no random
    numbers.

    ``kernels``: "plain" leaves norms and linear layers as the model has them, without faster
    functions of the device. ``compute``: dtype of the arithmetic and of :meth:`weights` (default:
    the model's). A lower one than the model's is mixed precision: ``model`` becomes a copy in it,
    renewed after each step; the weights that it had are the master weights, in whose dtype
    gradients are added up and clipped and the optimizer works. Checkpoints hold the master
    weights.

    ``optimizer``: a name of ``OPTIMIZERS`` (stages/engines/optimizers.py).

    ``undoable``: keep what :meth:`undo` takes for batches of one optimizer step too.

    ``value_head``: train a linear layer too, whose output is ``TokenBatch.values``; checkpoints
    hold it, exports do not. ``context``: tokens of the longest sequence, by which a model with
    longrope takes its long factors for all sequences. ``vocabulary``: only so many of the first
    tokens have a probability; None: all that the model's head has. ``masks_of``: of a response, the
    tokens that have one at each of its places, where it was sampled with a structure.

    ``router_loss``: coefficient of the loss that balances the load of experts, at the cost of one
    more forward pass. ``router_bias_rate``: by how much each step moves the biases of routers to
    the same end; they are in :meth:`weights` then. Both: stages/engines/torch/model/balance.py.

    ``adapters``: freeze the model, and train low-rank matrices beside its linear layers. They alone
    are in :meth:`weights` and :meth:`state_dict`; an export is the merged model, and beside its
    folder ``adapter``, for peft. Where an algorithm has scores by the "base", they are logprobs of
    the model without adapters.

    ``parallel``: how several ranks share the work, each with an engine of its own; None: one rank
    has it all. Micro-batches have ``token_budget`` tokens for each rank that shares them.

    Raises ValueError for a model with logits that the packed computation does not reproduce; it is
    compared with the model's plain forward once.
    """

    _pack_model: type[PackedModel] = PackedModel

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        total_steps: int,
        schedule: Schedule = "constant",
        schedule_floor: float = 0.0,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        optimizer: str = "adamw",
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
        router_loss: float = 0.0,
        router_bias_rate: float = 0.0,
        masks_of: MasksOf | None = None,
        threads: int | None = None,
        device: torch.device | str | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        if schedule not in ("constant", "linear", "cosine"):
            raise ValueError(
                f"schedule: {schedule!r} is not known; use 'constant', 'linear' or 'cosine'"
            )
        if token_budget is not None and token_budget < 1:
            raise ValueError(
                f"token_budget: {token_budget} must be at least 1, or None for no limit"
            )
        self.parallel = parallel or Parallel()
        chosen = torch.device(device) if device is not None else devices.select()
        self.device = self.parallel.start(chosen)
        self.model = model
        self.step = 0  # optimizer steps that the weights have
        self.version = 0  # train batches, also those that were skipped
        self._schedule: dict[str, Any] = {"peak": learning_rate, "total_steps": total_steps}
        self._schedule |= {"warmup_steps": warmup_steps, "schedule": schedule}
        self._schedule["floor"] = schedule_floor
        self._grad_clip = grad_clip
        self._threads = threads
        self._critic_alone = False  # whether the present train batch teaches the value head alone
        self._undoable = undoable
        self._undo = Undo(self.device)
        self._step_before = 0
        self._control = dict[str, float]()  # of the algorithm, for the next train batch
        self._control_before = self._control
        self.packed_model = self._pack_model(
            model,
            self.device,
            temperature=temperature,
            activation_checkpointing=activation_checkpointing,
            kernels=kernels,
            has_values=value_head,
            adapters=adapters,
            context=context,
            vocabulary=vocabulary,
            masks_of=masks_of,
            router_loss=router_loss,
            router_bias_rate=router_bias_rate,
        )
        budget = token_budget and token_budget * self.parallel.token_ranks
        self._training = TrainingStep(self.packed_model, self.parallel, budget)
        hidden = hidden_matrices(model)
        placed = self.parallel.place(self.packed_model, compute or model.dtype)
        self.checkpoint_group = self.parallel.checkpoint_group
        self.value_head = self.packed_model.value_head
        self.trained = {**placed, **self.value_head}
        trained = Trained(placed, self.value_head, hidden, self.parallel.saved)
        self._optimizer = make(optimizer, trained, learning_rate, betas, weight_decay)

    def shards(self) -> dict[str, torch.Tensor]:
        """Return the weights that are trained, as this process holds them, by name, tied ones once:
        the master weights where there are any."""
        masters = {name: self.trained[name].detach() for name in self.parallel.copies}
        return local_weights(self.model) | masters

    def held(self) -> Iterator[torch.Tensor]:
        """Return the tensors that this process holds beside :meth:`shards`: gradients, optimizer
        state, and the copies of master weights."""
        yield from training_state(self._optimizer)
        yield from (copy.detach() for copy in self.parallel.copies.values())

    @_repeatable
    def train_batch(self, batch: TensorDictBase, algorithm: AlgorithmLike) -> Mapping[str, float]:
        """Run the algorithm's epochs and mini-batches; see
        :class:`stages.engines.protocols.TrainEngine`. ``fed_tokens`` in the result counts the
        tokens that went through the model."""
        self._undo.forget()
        self._step_before = self.step
        begins = algorithm.control_begins
        self._control = {name: self._control.get(name, begins[name]) for name in begins}
        self._control_before = self._control
        try:
            metrics = self._train_batch(batch, algorithm)
        except BaseException as error:
            self.forget_gradients()
            self._take_back()
            # skipped: the learning rate follows the versions
            self.version += isinstance(error, FloatingPointError)
            raise
        self.version += 1
        return metrics

    def undo(self) -> None:
        """See :class:`stages.engines.protocols.TrainEngine`."""
        if self.step != self._step_before and not self._undo.is_kept:
            raise RuntimeError(
                "undo: nothing was kept of the last train batch; make the engine "
                "with undoable = True"
            )
        self._take_back()

    def _take_back(self) -> None:
        """Undo the optimizer steps since the train batch began."""
        if self._undo.is_kept:
            self._undo.put_back()
            renew(self.parallel.copies, self.trained)
            self.step = self._step_before
        self._control = self._control_before
        self.parallel.reshard()  # what a forward has gathered is of the weights that are gone

    def _train_batch(self, batch: TensorDictBase, algorithm: AlgorithmLike) -> Mapping[str, float]:
        train_batch, mini_batches = self.prepare(batch, algorithm)
        if not mini_batches:
            raise FloatingPointError(
                f"loss is not defined at step {self.version}: loss_mask leaves no token of the "
                f"batch to train on"
            )
        self._critic_alone = self.version < algorithm.policy_begins
        peaks = self._schedule["peak"], algorithm.value_rate(self._schedule["peak"])
        of_policy, of_values = learning_rates_at(
            self.version, self._schedule, peaks, algorithm.policy_begins
        )
        rates = set_rates(self._optimizer, of_policy * algorithm.signal(train_batch), of_values)
        mini_batches *= algorithm.epochs
        # A step moves a weight by a few times the learning rate at most (Muon: times a root of the
        # matrix's size), so one step overflows only with a very large one.
        overflows = any(
            options["lr"] * max(1.0, options["weight_decay"]) > 1
            for options in self._optimizer.param_groups
        )
        if self._undoable or overflows or len(mini_batches) > 1:
            changed = [*map(self.changed_by_step, self.trained.values())]
            changed.append([*self.packed_model.router_biases.values()])
            self._undo.keep([*chain.from_iterable(changed)])
        steps = []
        for mini_batch in mini_batches:
            metrics = self.forward_backward(mini_batch, algorithm)
            grad_norm = self.optimizer_step(metrics["loss"])
            steps.append({**metrics, "grad_norm": grad_norm, **rates})
        if self._undo.is_kept and not self.parallel.all_true(all_finite(self.trained.values())):
            raise FloatingPointError(
                f"weights are not finite after step {self.version}, so that no step was taken; "
                f"lower learning_rate (it was "
                f"{rates['learning_rate']})"
            )
        metrics = over_steps(steps) | self._control
        if not self._critic_alone:
            self._control = dict(algorithm.control(self._control, metrics))
        return metrics

    def prepare(
        self, batch: TensorDictBase, algorithm: AlgorithmLike
    ) -> tuple[TrainBatch, list[MiniBatch]]:
        """See :meth:`stages.engines.torch.step.TrainingStep.prepare`."""
        return self._training.prepare(batch, algorithm, self._control, self.version)

    @_repeatable
    def forward_backward(self, mini_batch: MiniBatch, algorithm: AlgorithmLike) -> dict[str, float]:
        """See :meth:`stages.engines.torch.step.TrainingStep.forward_backward`."""
        return self._training.forward_backward(mini_batch, algorithm)

    @_repeatable
    def learn(self, batches: Sequence[Packing], passes: int, loss_of: LossOf) -> None:
        """Add the gradients of the losses of micro-batches to those that there are; see
        :meth:`stages.engines.torch.parallel.runner.MicroBatchRunner.learn`."""
        self.parallel.runner.learn(batches, passes, loss_of)

    @torch.no_grad()
    @_repeatable
    def score(self, batches: Sequence[Packing], passes: int) -> list[Outputs]:
        """Return the outputs of micro-batches, without a gradient; of all ``passes``."""
        try:
            return self.parallel.runner.score(batches, passes)
        finally:
            self.parallel.reshard()  # after a forward alone the model's own parameters stay whole

    def set_adam(self, *, grad_clip: float | None, **options: Any) -> None:
        """Set what the next optimizer steps clip gradients to, and ``options`` of
        :meth:`stages.engines.torch.optimizers.adamw.AdamW.set_adam`."""
        self._grad_clip = grad_clip
        self._optimizer.set_adam(**options)  # type: ignore[attr-defined]

    def changed_by_step(self, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        """Return all that an optimizer step changes of ``parameter``."""
        return [parameter.detach(), *self._optimizer.state_of(parameter).values()]

    @_repeatable
    def optimizer_step(self, loss: float = 0.0) -> float:
        """Clip the gradients of the forward and backward passes since the last call, make the
        optimizer's step with them, and forget them. Return their norm before.

        Raises FloatingPointError on all ranks, and takes no step, where the norm or the ``loss`` of
        one is not finite."""
        try:
            if self._critic_alone:
                policy = {*self.trained.values(), *self.model.parameters()}
                zero_gradients(policy - {*self.value_head.values()})
            grad_norm = self.parallel.clip(self.trained, self._grad_clip)
            if not self.parallel.all_true(math.isfinite(grad_norm) and math.isfinite(loss)):
                taken = self.step - self._step_before
                undone = f" and the {taken} before it in the batch are undone" if taken else ""
                raise FloatingPointError(
                    f"gradient norm is {grad_norm} at step {self.version} (loss {loss}): no step "
                    f"was taken{undone}; lower learning_rate or look for logprobs that are not "
                    f"finite in "
                    "the batch"
                )
            self._undo.wait()
            self._optimizer.step()
            if self.packed_model.router_bias is not None:
                self.packed_model.router_bias.step(self.parallel.total_of_tokens)
            renew(self.parallel.copies, self.trained)
            self.step += 1
        finally:
            self.forget_gradients()
        return grad_norm

    @torch.no_grad()
    @_repeatable
    def logprobs(self, batch: TensorDictBase) -> torch.Tensor:
        """Return the logprobs of the response tokens, float32 jagged [B, T_i] on the CPU.

        Each group is computed alone, so its bits do not depend on the other groups.
        """
        try:
            return self._training.logprobs(batch).jagged()
        finally:
            self.parallel.reshard()  # after a forward alone the model's own parameters stay whole

    @torch.no_grad()
    @_repeatable
    def top_logprobs(self, batch: TensorDictBase, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`stages.engines.protocols.TeacherEngine`."""
        try:
            logprobs, tokens = self._training.top_logprobs(batch, k)
        finally:
            self.parallel.reshard()
        return logprobs.jagged(), tokens.jagged()

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return chain(self.parallel.weights(), self.packed_model.router_biases.items())

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors (not copies) of the model and of the optimizer's state, by part
        and parameter name, tied ones once, the numbers of optimizer steps and of train batches, and
        those of the algorithm's control. Names and shapes do not depend on the layout, nor on
        whether ``model`` is the master weights."""
        extra_names = [*self.parallel.copies, *self.value_head]
        model = self.model.state_dict() | {
            name: self.trained[name].detach() for name in extra_names
        }
        once = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        state: dict[str, dict[str, torch.Tensor]] = {}
        for part, name, value in saved_state(self._optimizer, self.trained):
            state.setdefault(part, {})[name] = self.parallel.saved(name, value)
        unsaved_names = model.keys() - self.trained.keys() if self.packed_model.adapters else tied
        control = {CONTROL: dict(self._control)} if self._control else {}
        return {
            "model": {n: value for n, value in model.items() if n not in unsaved_names},
            **state,
            "step": self.step,
            "version": self.version,
            **control,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy ``state``, whose tensors may be whole, or this engine's own, into the live tensors.

        Raises ValueError when it belongs to another model.
        """
        current = self.state_dict()
        _check_names(current, state)
        for part in current.keys() - COUNTS:
            for name, value in current[part].items():
                source = state[part][name]
                if isinstance(value, DTensor) and not isinstance(source, DTensor):
                    copy_part(value, source)
                else:
                    local_part(value).copy_(local_part(source))
        renew(self.parallel.copies, self.trained)
        self.step = state["step"]
        self.version = state["version"]
        self._control = dict(state.get(CONTROL, {}))
        self._undo.forget()
        for parameter in self.trained.values():
            if (count := self._optimizer.state_of(parameter).get(COUNT)) is not None:
                count.fill_(self.step)

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        self.parallel.save_pretrained(path, state)

    def close(self) -> None:
        """Release the optimizer's memory, and leave the other ranks. May be called again."""
        self._optimizer.state.clear()
        self._undo.close()
        self.forget_gradients()
        self.parallel.close()

    def forget_gradients(self) -> None:
        if self.packed_model.router_bias is not None:
            self.packed_model.router_bias.counts.zero_()
        self._optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # of several ranks: not the optimizer's parameters


def _check_names(mine: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    parts = (mine.keys() | state.keys()) - COUNTS
    for part in sorted(parts, key=lambda part: (part != "model", part)):
        if other := mine.get(part, {}).keys() ^ state.get(part, {}).keys():
            raise ValueError(
                f"state: {part} differs from the model's in {sorted(other)[:4]}; was "
                f"it saved of another model or optimizer?"
            )
