"""An engine small enough to count with: a model is a vector, its loss a product with the tokens.

Options: ``folder`` for :data:`CALLS`; ``drifts``: each process begins with other weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from orchestration.calls.engines.parts import Parts
from stages.calls.interface import (
    AdamOptions,
    CallRefused,
    Datum,
    LossOptions,
    ModelOptions,
    PassOutput,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    ServedBase,
)

WIDTH = 8
KILLING_TOKEN = 666_666  # ends the process of an engine that trains on it
NO_MEMORY = "no-memory"  # a file in that folder: the number of starts for which there is none
CALLS = "calls.txt"  # what the engine did, a line each, in the folder of option "folder"


class SmallModel:
    """One vector of weights, moved by momentum."""

    def __init__(self, options: ModelOptions) -> None:
        if options.rank > 512:
            raise CallRefused(message=f"rank {options.rank}: at most 512")
        self.step = 0
        generator = np.random.default_rng(options.seed)
        self._weights = generator.standard_normal(WIDTH)
        self._moments = np.zeros(WIDTH)
        self._gradient: np.ndarray | None = None

    def _features(self, datum: Datum) -> np.ndarray:
        return np.sin(np.outer(datum.tokens + 1, np.arange(1, WIDTH + 1)))

    def forward(self, data: Sequence[Datum], loss: str, options: LossOptions) -> PassOutput:
        if loss != "cross_entropy":
            raise CallRefused(message=f"loss_fn {loss!r}: give cross_entropy")
        logprobs = [(self._features(datum) @ self._weights).astype(np.float32) for datum in data]
        return PassOutput(logprobs, {"loss:sum": float(sum(map(np.sum, logprobs)))})

    def forward_backward(
        self, data: Sequence[Datum], loss: str, options: LossOptions
    ) -> PassOutput:
        output = self.forward(data, loss, options)
        if any(KILLING_TOKEN in datum.tokens for datum in data):
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = np.zeros(WIDTH)
        for datum in data:
            gradient += self._features(datum).sum(0)
            if any(np.isnan(values).any() for values in datum.inputs.values()):
                raise FloatingPointError("the loss is not finite")
        self._gradient = gradient if self._gradient is None else self._gradient + gradient
        return output

    def optimizer_step(self, options: AdamOptions) -> dict[str, float]:
        if self._gradient is None:
            raise CallRefused(message="optim_step: no gradients")
        norm = float(np.linalg.norm(self._gradient))
        self._moments = 0.9 * self._moments + self._gradient
        self._weights = self._weights - options.learning_rate * np.tanh(self._moments)
        self._gradient = None
        self.step += 1
        return {"grad_norm": norm}

    def forget_gradients(self) -> None:
        self._gradient = None

    def adapter(self) -> dict[str, Any]:
        return {"weights": self._weights.copy()}

    def save(self, folder: Path, *, optimizer: bool, merged: bool = True) -> None:
        folder.mkdir(parents=True)
        np.save(folder / "weights.npy", self._weights)
        if optimizer:
            np.save(folder / "moments.npy", self._moments)
            (folder / "step.json").write_text(json.dumps(self.step))

    def load(self, folder: Path, *, optimizer: bool) -> None:
        self._gradient = None
        self._weights = np.load(folder / "weights.npy")
        self._moments = np.load(folder / "moments.npy") if optimizer else np.zeros(WIDTH)
        self.step = json.loads((folder / "step.json").read_text()) if optimizer else 0

    def close(self) -> None:
        pass


class SmallSampler:
    """Tokens are digits of the weights, after as many seconds as the prompt's first token says
    hundredths."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[np.ndarray, int]] = {"": (np.zeros(WIDTH), 0)}
        self._going = asyncio.Event()
        self._going.set()

    async def put(
        self, name: str, options: ModelOptions, weights: Mapping[str, Any], step: int
    ) -> None:
        self._weights[name] = (weights["weights"], step)

    async def remove(self, name: str) -> None:
        del self._weights[name]

    async def sample(self, name: str, request: SampleRequest, seed: int) -> SampleOutput:
        await asyncio.sleep(int(request.prompt[0]) / 100)
        await self._going.wait()
        weights, step = self._weights[name]
        count = request.options.max_tokens or WIDTH
        digits = (np.abs(weights[:count]) * 1000).astype(np.int32)
        sequence = SampledSequence(digits, digits.astype(np.float32), False, ((step, len(digits)),))
        return SampleOutput([sequence] * request.count)

    async def pause(self) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    async def close(self) -> None:
        pass


class Told(SmallModel):
    """A model that writes down what it is asked for."""

    def __init__(self, options: ModelOptions, file: Path) -> None:
        super().__init__(options)
        self._file = file
        self._name = str(options.seed)

    def forward_backward(
        self, data: Sequence[Datum], loss: str, options: LossOptions
    ) -> PassOutput:
        with self._file.open("a") as file:
            file.write(f"{self._name}\n")
        return super().forward_backward(data, loss, options)


async def open_parts(base: ServedBase, options: Mapping[str, Any]) -> Parts:
    folder = Path(options["folder"])
    starts = folder / NO_MEMORY
    if starts.exists() and (count := int(starts.read_text())):
        starts.write_text(str(count - 1))
        raise MemoryError("no room for the weights")
    file = folder / CALLS

    def new_model(each: ModelOptions) -> SmallModel:
        seed = os.getpid() if options.get("drifts") else each.seed
        return Told(replace(each, seed=seed), file)

    return Parts(new_model, SmallSampler())
