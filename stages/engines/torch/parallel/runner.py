"""Runs the micro-batches of a step, one at a time, through a model of which a rank has all layers.

    pack ─▶ this rank's share ─▶ model ─▶ outputs of all shares ─▶ loss_of ─▶ backward

Ranks that have fewer micro-batches than others make idle passes, so that all make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from stages import device as devices
from stages.engines.torch.model.attention_interface import PROBE, check_logits
from stages.engines.torch.model.packed_model import Outputs, PackedModel, TopTokens
from stages.engines.torch.model.packing import PackedBatch, pack

Value = TypeVar("Value")
Packing = Callable[[], PackedBatch]
LossOf = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss of a micro-batch by its number, logprobs, entropies and values."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a micro-batch."""

    fed: PackedBatch
    """What the rank feeds to its model."""

    whole: Callable[[torch.Tensor], torch.Tensor] = lambda own: own
    """Joins the numbers of all ranks' predicted tokens, in the order of the micro-batch: [T]."""


class MicroBatchRunner:
    """Runs micro-batches through ``packed_model``.

    ``share``: a rank's share of a micro-batch. ``call``: calls its first argument with the others,
    while the parameters that belong to no layer are whole. ``passes`` of the methods: how many
    micro-batches each rank makes; idle ones follow ``batches``."""

    def __init__(
        self,
        packed_model: PackedModel,
        share: Callable[[PackedBatch], Share] = Share,
        call: Callable[..., Any] = lambda compute, *arguments: compute(*arguments),
    ) -> None:
        self._packed_model = packed_model
        self._share = share
        self._call = call

    def learn(self, batches: Sequence[Packing], passes: int, loss_of: LossOf) -> None:
        """Forward and backward."""
        for number in range(passes):
            with self._counted(number < len(batches)):
                outputs = self._compute(batches, number, with_entropy=True)
            loss_of(number, *outputs).backward()

    def score(
        self, batches: Sequence[Packing], passes: int, *, with_entropy: bool = False
    ) -> list[Outputs]:
        """Return the outputs, without a gradient; entropies are empty without ``with_entropy``."""
        numbers = range(passes)
        return [self._compute(batches, number, with_entropy=with_entropy) for number in numbers]

    def top(self, batches: Sequence[Packing], passes: int, k: int) -> list[TopTokens]:
        """Return what :meth:`PackedModel.top_logprobs` does, of ``batches``."""
        tops = []
        for number in range(passes):
            share = self._share(self._packed_batch(batches, number))
            own = self._call(self._packed_model.top_logprobs, share.fed, k)
            logprobs, tokens = map(share.whole, own)
            tops.append((logprobs, tokens))
        return tops[: len(batches)]

    def outputs(self, share: Share, *, with_entropy: bool) -> Outputs:
        """Return the outputs of the micro-batch that ``share`` is of."""
        computed = self._call(self._packed_model.outputs, share.fed, with_entropy)
        logprobs, entropy, values = computed
        return share.whole(logprobs), share.whole(entropy), share.whole(values)

    def probe(
        self,
        tokens: int,
        hidden: Callable[[], torch.Tensor],
        logits: Callable[[], torch.Tensor],
    ) -> torch.Tensor | None:
        """Return ``logits()`` from ``hidden()``, the last hidden states of so many ``tokens``,
        where this rank has the output head."""
        result: torch.Tensor = self._call(logits)
        return result

    def broadcast_from_last(self, value: Value) -> Value:
        """Return ``value`` as the rank with the output head has it."""
        return value

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Add up ``values`` of the layers that ranks have."""
        return values

    def _compute(self, batches: Sequence[Packing], number: int, *, with_entropy: bool) -> Outputs:
        share = self._share(self._packed_batch(batches, number))
        return self.outputs(share, with_entropy=with_entropy)

    def _packed_batch(self, batches: Sequence[Packing], number: int) -> PackedBatch:
        is_real = number < len(batches)
        return batches[number]() if is_real else idle_batch(self._packed_model.device)

    def _counted(self, is_real: bool) -> AbstractContextManager[None]:
        """Count the load of experts meanwhile, but not that of idle micro-batches."""
        load = self._packed_model.expert_load
        return load if is_real and load is not None else nullcontext()


def idle_batch(device: torch.device) -> PackedBatch:
    """Return a micro-batch of one token, to compute while other ranks have work."""
    token = torch.zeros(1, dtype=torch.int64)
    return pack([token], [[token]], device)


@torch.no_grad()
def install_packed_attention(packed_model: PackedModel, runner: MicroBatchRunner) -> None:
    """Replace the attention and the linear layers of ``packed_model``, and compare its logits of
    two responses with those of its plain forward. Raises ValueError where they differ."""
    model = packed_model.model
    probe = torch.arange(PROBE) * 7919 % model.config.get_text_config().vocab_size
    ids = probe[None].to(packed_model.device)
    packed = pack([probe[:8]], [[probe[8:], probe[8:15]]], packed_model.device)

    def of_packed() -> Any:
        return runner.probe(
            packed.ids.shape[1],
            lambda: packed_model.decode(packed),
            lambda: packed_model.logits(packed),
        )

    with devices.trimmed_by_layer(model):
        plain = runner.probe(
            PROBE,
            lambda: packed_model.plain_hidden(ids),
            lambda: packed_model.plain_logits(ids),
        )
    packed_model.replace_layers()
    problem = ""
    with devices.trimmed_by_layer(model):
        if plain is None:
            of_packed()
        else:
            expected = torch.cat([plain[0, 7:-1], plain[0, 7:14]]).float()
            try:
                check_logits(model, "a packed batch", of_packed, expected, packed_model.dtype)
            except ValueError as error:
                problem = str(error)
    if problem := runner.broadcast_from_last(problem):
        raise ValueError(problem)
