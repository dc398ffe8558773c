"""The engine of a critic: a decoder with one value, float32, for each token of a response, in the place of logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tensordict import TensorDictBase
from transformers import PreTrainedModel

from stages.algorithms.named import AlgorithmLike
from stages.engines.torch.head import values_of
from stages.engines.torch.packing import PackedBatch
from stages.engines.torch.sharded import ShardedTrainEngine
from stages.engines.torch.train import TorchTrainEngine

VALUE_HEAD = "value_head.safetensors"  # beside a critic's Hugging Face checkpoint
REPORTED = ("value_loss", "grad_norm", "learning_rate")


class TorchCriticEngine(TorchTrainEngine):
    """Trains ``model`` with a value head on its last hidden states; its output embeddings are neither used nor trained,
    unless they are tied. ``head``: file of a value head to begin with; None: zeros, so that each value is 0. ``options``:
    those of :class:`~stages.engines.torch.train.TorchTrainEngine`."""

    def __init__(self, model: PreTrainedModel, *, head: Path | None = None, **options: Any) -> None:
        output = model.get_output_embeddings()
        if output.weight is not model.get_input_embeddings().weight:
            output.requires_grad_(False)
        super().__init__(model, value_head=True, **options)
        model.get_input_embeddings().sparse = False  # type: ignore[assignment]  # no head adds a dense gradient to theirs
        if head is not None:
            with torch.no_grad():
                for name, value in load_file(head).items():
                    self._value_head[name].copy_(value)

    def _outputs(self, packed: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The values float32 [T], also in the place of logprobs; entropies of zero."""
        values = values_of(self._hidden(packed), self._value_head, packed.source)
        return values, torch.zeros_like(values), values

    def train_batch(self, batch: TensorDictBase, algorithm: AlgorithmLike) -> Mapping[str, float]:
        """See :class:`~stages.engines.protocols.TrainEngine`; the metrics are those of the value loss."""
        metrics = super().train_batch(batch, algorithm)
        return {name: metrics[name] for name in REPORTED}

    def values(self, batch: TensorDictBase) -> torch.Tensor:
        """Values of the states before the response tokens: float32 jagged [B, T_i] on the CPU, no gradient. Each group is
        computed alone, so its bits do not depend on the other groups."""
        return self.logprobs(batch)

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        """Write a Hugging Face checkpoint of the decoder, and the value head beside it."""
        super().save_pretrained(path, state)
        saved = self.state_dict() if state is None else state
        if path.is_dir():  # of several ranks, the first one writes
            save_file({name: saved["model"][name].contiguous() for name in self._value_head}, path / VALUE_HEAD)


class ShardedCriticEngine(TorchCriticEngine, ShardedTrainEngine):
    """A critic on several ranks; ``coordinates`` and ``store`` are those of
    :class:`~stages.engines.torch.sharded.ShardedTrainEngine`."""

    def values(self, batch: TensorDictBase) -> torch.Tensor:
        """As in one process, with the same whole ``batch`` on each rank: replicas divide its groups, and all return all
        values."""
        groups, lengths = batch["group"].tolist(), [len(row) for row in batch["response_ids"].unbind()]
        mine = set(sorted(set(groups))[self.coordinates.replica :: self.coordinates.layout.replicas])
        own = [at for at, group in enumerate(groups) if group in mine]
        found = super().values(batch[own or [0]])  # without a group of its own, a replica computes with the others
        rows = [torch.zeros(length) for length in lengths]
        for at, row in zip(own, found.unbind(), strict=False):
            rows[at] = row
        values = torch.cat(rows).to(self.device)
        dist.all_reduce(values, group=self._meshes.replicas.get_group())
        return torch.nested.nested_tensor(list(values.cpu().split(lengths)), layout=torch.jagged)
