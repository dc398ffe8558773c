"""A called model on the torch engine: passes of a client's data, and optimizer steps.

forward_backward   check ─▶ set earlier gradients aside ─▶ for each micro-batch: pack ─▶ model
                     ─▶ logprobs ─▶ loss, a sum ─▶ backward ─▶ all finite? ─▶ add the earlier
optimizer_step     check ─▶ clip ─▶ finite? ─▶ AdamW
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.problems import Problem
from stages.calls import files
from stages.calls.base import TorchBase
from stages.calls.checks import DatumColumns, checked_adam, checked_data, checked_loss
from stages.calls.interface import (
    AdamOptions,
    CallRefused,
    Datum,
    LossOptions,
    ModelOptions,
    PassOutput,
)
from stages.calls.losses import Loss, LossTokens
from stages.calls.packing import MicroBatch, pack_data, plan
from stages.engines.torch.model.optimizer import all_finite
from stages.engines.torch.train import TorchTrainEngine

# by what follows the colon in a metric's name
JOINED: Mapping[str, Callable[[list[float]], float]] = {"sum": sum, "min": min, "max": max}


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
        trained = self._engine.trained.values()
        earlier = [parameter.grad for parameter in trained]
        self._engine.forget_gradients()
        try:
            output = running.forward_backward()
            if not all_finite(p.grad for p in trained if p.grad is not None):
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
        if all(parameter.grad is None for parameter in self._engine.trained.values()):
            wrong = "has no gradients to step with"
            fix = "call forward_backward before each optim_step"
            raise CallRefused(Problem("optim_step", None, wrong, fix))
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
        self._engine.close()
        for parameter in (*self._engine.trained.values(), *self._engine.parallel.copies.values()):
            parameter.data = parameter.data.new_empty(0)

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
        self._plan, fed = plan([datum.tokens for datum in columns], token_budget)
        self._packings = [partial(pack_data, each, columns, engine.device) for each in self._plan]
        self._logprobs: dict[int, np.ndarray] = {}
        self._measured: dict[str, list[float]] = {"fed_tokens:sum": [float(fed)]}

    def forward(self) -> PassOutput:
        """Compute the loss, without gradients."""
        for number, outputs in enumerate(self._engine.score(self._packings)):
            self._loss_of(number, *outputs)
        return self._output()

    def forward_backward(self) -> PassOutput:
        """Add the gradients of the loss. Raises FloatingPointError."""
        self._engine.learn(self._packings, self._loss_of)
        return self._output()

    def _loss_of(self, number: int, logprobs: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Return the loss of the micro-batch ``number``. Raises FloatingPointError."""
        micro_batch = self._plan[number]
        tokens = self._tokens(micro_batch, logprobs)
        per_token = self._loss.per_token(tokens)
        values = per_token.detach().cpu().numpy().astype(np.float64)
        host_logprobs = logprobs.detach().cpu().numpy()
        at = 0
        for datum in micro_batch.data:
            targets = self._columns[datum].targets
            of_datum = slice(at, at + targets.size)
            at += targets.size
            self._logprobs[datum] = host_logprobs[of_datum].reshape(targets.shape)
            wrong = np.flatnonzero(~np.isfinite(values[of_datum]))
            if len(wrong):
                raise FloatingPointError(
                    f"data.{datum}: its {self._loss.name} loss is {values[of_datum][wrong[0]]} at "
                    f"target {wrong[0]}, so that no gradient of the call was added; look for "
                    f"logprobs far from the model's, or too large a step before"
                )
        measured = {"loss:sum": values.sum(), **self._loss.metrics(tokens)}
        for name, value in measured.items():
            self._measured.setdefault(name, []).append(float(value))
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
        )

    def _output(self) -> PassOutput:
        metrics = {
            name: float(JOINED[name.partition(":")[2]](values))
            for name, values in self._measured.items()
        }
        return PassOutput([self._logprobs[at] for at in range(len(self._columns))], metrics)
