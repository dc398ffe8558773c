"""Turns of a trainer of adapters and a rollout engine on one device: the base stays where it is,
the adapters are copied.

TRAINING ── to_rollout(): adapters, from all ranks ─▶ the engine's ──▶ GENERATING ── prefetch(), ready() ──▶ TRAINING
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from stages import device as devices
from stages.resharding.plan import Phase
from stages.resharding.swap import State
from stages.resharding.tensors import live_bytes

if TYPE_CHECKING:
    from stages.engines.protocols import ColocatedEngine
    from stages.engines.torch.train import TorchTrainEngine


class AdapterSwap:
    """The methods of :class:`~stages.resharding.swap.Swap` that
    :class:`~stages.training.shared_device.SharedDevice` calls, for a run that trains adapters.

    Both engines compute with the weights of the base, so neither frees them; where the trainer has
    them whole, its own become the engine's tensors. What it has beside them, for the adapters, is a
    few hundredths of that, and stays too: only the engine's KV cache goes.
    """

    waited = 0.0  # seconds, for training's bytes
    moved = 0  # bytes, to the engine

    def __init__(self, trainer: TorchTrainEngine, rollout: ColocatedEngine) -> None:
        self.device = trainer.device
        self.state = State.TRAINING
        self.seconds = dict.fromkeys(Phase, 0.0)
        self._trainer = trainer
        self._rollout = rollout
        rollout_weights = rollout.parameters()
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if not parameter.requires_grad and not isinstance(parameter, DTensor):
                    parameter.data = rollout_weights[name.replace(".base_layer.", ".")].data

    def to_rollout(self) -> None:
        """Copy the adapters as they are trained now. All ranks call this together."""
        adapters = dict(self._trainer.weights())
        self._rollout.fill(adapters)
        self.moved = sum(value.nbytes for value in adapters.values())
        devices.release_cached(self.device)
        self.state = State.GENERATING

    def prefetch(self) -> None:
        self.state = State.RETURNING

    def ready(self) -> None:
        self.state = State.TRAINING

    @property
    def released(self) -> int:
        """Bytes that are in host memory during generation."""
        return 0

    def training_bytes(self) -> int:
        """Return the number of bytes that come back for training: none have left."""
        return 0

    def device_bytes(self) -> int:
        """Return the number of bytes of both engines on the device, without keys and values; a base
        that they share once."""
        held = (value for value in self._trainer.held() if value.device.type == self.device.type)
        return live_bytes(
            [*self._rollout.tensors.values(), *self._trainer.shards().values(), *held]
        )
