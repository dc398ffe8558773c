"""A train engine's work over several ranks: FSDP2 shards each layer over ``dp``, DTensor splits its
matrices over ``tp``.

    rank r of dp · tp:   its share of the rows (the same for the tp ranks of one replica)
                           ─▶ micro-batches as on one rank, idle passes until all made as many
                           ─▶ layer by layer: gather from dp ▸ compute, summing over tp ▸ free;
                              backward: scatter gradients
    all ranks, per step:   tokens and rows of the whole batch (the loss is normalised as in one
                           process), the norm of the whole gradient, the reported metrics

Each rank's AdamW works on its own shards, as plain tensors: the update is elementwise. Matrices in
layers are split over dp · tp, and so are embeddings and head (over all ranks, in the model's own
FSDP group). Only the norms inside layers are on every tp rank. Every call is collective: all ranks
make the same calls in the same order, from one thread each.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stages import device as devices
from stages.adapters.export import base_weights
from stages.adapters.training import fill_adapters
from stages.engines.torch.model.layers import use_plain_words
from stages.engines.torch.model.packed_model import PackedModel
from stages.engines.torch.model.packing import PackedBatch
from stages.engines.torch.optimizers.weights import bound_gradients
from stages.engines.torch.parallel.collectives import own_slice
from stages.engines.torch.parallel.context import divide
from stages.engines.torch.parallel.experts import deal_experts
from stages.engines.torch.parallel.interface import Parallel
from stages.engines.torch.parallel.mesh import Meshes, join, prove
from stages.engines.torch.parallel.pipeline import Pipeline, keep_own
from stages.engines.torch.parallel.runner import MicroBatchRunner, Share, install_packed_attention
from stages.engines.torch.parallel.tensor import cut_matrices
from stages.model.files import WeightFiles
from stages.model.load import checkpoint_tensors, write_checkpoint
from stages.parallel.layout import Layout, RankCoordinates
from stages.parallel.options import fits_ulysses
from stages.resharding.tensors import whole

# Bytes of one safetensors file, which rank 0 holds in memory while it is written.
FILE_BYTES = 4 * 2**30


class Sharded(Parallel):
    """Shares an engine's work among the ranks of a layout; this one is at ``coordinates``. With
    ``store`` it joins the others (:func:`~stages.engines.torch.parallel.mesh.join`), within
    ``timeout`` seconds, and leaves at :meth:`close`; without, torch.distributed is initialised
    already.

    Every rank passes the same whole model (on the CPU) to its engine, or with ``weights`` a
    skeleton of it, of which it reads its own shard alone (:mod:`stages.model.files`). To
    ``train_batch`` and ``logprobs`` it passes the rows of its replica's share: at least one,
    disjoint from those of other replicas. Mini-batches are cut from the rows of all ranks; a
    replica without a row of one makes idle passes. Results equal those of one process with all
    rows, up to the order of sums; metrics are the same on all ranks. FSDP2 makes the copies in
    which a rank computes as it gathers a layer; a rank holds shards of the master weights alone.
    """

    def __init__(
        self,
        coordinates: RankCoordinates,
        *,
        weights: WeightFiles | None = None,
        store: dist.Store | None = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__(coordinates)
        self.token_ranks = coordinates.layout.cp
        self.meshes: Meshes = None  # type: ignore[assignment]  # made by start, or place
        self._weights = weights
        self._frozen: dict[str, torch.Tensor] | None = None
        self._store = store
        self._timeout = timeout

    def beside(
        self, weights: WeightFiles | None, frozen: dict[str, torch.Tensor] | None = None
    ) -> Sharded:
        """Return what shares the work of another engine among the same ranks, by the process groups
        of this one, which was started, and closes last. ``frozen``: see
        :meth:`stages.model.files.WeightFiles.place`."""
        other = Sharded(self.coordinates, weights=weights)
        other.meshes = self.meshes
        other._frozen = frozen
        return other

    def start(self, device: torch.device) -> torch.device:
        device = devices.of_rank(device, self.coordinates.rank)
        if self._store is not None:
            secret = join(self.coordinates, self._store, device, self._timeout)
            self.meshes, self.checkpoint_group = _groups(self.coordinates, device, secret)
        return device

    def place(self, packed_model: PackedModel, compute: torch.dtype) -> dict[str, nn.Parameter]:
        coordinates = self.coordinates
        _check(packed_model, coordinates.layout)
        self.packed_model = packed_model
        self._device = packed_model.device
        if self.meshes is None:
            self.meshes, self.checkpoint_group = _groups(coordinates, self._device)
        model = packed_model.model
        adapters = packed_model.adapters
        master = getattr(torch, adapters.dtype) if adapters else packed_model.dtype
        packed_model.dtype = compute
        # On rank 0: what exports add adapters to, where no file has it.
        self._base: dict[str, torch.Tensor] = {}
        if adapters is not None and self._weights is None and coordinates.rank == 0:
            self._base = {name: value.clone() for name, value in base_weights(model).items()}
        # Of the whole model, also where pipeline stages have parts of it: what is learned, and
        # what else it saves.
        saved = model.state_dict()
        buffers = dict(model.named_buffers())
        self._learned = {n: _like(p) for n, p in model.named_parameters()}
        self._fixed = {n: _like(saved[n]) for n in buffers.keys() & saved.keys()}
        stages, self._stage_of = keep_own(model, coordinates) if self.meshes.pipes else ([], {})
        # Of these each rank has the gradient of its tokens or heads.
        self._partial: set[str] = set()
        if self.meshes.tp:
            self._partial = cut_matrices(model, self.meshes.tp, packed_model.feeding)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master)
        self._shard_layers(model, policy, [stage.layers for stage in stages])
        if self._weights is not None:
            self._weights.place(model, self._device, self._frozen)
            if adapters is not None:
                fill_adapters(model, adapters)
        # FSDP gathers parameters around forward.
        model.forward = lambda compute, *arguments: compute(*arguments)
        self._pipeline: Pipeline | None = None
        if stages:
            self._pipeline = Pipeline(packed_model, self._share, stages, self.meshes, coordinates)
        self.runner = self._pipeline or MicroBatchRunner(packed_model, self._share, model)
        install_packed_attention(packed_model, self.runner)
        self.reshard()
        self._tied = self._tied_across_stages()
        self.sharded = packed_model.trained()  # type: ignore[assignment]
        return {n: nn.Parameter(p.to_local().detach()) for n, p in self.sharded.items()}

    def _shard_layers(
        self,
        model: PreTrainedModel,
        policy: MixedPrecisionPolicy,
        of_stages: Sequence[Sequence[nn.Module]],
    ) -> None:
        """Let FSDP shard experts, layers, and what lies outside of them. ``of_stages``: the layers
        of each virtual stage, where there are several."""
        for experts in deal_experts(model, self.meshes):
            _shard(experts, self.meshes.experts, policy, 1.0)
        layers = _layers(model)
        for layer in layers:
            _shard(layer, self.meshes.layers, policy, 1.0)
        # Devices gather ahead by streams of their own.
        ahead = (of_stages or [layers]) if self._device.type == "cpu" else []
        for layer, following in chain(*map(pairwise, ahead)):
            layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator, union-attr]
            following._set_unshard_async_op(True)  # type: ignore[operator, union-attr]
        # The model's own parameters have the same gradient on all tp ranks of a replica.
        _shard(model, self.meshes.outside, policy, float(self.coordinates.layout.tp))

    def _tied_across_stages(self) -> str:
        """Return the parameter that the first and the last pipeline stage have on two ranks."""
        if self._pipeline is None:
            return ""
        use_plain_words(self.packed_model.model)
        if self._pipeline.rank_of(self._pipeline.last) == self._pipeline.rank_of(0):
            return ""
        ties = getattr(self.packed_model.model, "_tied_weights_keys", None) or {}
        return next((source for name, source in ties.items() if name not in self._learned), "")

    def _share(self, packed: PackedBatch) -> Share:
        """Return this rank's tokens of ``packed``, with the experts of those that its routers
        see, and which of them are counted."""
        cp = self.meshes.cp
        tp = self.meshes.tp
        share = Share(packed)
        if cp is not None:
            share = divide(packed, cp.get_group(), self.coordinates.layout.context_parallel)
        if tp is None:
            return share
        group = tp.get_group()
        experts, counted = (
            values if values is None else own_slice(values, group)
            for values in (share.fed.experts, share.fed.counted)
        )
        return replace(share, fed=replace(share.fed, experts=experts, counted=counted))

    def all_gather_counts(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        gathered = self._gathered(torch.tensor(counts, dtype=torch.int64))
        return list(zip(gathered.amin(0).tolist(), gathered.amax(0).tolist(), strict=True))

    def all_gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        counts = self._gathered(torch.tensor([len(rows)])).flatten().tolist()
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        gathered = zip(self._gathered(padded), counts, strict=True)
        return torch.cat([replica[:count] for replica, count in gathered])

    def all_true(self, holds: bool) -> bool:
        flag = torch.tensor(int(holds), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self._gathered(values.flatten()).sum(0).view_as(values).cpu()

    def total_of_tokens(self, counts: torch.Tensor) -> torch.Tensor:
        counts = counts.to(self._device, copy=True)
        for mesh in (self.meshes.cp, self.meshes.tp):
            if mesh is not None:
                dist.all_reduce(counts, group=mesh.get_group())
        return self.runner.total(self.total(counts))

    def reduce_metrics(self, metrics: dict[str, float], everywhere: bool) -> dict[str, float]:
        names = sorted(metrics)
        if not everywhere:  # a replica without a row has measured nothing
            text = json.dumps(names).encode() + b"\n"
            letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            lines = bytes(self.all_gather_rows(letters[:, None]).numpy()).splitlines()
            names = sorted({name for line in lines for name in json.loads(line)})
        neutral = {name: -math.inf if name.startswith("max_") else 0.0 for name in names}
        local_values = list((neutral | metrics).values())
        values = self._gathered(torch.tensor(local_values, dtype=torch.float32)).double()
        totals = values.sum(0).tolist()
        peaks = values.amax(0).tolist()
        reduced = {
            name: peak if name.startswith("max_") else total
            for name, total, peak in zip(names, totals, peaks, strict=True)
        }
        return self.runner.broadcast_from_last(reduced)

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tensors [n, …] of all replicas: [dp, n, …]."""
        widest = devices.widest_float(self._device)
        dtype = widest if values.dtype == torch.float64 else values.dtype
        local_values = values.to(self._device, dtype)
        replicas = [torch.empty_like(local_values) for _ in range(self.coordinates.layout.replicas)]
        dist.all_gather(replicas, local_values, group=self.meshes.replicas.get_group())
        return torch.stack(replicas).cpu().to(values.dtype)

    def clip(self, trained: Mapping[str, nn.Parameter], limit: float | None) -> float:
        if self.meshes.tp is not None:
            partial_ones = [p for name, p in self.sharded.items() if name in self._partial]
            _add_up(partial_ones, self.meshes.tp.get_group())
        # A gradient that several ranks hold counts once in the norm.
        by_copies: dict[int, list[torch.Tensor]] = {}
        for name, parameter in self.sharded.items():
            tied_to = self._pipeline if name == self._tied else None
            if tied_to is not None and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_local()  # type: ignore[attr-defined]
            trained[name].grad = gradient
            copies = self.meshes.copies(parameter)
            if tied_to is not None:
                tied_to.join_tied(gradient)
                copies *= 2
            by_copies.setdefault(copies, []).append(gradient)
        if heads := _of_value_head(self.packed_model.value_head.values(), self.meshes):
            by_copies.setdefault(self.coordinates.world, []).extend(heads)
        squares = torch.zeros((), device=self._device)
        for copies, gradients in by_copies.items():
            squares += nn.utils.get_total_norm(gradients).float().square() / copies
        dist.all_reduce(squares)
        return bound_gradients(trained.values(), limit, squares.sqrt())

    def reshard(self) -> None:
        self.packed_model.model.reshard()  # type: ignore[operator]

    def close(self) -> None:
        if self._store is not None:
            self._store = None
            dist.destroy_process_group()

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        parameters = dict(self.packed_model.model.named_parameters())
        dtype = self.packed_model.dtype
        for name, like in self._learned.items():
            if like.requires_grad:
                value = whole(parameters[name].detach().to(dtype)) if name in parameters else None
                yield name, self._broadcast_from_stage(name, value, like)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffers = dict(self.packed_model.model.named_buffers())
        for name, like in self._fixed.items():
            yield name, self._broadcast_from_stage(name, buffers.get(name), like)

    def _broadcast_from_stage(
        self, name: str, value: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Return ``value``, which the pipeline stage of ``name`` has."""
        if self._pipeline is None:
            return value  # type: ignore[return-value]
        dtype = like.dtype if name in self._fixed else self.packed_model.dtype
        if value is None or self._stage_of[name] not in self.coordinates.virtual_stages:
            value = torch.empty(like.shape, dtype=dtype, device=self._device)
        return self._pipeline.broadcast(value.contiguous(), self._stage_of[name])

    def saved(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if (like := self.sharded.get(name)) is None:  # a value head, which each rank has
            return value
        return DTensor.from_local(
            value,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None) -> None:
        """Write the model in files of at most ``FILE_BYTES``, or of one tensor, on rank 0. Every
        rank calls this, unless ``state`` is given."""
        packed_model = self.packed_model
        model = packed_model.model
        dtype = packed_model.dtype
        if packed_model.adapters is not None:
            names = [name for name, like in self._learned.items() if like.requires_grad]
            matrices = {n: state["model"][n] for n in names} if state else dict(self.weights())
            if self.coordinates.rank == 0:
                packed_model.save_adapters(path, matrices, self._weights or self._base)
            return
        learned = self._learned.items()
        empty = {n: torch.empty(p.shape, dtype=dtype, device="meta") for n, p in learned}
        empty |= self._fixed
        values: Iterable[tuple[str, torch.Tensor]] = chain(self.weights(), self._buffers())
        if state is not None:
            values = ((name, state["model"][name]) for name in empty)
        if self.coordinates.rank:
            deque(values, maxlen=0)  # the calls that gather them
            return
        saved = (pair for n, v in values for pair in checkpoint_tensors(model, {n: v}).items())
        write_checkpoint(
            model,
            path,
            checkpoint_tensors(model, empty),
            saved,
            kind=packed_model.kind,
            dtype=dtype,
            file_bytes=FILE_BYTES,
        )


def _check(packed_model: PackedModel, layout: Layout) -> None:
    config = packed_model.model.config.get_text_config()
    heads = config.num_attention_heads if layout.cp > 1 else layout.tp
    if layout.context_parallel == "ulysses" and not fits_ulysses(heads, layout.tp, layout.cp):
        raise ValueError(
            f"cp: {layout.cp} ranks cannot share {heads} heads evenly; use "
            f"context_parallel = 'ring'"
        )


def _add_up(parameters: Iterable[DTensor], group: dist.ProcessGroup) -> None:
    """Add up the gradients of ``parameters`` over ``group``: each rank has that of its tokens or
    heads."""
    gradients = [p.grad.to_local() for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
    if not gradients:
        return
    summed = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(summed, group=group)
    parts = summed.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _of_value_head(heads: Iterable[nn.Parameter], meshes: Meshes) -> list[torch.Tensor]:
    """Add up the gradients of a value head, which is whole on every rank, and return them."""
    shared = [mesh for mesh in (meshes.replicas, meshes.cp) if mesh is not None]
    groups = [*(mesh.get_group() for mesh in shared), *meshes.pipes[:1]]
    gradients = []
    for head in heads:
        if head.grad is None:
            head.grad = torch.zeros_like(head)
        for group in groups:
            dist.all_reduce(head.grad, group=group)
        gradients.append(head.grad)
    return gradients


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def _shard(
    module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, divisor: float
) -> None:
    sharded: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=policy)  # type: ignore[assignment]
    # Each rank's loss is its share of the whole, so gradients add up. gloo has no premultiplied
    # sum.
    sharded.set_gradient_divide_factor(divisor)
    sharded.set_force_sum_reduction_for_comms(True)


def _groups(
    coordinates: RankCoordinates, device: torch.device, secret: bytes = b""
) -> tuple[Meshes, dist.ProcessGroup]:
    """Return the process groups of the ranks, and that of checkpoints."""
    meshes = Meshes(coordinates.layout, device.type, partial(prove, secret, device))
    checkpoints = dist.new_group(backend="gloo")
    prove(secret, torch.device("cpu"), checkpoints)
    return meshes, checkpoints


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]
