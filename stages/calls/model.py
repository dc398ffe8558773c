"""A called model on the torch engine: passes of a client's data, and optimizer steps.

forward_backward   check ─▶ set earlier gradients aside ─▶ for each micro-batch: pack ─▶ model
                     ─▶ logprobs ─▶ loss, a sum ─▶ backward ─▶ all finite? ─▶ add the earlier
optimizer_step     check ─▶ clip ─▶ finite? ─▶ AdamW

Of several ranks each makes all calls; a replica computes its share of the data. What one rank alone
can see, a loss that is not finite, is said on all of them after the last pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.calls import files
from stages.calls.base import TorchBase
from stages.calls.checks import checked_adam, checked_data, checked_loss
from stages.calls.interface import (
    AdamOptions,
    CallRefused,
    Datum,
    LossOptions,
    ModelOptions,
    PassOutput,
)
from stages.calls.losses import DatumColumns, Loss, LossTokens
from stages.calls.packing import MicroBatch, pack_data, plan
from stages.engines.torch.optimizers.weights import all_finite
from stages.engines.torch.train import TorchTrainEngine
from stages.resharding.tensors import empty, local_part

# by what follows the colon in a metric's name
JOINED: Mapping[str, Callable[[list[float]], float]] = dict(sum=sum, mean=sum, min=min, max=max)


class TorchCalledModel:
    """Trains one model on ``base``; see :class:`stages.calls.interface.CalledModel`. Weight decay
    reaches matrices alone, which all of an adapter's tensors are. Raises CallRefused."""

    def __init__(self, base: TorchBase, options: ModelOptions) -> None:
        self._base = base
        self._options = options
        self._engine = base.engine(options)

    @property
    def step(self) -> int:
        """Optimizer steps that its weights have."""
        return self._engine.step

    def forward(self, data: Sequence[Datum], loss: str, options: LossOptions) -> PassOutput:
        """See :class:`stages.calls.interface.CalledModel`."""
        return self._pass(data, loss, options).forward()

    def forward_backward(
        self, data: Sequence[Datum], loss: str, options: LossOptions
    ) -> PassOutput:
        """See :class:`stages.calls.interface.CalledModel`."""
        running = self._pass(data, loss, options)
        trained = self._learning()
        earlier = [parameter.grad for parameter in trained]
        self._engine.forget_gradients()
        try:
            output = running.forward_backward()
            gradients = [local_part(p.grad) for p in trained if p.grad is not None]
            if not self._engine.parallel.all_true(all_finite(gradients)):
                raise FloatingPointError(
                    f"{loss}: a gradient is not finite, so that none of the call's was added; look "
                    f"for extreme weights, advantages or logprobs in the data"
                )
        except BaseException:
            self._engine.forget_gradients()
            for parameter, gradient in zip(trained, earlier, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(trained, earlier, strict=True):
            if gradient is not None and parameter.grad is not None:
                gradient += parameter.grad
            parameter.grad = parameter.grad if gradient is None else gradient
        return output

    def optimizer_step(self, options: AdamOptions) -> dict[str, float]:
        """See :class:`stages.calls.interface.CalledModel`."""
        checked_adam(options)
        if all(parameter.grad is None for parameter in self._learning()):
            wrong = "has no gradients to step with"
            fix = "call forward_backward before each optim_step"
            raise CallRefused.of("optim_step", None, wrong, fix)
        self._engine.set_adam(
            learning_rate=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            grad_clip=options.grad_clip_norm or None,
        )
        grad_norm = self._engine.optimizer_step()
        return {"grad_norm": grad_norm, "learning_rate": options.learning_rate}

    def forget_gradients(self) -> None:
        """See :class:`stages.calls.interface.CalledModel`."""
        self._engine.forget_gradients()

    def adapter(self) -> dict[str, Any]:
        """See :class:`stages.calls.interface.CalledModel`. Tensors are on the CPU, in the dtype of
        the arithmetic."""
        return {name: value.cpu().clone() for name, value in self._engine.weights()}

    def save(self, folder: Path, *, optimizer: bool, merged: bool = True) -> None:
        """See :class:`stages.calls.interface.CalledModel`, and :func:`stages.calls.files.save`."""
        files.save(
            folder, self._engine, self._base, self._options, optimizer=optimizer, merged=merged
        )

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """See :class:`stages.calls.interface.CalledModel`."""
        files.load(folder, self._engine, self._options, optimizer=optimizer)

    def close(self) -> None:
        """Release its memory. May be called again."""
        engine = self._engine
        engine.close()
        empty(local_part(parameter.detach()) for parameter in self._learning())
        for parameter in (*engine.trained.values(), *engine.parallel.copies.values()):
            parameter.data = parameter.data.new_empty(0)

    def _learning(self) -> Collection[torch.nn.Parameter]:
        """Return the parameters that have the gradients."""
        learning: Mapping[str, Any] = self._engine.parallel.sharded or self._engine.trained
        return learning.values()

    def _pass(self, data: Sequence[Datum], name: str, options: LossOptions) -> _Pass:
        """Check a call. Raises CallRefused."""
        loss, values = checked_loss(name, options)
        base = self._base
        limits = {"vocabulary": base.vocabulary, "context": base.context}
        columns = checked_data(data, loss, values, **limits)
        return _Pass(self._engine, columns, loss, values, base.token_budget)


class _Pass:
    """One pass of checked data through ``engine``, and what it gives."""

    def __init__(
        self,
        engine: TorchTrainEngine,
        columns: Sequence[DatumColumns],
        loss: Loss,
        options: Mapping[str, float],
        token_budget: int | None,
    ) -> None:
        self._engine = engine
        self._columns = columns
        self._loss = loss
        self._options = options
        ranks = engine.parallel.coordinates
        tokens = [datum.tokens for datum in columns]
        self._plans, self._fed = plan(tokens, token_budget, ranks.layout.replicas)
        self._plan = self._plans[ranks.replica]
        self._passes = max(map(len, self._plans))
        self._packings = [partial(pack_data, each, columns, engine.device) for each in self._plan]
        # of this replica's micro-batches
        self._logprobs: list[np.ndarray] = []
        self._measured: list[dict[str, float]] = []
        self._not_finite: list[tuple[float, float, float]] = []  # datum, target, loss

    def forward(self) -> PassOutput:
        """Compute the loss, without gradients. Raises FloatingPointError."""
        for number, outputs in enumerate(self._engine.score(self._packings, self._passes)):
            self._loss_of(number, *outputs)
        return self._output()

    def forward_backward(self) -> PassOutput:
        """Add the gradients of the loss. Raises FloatingPointError."""
        self._engine.learn(self._packings, self._passes, self._loss_of)
        return self._output()

    def _loss_of(self, number: int, logprobs: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Return the loss of the micro-batch ``number``."""
        if number >= len(self._plan):
            return logprobs.sum() * 0
        micro_batch = self._plan[number]
        tokens = self._tokens(micro_batch, logprobs)
        per_token = self._loss.per_token(tokens)
        values = per_token.detach().cpu().numpy().astype(np.float64)
        self._logprobs.append(logprobs.detach().cpu().numpy())
        at = 0
        for datum in micro_batch.data:
            size = self._columns[datum].targets.size
            of_datum = values[at : at + size]
            at += size
            wrong = np.flatnonzero(~np.isfinite(of_datum))
            if len(wrong):
                self._not_finite.append((datum, wrong[0], of_datum[wrong[0]]))
        if not self._not_finite:
            measured = {"loss:sum": values.sum(), **self._loss.metrics(tokens)}
            self._measured.append({name: float(value) for name, value in measured.items()})
        return per_token.sum()

    def _tokens(self, micro_batch: MicroBatch, logprobs: torch.Tensor) -> LossTokens:
        columns = [self._columns[datum] for datum in micro_batch.data]
        sizes = torch.tensor([datum.targets.size for datum in columns])
        inputs = {
            name: torch.from_numpy(
                np.concatenate([datum.inputs[name].ravel() for datum in columns])
            )
            for name in columns[0].inputs
        }
        return LossTokens(
            logprobs,
            {name: values.to(logprobs.device) for name, values in inputs.items()},
            torch.arange(len(columns)).repeat_interleave(sizes).to(logprobs.device),
            self._options,
            columns,
        )

    def _output(self) -> PassOutput:
        """Join what the replicas have. Raises FloatingPointError, on all ranks."""
        wrong = self._joined(self._not_finite).reshape(-1, 3)
        if len(wrong):
            datum, target, value = min(wrong.tolist())
            raise FloatingPointError(
                f"data.{int(datum)}: its {self._loss.name} loss is {value} at target "
                f"{int(target)}, so that no gradient of the call was added; look for logprobs far "
                f"from the model's, or too large a step before"
            )
        local = np.concatenate([np.empty(0), *self._logprobs])
        logprobs = self._joined(local).astype(np.float32)
        rows: list[Any] = [None] * len(self._columns)
        at = 0
        for micro_batch in itertools.chain.from_iterable(self._plans):
            for datum in micro_batch.data:
                targets = self._columns[datum].targets
                rows[datum] = logprobs[at : at + targets.size].reshape(targets.shape)
                at += targets.size
        flat = [value for measured in self._measured for value in measured.values()]
        values = self._joined(flat).reshape(sum(map(len, self._plans)), -1)
        names = self._measured[0] if self._measured else ()  # the first replica has some
        metrics = {}
        for name, column in zip(names, values.T, strict=False):
            kind = name.partition(":")[2]
            joined = float(JOINED[kind](column.tolist()))
            metrics[name] = joined / len(self._columns) if kind == "mean" else joined
        return PassOutput(rows, {"fed_tokens:sum": float(self._fed), **metrics})

    def _joined(self, numbers: Any) -> np.ndarray:
        """Return the ``numbers`` of all replicas, in their order: float64 [n]."""
        column = torch.as_tensor(numbers, dtype=torch.float64).view(-1, 1)
        return self._engine.parallel.all_gather_rows(column).numpy().ravel()
