"""The interface by which the ranks of a train engine share its work, and a single rank's way.

    start ─▶ place the parameters ─▶ for each batch: count and add up over ranks
                                                     runner: micro-batches, forward and backward
                                                     clip ─▶ the engine's optimizer step

Several ranks: stages/engines/torch/parallel/sharded.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stages.engines.torch.model.packed_model import PackedModel
from stages.engines.torch.optimizers.weights import bound_gradients, master_weights
from stages.engines.torch.parallel.runner import MicroBatchRunner, install_packed_attention
from stages.parallel.layout import ALONE, RankCoordinates


class Parallel:
    """Shares an engine's work among the ranks of a layout. This class is that of one rank, which
    has the whole model and every row. All ranks make the same calls in the same order."""

    runner: MicroBatchRunner
    """Runs micro-batches. Made by :meth:`place`, as :attr:`packed_model` is."""

    packed_model: PackedModel

    token_ranks = 1
    """Ranks that share the tokens of each micro-batch."""

    checkpoint_group: Any = None
    """The process group of checkpoints, which are written beside training."""

    def __init__(self, coordinates: RankCoordinates = ALONE) -> None:
        self.coordinates = coordinates
        self.copies: dict[str, nn.Parameter] = {}  # by name: the model's, of master weights
        # by name: the model's, of which the optimizer has this rank's parts; gradients are here
        self.sharded: dict[str, DTensor] = {}

    def start(self, device: torch.device) -> torch.device:
        """Meet the other ranks. Return the device of this rank, for an engine on ``device``."""
        return device

    def place(self, packed_model: PackedModel, compute: torch.dtype) -> dict[str, nn.Parameter]:
        """Move the model of ``packed_model`` to where it is trained, to compute in ``compute``,
        and install the packed attention. Return the parameters for the optimizer, by name.
        Raises ValueError for a model that cannot be shared in this way."""
        self.packed_model = packed_model
        self.runner = MicroBatchRunner(packed_model)
        nn.Module.to(packed_model.model, packed_model.device)
        install_packed_attention(packed_model, self.runner)
        trained = packed_model.trained()
        if all(parameter.dtype == compute for parameter in trained.values()):
            return trained
        packed_model.dtype = compute
        self.copies = trained
        return master_weights(packed_model.model, trained, compute)

    def all_gather_counts(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the fewest and the most that a replica has of each of ``counts``."""
        return [(count, count) for count in counts]

    def all_gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` [n, k] of all replicas, one after the other."""
        return rows

    def all_true(self, holds: bool) -> bool:
        """Return whether ``holds`` is true on all ranks."""
        return holds

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Add up ``values`` over all replicas."""
        return values

    def total_of_tokens(self, counts: torch.Tensor) -> torch.Tensor:
        """Add up ``counts`` of the tokens that each rank was fed, over all ranks."""
        return counts

    def reduce_metrics(self, metrics: dict[str, float], everywhere: bool) -> dict[str, float]:
        """Combine the metrics of all ranks: the largest of those called ``max_…``, the sum of the
        others. ``everywhere``: all replicas have measured the same."""
        return metrics

    def clip(self, trained: Mapping[str, nn.Parameter], limit: float | None) -> float:
        """Give ``trained`` the gradients of all ranks, of a 2-norm of at most ``limit``. Return
        the norm before."""
        return bound_gradients(trained.values(), limit)

    def reshard(self) -> None:
        """Forget what a forward has gathered of the weights."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the whole weights that are trained, in the dtype of the arithmetic, one at a time.
        Every rank iterates over all of them."""
        for name, parameter in self.packed_model.trained().items():
            yield name, parameter.detach()

    def saved(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, of the same shape as the optimizer's parameter ``name``, in the form
        that a checkpoint stores."""
        return value

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None) -> None:
        """See :class:`stages.engines.protocols.TrainEngine`."""
        packed_model = self.packed_model
        model = self.packed_model.model
        # A quantised checkpoint's config says so, which is untrue of what is written.
        model.config.__dict__.pop("quantization_config", None)
        named = state["model"] if state else {}
        weights = {n: value for n, value in named.items() if n not in packed_model.value_head}
        if packed_model.adapters is not None:
            packed_model.save_adapters(path, weights or dict(self.weights()))
            return
        learned = dict(model.named_parameters())  # buffers keep their dtype
        cast = {n: v.to(packed_model.dtype) if n in learned else v for n, v in weights.items()}
        model.save_pretrained(path, state_dict=cast or None)

    def close(self) -> None:
        """Leave the other ranks. May be called again."""
