"""The passes of a step through a model that one rank, or each of several, has all layers of: one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from stages.engines.torch.packing import PackedBatch, pack

Value = TypeVar("Value")
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see TorchTrainEngine._outputs
Packing = Callable[[], PackedBatch]


class Passes:
    """Runs micro-batches through the model of ``engine``. ``passes``: of each rank; idle ones follow ``batches``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def learn(self, batches: Sequence[Packing], passes: int, loss: Callable[..., torch.Tensor]) -> None:
        """Forward and backward. ``loss``: of a micro-batch's number and the outputs for it."""
        for number in range(passes):
            with self._counted(number < len(batches)):
                outputs = self._compute(batches, number)
            loss(number, *outputs).backward()

    def score(self, batches: Sequence[Packing], passes: int) -> list[Outputs]:
        """The outputs, without a gradient."""
        return [self._compute(batches, number) for number in range(passes)]

    def probe(
        self, tokens: int, hidden: Callable[[], torch.Tensor], logits: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """``logits()`` from ``hidden()``, the last hidden states of so many tokens, where this rank has the output head."""
        found: torch.Tensor = self._engine._run(logits)
        return found

    def broadcast_from_last(self, value: Value) -> Value:
        """``value`` as the rank with the output head has it."""
        return value

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` of the layers that ranks have, added up."""
        return values

    def _compute(self, batches: Sequence[Packing], number: int) -> Outputs:
        packed = batches[number]() if number < len(batches) else idle_batch(self._engine.device)
        outputs: Outputs = self._engine._compute(packed)
        return outputs

    def _counted(self, is_real: bool) -> AbstractContextManager[None]:
        """The load of experts is counted meanwhile, but for idle micro-batches."""
        load: AbstractContextManager[None] = self._engine.expert_load
        return load if is_real else nullcontext()


def idle_batch(device: torch.device) -> PackedBatch:
    """A micro-batch of one token, to compute while other ranks have work."""
    token = torch.zeros(1, dtype=torch.int64)
    return pack([token], [[token]], device)
