"""The engine of a critic: a decoder with one value, float32, for each token of a response, in the
place of logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDictBase
from transformers import PreTrainedModel

from pipeline.data.columns import Packed
from stages.algorithms.named import AlgorithmLike
from stages.engines.torch.model.layers import use_plain_words
from stages.engines.torch.model.logits import values_of
from stages.engines.torch.model.packed_model import Outputs, PackedModel
from stages.engines.torch.model.packing import PackedBatch
from stages.engines.torch.train import TorchTrainEngine

VALUE_HEAD = "value_head.safetensors"  # beside a critic's Hugging Face checkpoint
REPORTED = ("value_loss", "grad_norm", "learning_rate")


class ValueModel(PackedModel):
    """A decoder with a value head alone."""

    def outputs(self, packed: PackedBatch, with_entropy: bool = True) -> Outputs:
        """Return the values float32 [T], also in the place of logprobs; entropies of zero."""
        values = values_of(self.hidden(packed), self.value_head, packed.source)
        return values, torch.zeros_like(values), values


class TorchCriticEngine(TorchTrainEngine):
    """Trains ``model`` with a value head on its last hidden states; its output embeddings are
    neither used nor trained, unless they are tied. ``head``: file of a value head to begin with;
    None: zeros, so that each value is 0. ``options``: those of
    :class:`~stages.engines.torch.train.TorchTrainEngine`."""

    _pack_model = ValueModel

    def __init__(self, model: PreTrainedModel, *, head: Path | None = None, **options: Any) -> None:
        output = model.get_output_embeddings()
        if output.weight is not model.get_input_embeddings().weight:
            output.requires_grad_(False)
        super().__init__(model, value_head=True, **options)
        use_plain_words(model)
        if head is not None:
            with torch.no_grad():
                for name, value in load_file(head).items():
                    self.value_head[name].copy_(value)

    def train_batch(self, batch: TensorDictBase, algorithm: AlgorithmLike) -> Mapping[str, float]:
        """See :class:`~stages.engines.protocols.TrainEngine`; the metrics are those of the value
        loss."""
        metrics = super().train_batch(batch, algorithm)
        return {name: metrics[name] for name in REPORTED}

    def values(self, batch: TensorDictBase) -> torch.Tensor:
        """Return the values of the states before the response tokens: float32 jagged [B, T_i] on
        the CPU, no gradient. Each group is computed alone, so its bits do not depend on the other
        groups. Several ranks pass the same whole ``batch``: replicas divide its groups, and all
        return all values."""
        own_rank = self.parallel.coordinates
        if own_rank.layout.replicas == 1:
            return self.logprobs(batch)
        groups = batch["group"].tolist()
        responses = Packed.of(batch["response_ids"])
        numbers = sorted(set(groups))[own_rank.replica :: own_rank.layout.replicas]
        local_rows = [row for row, group in enumerate(groups) if group in numbers]
        # Without a group of its own, a replica computes with the others.
        local_values = Packed.of(self.logprobs(batch[local_rows or [0]])).values
        index = responses.indexes(local_rows)
        values = torch.zeros(len(responses.values))
        values[index] = local_values[: len(index)]
        return Packed(self.parallel.total(values), responses.offsets).jagged()

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        """Write a Hugging Face checkpoint of the decoder, and the value head beside it."""
        super().save_pretrained(path, state)
        saved = self.state_dict() if state is None else state
        if path.is_dir():  # of several ranks, the first one writes
            save_file(
                {name: saved["model"][name].contiguous() for name in self.value_head},
                path / VALUE_HEAD,
            )
