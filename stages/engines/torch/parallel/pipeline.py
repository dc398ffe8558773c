"""Pipeline parallelism: each rank has some of the layers, and hidden states go from rank to rank
(1F1B, interleaved).

    embeddings ▸ layers ─ hidden states [1, S, H] ─▶ layers ─▶ … ─▶ layers ▸ norm ▸ head ▸ loss
                        ◀───── their gradients ────

Every rank of a replica knows the tokens S of each micro-batch and the order of all ranks
(stages/parallel/schedules.py), so hidden states are sent as they are, without padding and without
their shapes, and received in the order in which they are sent. A virtual stage is the model's own
decoder with other modules in the places of those that other ranks have.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from stages.engines.protocols import ModelRefused
from stages.engines.torch.model.packed_model import Outputs, PackedModel, TopTokens
from stages.engines.torch.model.packing import PackedBatch
from stages.engines.torch.parallel.collectives import own_slice
from stages.engines.torch.parallel.mesh import Meshes
from stages.engines.torch.parallel.runner import (
    LossOf,
    MicroBatchRunner,
    Packing,
    Share,
    Value,
    idle_batch,
)
from stages.parallel.layout import RankCoordinates
from stages.parallel.placement import check_stages, model_state, stage_layers
from stages.parallel.schedules import Action

SHARED_BYTES = 64 * 2**10  # of what the last stage tells the others, as JSON


class Placeholder(nn.Module):
    """In the place of a module that another rank has.

    Returns what it is called with, or ``given``; for the numbers of words zeros [1, S, H], of which
    decoders read the shape.
    """

    def __init__(self, like: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_type = getattr(like, "attention_type", None)  # decoders ask layers for it
        self.given: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.given is None:
            return hidden_states
        words = not hidden_states.is_floating_point()
        return (
            self.given.new_zeros(1).expand(*hidden_states.shape, self.given.shape[-1])
            if words
            else self.given
        )


@dataclass(frozen=True, eq=False)
class PipelineStage:
    """The part of the model that a rank has for one virtual stage."""

    number: int

    modules: dict[str, nn.Module]
    """Those of the decoder, by name."""

    layers: Sequence[nn.Module]

    entry: Placeholder
    """Stands where hidden states of the stage before come in."""


def planned(model: PreTrainedModel) -> list[str]:
    """Return the names of embeddings, layers and norm in the decoder of ``model``, by its plan in
    transformers. Raises ValueError for a model without one."""
    names = list(getattr(model.config.get_text_config(), "base_model_pp_plan", None) or ())
    children = model.base_model.named_children()
    others = [
        name
        for name, child in children
        if name not in names and any(True for _ in child.parameters())
    ]
    if len(names) != 3 or others:
        problem = f"{type(model).__name__} comes without a plan for pipeline stages"
        raise ModelRefused("pp", problem, "use pp = 1")
    return names


def keep_own(
    model: PreTrainedModel, at: RankCoordinates
) -> tuple[list[PipelineStage], dict[str, int]]:
    """Take the modules out of ``model`` that other pipeline stages than that of the rank ``at``
    have.

    Returns this rank's virtual stages, and the virtual stage of each parameter and buffer of the
    whole model (of tied embeddings the first one). Raises ValueError for a model that cannot be
    cut, or not into as many."""
    decoder = model.base_model
    names = planned(model)
    layout = at.layout
    count = layout.virtual_stages
    state = model_state(model.config)
    check_stages(state, layout)
    dealt = stage_layers(state.costs, count)
    (embedding, words), (stack, layers), (norm, last_norm) = (
        (name, decoder.get_submodule(name)) for name in names
    )
    stage_of: dict[str, int] = {}
    for name in chain(
        *(
            dict(named_tensors).keys()
            for named_tensors in (model.named_parameters(), model.named_buffers())
        )
    ):
        _, _, inside = name.partition(f"{model.base_model_prefix}.{stack}.")
        layer = int(inside.partition(".")[0]) if inside else -1
        stage_of[name] = next(
            (stage for stage, layers_of in enumerate(dealt) if layer in layers_of), count - 1
        )
        if name.startswith(f"{model.base_model_prefix}.{embedding}."):
            stage_of[name] = 0
    whole: list[Any] = list(layers)  # type: ignore[call-overload]
    stages = []
    for number in at.virtual_stages:
        layer_numbers = dealt[number]
        entry = Placeholder(whole[layer_numbers[0] - 1])
        placed = [
            layer if place in layer_numbers else Placeholder(layer)
            for place, layer in enumerate(whole)
        ]
        if number:
            # the decoder may change what comes from its embeddings
            placed[layer_numbers[0] - 1] = entry
        modules = {
            embedding: words if number == 0 else entry,
            stack: nn.ModuleList(placed),
            norm: last_norm if number == count - 1 else Placeholder(),
        }
        stages.append(
            PipelineStage(number, modules, [whole[layer] for layer in layer_numbers], entry)
        )
    is_first = at.stage == 0
    is_last = at.stage == layout.last_stage
    local_layers = {id(layer) for stage in stages for layer in stage.layers}
    local_stack = nn.ModuleList(
        [layer if id(layer) in local_layers else Placeholder(layer) for layer in whole]
    )
    has_words = is_first or (is_last and bool(state.tied))
    decoder._modules.update({stack: local_stack, embedding: words if has_words else Placeholder()})
    decoder._modules[norm] = last_norm if is_last else Placeholder()
    if not is_last and not (is_first and state.tied):
        model.set_output_embeddings(Placeholder())
    return stages, stage_of


class Pipeline(MicroBatchRunner):
    """Runs the virtual ``stages`` that the rank at ``own`` has of ``packed_model``, whose forward
    FSDP wraps. Ranks of a replica make the same calls."""

    def __init__(
        self,
        packed_model: PackedModel,
        share: Callable[[PackedBatch], Share],
        stages: Sequence[PipelineStage],
        meshes: Meshes,
        own: RankCoordinates,
    ) -> None:
        super().__init__(packed_model, share, packed_model.model)
        self._stages = {stage.number: stage for stage in stages}
        self._layout = meshes.layout
        self._own = own
        self._ranks = self._layout.group("pp", own.rank)  # of each stage, with this one's place
        self._tp = meshes.tp
        self._model: Any = packed_model.model
        self._decoder = packed_model.model.base_model
        self._kept = {name: self._decoder._modules[name] for name in stages[0].modules}
        # To ranks after this one, and before: neither waits for the other.
        self._up, self._down = meshes.pipes
        self.last = self._layout.virtual_stages - 1
        self._call(lambda: None)  # FSDP finds all stages before one takes the others' places
        # What the backward pass needs next: FSDP knows no order of several micro-batches that are
        # under way.
        for stage in stages:
            units = [unit for layer in stage.layers for unit in _units(layer)]
            for before, unit in pairwise([self._model, *units]):
                unit.set_modules_to_backward_prefetch([before])

    def learn(self, batches: Sequence[Packing], passes: int, loss_of: LossOf) -> None:
        packed = self._packed(batches, self._layout.filled(passes))
        shares = [self._share(each) for each in packed]

        def compute(number: int, is_last: bool) -> Any:
            with self._counted(number < len(batches)):
                if is_last:
                    return loss_of(number, *self.outputs(shares[number], with_entropy=True))
                return self._call(self._packed_model.decode, shares[number].fed)

        def feed(number: int) -> None:
            self._packed_model.feed(shares[number].fed)

        self.run([share.fed.ids.shape[1] for share in shares], compute, learn=feed)

    def score(
        self, batches: Sequence[Packing], passes: int, *, with_entropy: bool = False
    ) -> list[Outputs]:
        """Return logprobs, entropies where they are wanted, and values for ``batches``, on each
        rank; other replicas have up to ``passes`` of them."""
        packed = self._packed(batches, passes)
        shares = [self._share(each) for each in packed]
        kinds = (True, with_entropy, bool(self._packed_model.value_head))
        scores = [
            torch.zeros(sum(kinds), len(each.targets), device=self._packed_model.device)
            for each in packed[: len(batches)]
        ]

        def compute(number: int, is_last: bool) -> Any:
            if not is_last:
                return self._call(self._packed_model.decode, shares[number].fed)
            outputs = self.outputs(shares[number], with_entropy=with_entropy)
            if number < len(batches):
                for row, value in zip(scores[number], compress(outputs, kinds), strict=True):
                    row.copy_(value)

        self.run([share.fed.ids.shape[1] for share in shares], compute)
        empty = torch.empty(0)
        results = []
        for each in scores:
            rows = iter(self.broadcast(each))
            logprobs, entropies, values = (next(rows) if kind else empty for kind in kinds)
            results.append((logprobs, entropies, values))
        return results

    def top(self, batches: Sequence[Packing], passes: int, k: int) -> list[TopTokens]:
        packed = self._packed(batches, passes)
        shares = [self._share(each) for each in packed]
        device = self._packed_model.device
        tops = [
            (
                torch.zeros(len(each.targets), k, device=device),
                torch.zeros(len(each.targets), k, dtype=torch.int32, device=device),
            )
            for each in packed[: len(batches)]
        ]

        def compute(number: int, is_last: bool) -> Any:
            fed = shares[number].fed
            if not is_last:
                return self._call(self._packed_model.decode, fed)
            own = self._call(self._packed_model.top_logprobs, fed, k)
            whole = [shares[number].whole(each) for each in own]
            if number < len(batches):
                for into, value in zip(tops[number], whole, strict=True):
                    into.copy_(value)

        self.run([share.fed.ids.shape[1] for share in shares], compute)
        return [(self.broadcast(logprobs), self.broadcast(tokens)) for logprobs, tokens in tops]

    def probe(
        self,
        tokens: int,
        hidden: Callable[[], torch.Tensor],
        logits: Callable[[], torch.Tensor],
    ) -> torch.Tensor | None:
        """Return ``logits()`` where the last stage is, after ``hidden()``, [1, tokens, H], on
        those before."""
        results: list[torch.Tensor] = []

        def compute(number: int, is_last: bool) -> torch.Tensor:
            out: torch.Tensor = self._call(logits if is_last else hidden)
            if is_last:
                results.append(out)
            return out

        self.run([tokens], compute)
        return results[0] if results else None

    def run(
        self,
        tokens: Sequence[int],
        compute: Callable[[int, bool], Any],
        *,
        learn: Callable[[int], None] | None = None,
    ) -> None:
        """Run micro-batches of so many ``tokens``.

        ``compute(number, is_last)`` returns the hidden states [1, S, H] of one, or after the last
        stage its loss. ``learn``: is called before each backward pass; None: there is none.
        """
        if self._tp is not None:
            group = self._tp.get_group()
            tokens = [len(own_slice(torch.arange(count), group)) for count in tokens]
        ordered = self._layout.orders(len(tokens), backward=learn is not None)
        mail = _Mail(ordered, tokens, self, self._own.rank, self._packed_model)
        under_way: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        for action in ordered[self._own.stage]:
            _, virtual_stage, number = action
            stage = self._stages[virtual_stage]
            if action.kind == "F":
                hidden = mail.receive(action.needs) if virtual_stage else None
                if hidden is not None and learn is not None:
                    hidden.requires_grad_()
                with self._as(stage, hidden):
                    out = compute(number, virtual_stage == self.last)
                if virtual_stage < self.last:
                    mail.send(action, out.detach())
                if learn is not None:
                    under_way[virtual_stage, number] = hidden, out
            elif learn is not None:
                hidden, out = under_way.pop((virtual_stage, number))
                gradient = mail.receive(action.needs) if virtual_stage < self.last else None
                learn(number)
                self._model.set_modules_to_backward_prefetch([_units(stage.layers[-1])[-1]])
                torch.autograd.backward(out, gradient)
                if hidden is not None and hidden.grad is not None:
                    mail.send(action, hidden.grad)
        mail.close()

    def _packed(self, batches: Sequence[Packing], count: int) -> list[PackedBatch]:
        """Pack ``batches``, and let idle ones follow up to ``count``."""
        packed = [pack_batch() for pack_batch in batches]
        idle = idle_batch(self._packed_model.device)
        return [*packed, *[idle] * (count - len(packed))]

    @contextmanager
    def _as(self, stage: PipelineStage, given: torch.Tensor | None) -> Iterator[None]:
        self._decoder._modules.update(stage.modules)
        stage.entry.given = given
        try:
            yield
        finally:
            self._decoder._modules.update(self._kept)
            stage.entry.given = None

    def rank_of(self, stage: int) -> int:
        """Return the rank with which this one exchanges what stage ``stage`` sends or receives."""
        return self._ranks[self._layout.stage_of(stage)]

    def group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._up if source < target else self._down

    def broadcast(self, value: torch.Tensor, stage: int | None = None) -> torch.Tensor:
        """Return ``value`` as stage ``stage`` (default: the last) has it; it is overwritten on the
        others."""
        source = self.rank_of(self.last if stage is None else stage)
        dist.broadcast(value, source, group=self._up)
        return value

    def broadcast_from_last(self, value: Value) -> Value:
        """Return ``value``, which JSON can write, as the last stage has it."""
        text = json.dumps(value).encode().ljust(SHARED_BYTES)
        buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._packed_model.device)
        shared: Value = json.loads(bytes(self.broadcast(buffer).cpu().numpy()))
        return shared

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` added up over the stages."""
        summed = values.to(self._packed_model.device, copy=True)
        dist.all_reduce(summed, group=self._up)
        return summed.cpu()

    def join_tied(self, gradient: torch.Tensor) -> None:
        """Add to the ``gradient`` of embeddings that are the output head too what the other end of
        the pipeline has."""
        if self._own.stage not in (0, self._layout.last_stage):
            return
        me = self._own.rank
        other = self.rank_of(self.last if self._own.stage == 0 else 0)
        other_gradient = torch.empty_like(gradient)
        sending: Any = dist.isend(gradient.clone(), other, group=self.group(me, other))
        dist.recv(other_gradient, other, group=self.group(other, me))
        gradient += other_gradient
        sending.wait()


class _Mail:
    """The messages that this rank sends and receives while a pipeline runs.

    From each other rank it receives what comes next in that rank's order; one of them is always
    asked for ahead.
    """

    def __init__(
        self,
        ordered: list[list[Action]],
        tokens: Sequence[int],
        pipeline: Pipeline,
        own_rank: int,
        packed_model: PackedModel,
    ) -> None:
        self._tokens = tokens
        self._pipeline = pipeline
        self._packed_model = packed_model
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._held: dict[Action, torch.Tensor] = {}
        self._me = own_rank
        self._coming: dict[int, deque[Action]] = {}
        for stage, order in enumerate(ordered):
            rank = pipeline.rank_of(stage)
            self._coming[rank] = deque(
                a for a in order if self._to(a) == self._me and rank != self._me
            )
        self._asked: dict[int, tuple[Action, Any, torch.Tensor]] = {}
        for rank in self._coming:
            self._ask(rank)

    def _to(self, action: Action) -> int:
        """Return the rank that needs the result of ``action``; -1: none."""
        stage = action.stage + 1 if action.kind == "F" else action.stage - 1
        return self._pipeline.rank_of(stage) if 0 <= stage <= self._pipeline.last else -1

    def _ask(self, rank: int) -> None:
        if self._coming[rank]:
            action = self._coming[rank].popleft()
            model = self._packed_model
            shape = 1, self._tokens[action.number], model.hidden_size
            buffer = torch.empty(shape, dtype=model.dtype, device=model.device)
            asked = dist.irecv(buffer, rank, group=self._pipeline.group(rank, self._me))
            self._asked[rank] = action, asked, buffer

    def send(self, action: Action, hidden: torch.Tensor) -> None:
        to = self._to(action)
        hidden = hidden.to(self._packed_model.dtype).contiguous()
        if to == self._me:
            self._held[action] = hidden
            return
        # gloo's sends say that they are complete only to those who wait
        if self._packed_model.device.type != "cpu":
            self._sent = [message for message in self._sent if not message[0].is_completed()]
        self._sent.append(
            (dist.isend(hidden, to, group=self._pipeline.group(self._me, to)), hidden)
        )

    def receive(self, action: Action) -> torch.Tensor:
        rank = self._pipeline.rank_of(action.stage)
        while action not in self._held:
            incoming, work, buffer = self._asked.pop(rank)
            work.wait()
            self._held[incoming] = buffer
            self._ask(rank)
        return self._held.pop(action)

    def close(self) -> None:
        for sending, _ in self._sent:
            sending.wait()


def _units(layer: Any) -> list[Any]:
    """Return the modules of ``layer`` that FSDP gathers, in the order in which their forward passes
    end."""
    inside = [
        each
        for each in layer.modules()
        if each is not layer and hasattr(each, "set_requires_gradient_sync")
    ]
    return [*inside, layer]
