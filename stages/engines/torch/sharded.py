"""The torch training engine over several ranks: FSDP2 shards each layer over ``dp``, DTensor splits its matrices over
``tp``.

    rank r of dp · tp:   its share of the rows (the same for the tp ranks of one replica)
                           ─▶ micro-batches as on one rank, idle passes until all ranks have made as many
                           ─▶ layer by layer: gather from dp ▸ compute, summing over tp ▸ free; backward: scatter gradients
    all ranks, per step:   tokens and rows of the whole batch (the loss is normalised as in one process),
                           the norm of the whole gradient, the reported metrics

Each rank's AdamW works on its own shards, as plain tensors: the update is elementwise. Matrices in layers are split over dp
· tp, and so are embeddings and head (over all ranks, in the model's own FSDP group). Only the norms inside layers are on
every tp rank. Every call is collective: all ranks make the same calls in the same order, from one thread each.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from pipeline.node import node_id
from pipeline.warehouse.arena import shared_memory_directory
from stages import device as devices
from stages.adapters.export import ADAPTER, base_weights, save_adapter, write_merged
from stages.adapters.options import AdapterOptions
from stages.adapters.training import fill_adapters
from stages.engines.torch.optimizer import bound_gradients
from stages.engines.torch.packing import PackedBatch
from stages.engines.torch.parallel.collectives import own_slice
from stages.engines.torch.parallel.context import divide
from stages.engines.torch.parallel.experts import deal_experts
from stages.engines.torch.parallel.mesh import Meshes
from stages.engines.torch.parallel.pipeline import Pipeline, keep_own
from stages.engines.torch.parallel.tensor import cut_matrices
from stages.engines.torch.train import Result, TorchTrainEngine, take_over
from stages.models import checkpoint_tensors, write_checkpoint
from stages.parallel.layout import RankCoordinates
from stages.parallel.options import fits_ulysses
from stages.weight_files import WeightFiles, materialize

_SECRET = "asyncdock-secret"  # key of the store in which the ranks meet
FILE_BYTES = 4 * 2**30  # of one safetensors file, which rank 0 holds in memory while it is written


def join(coordinates: RankCoordinates, store: dist.Store, device: torch.device, timeout: float) -> None:
    """Join torch.distributed's default group. Every rank calls this; it returns when all have. A collective call that a rank
    does not join within ``timeout`` seconds raises on the others. Ranks of several nodes meet in a store that has
    ``own_address``, by which this rank reaches the others."""
    devices.use(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(coordinates, store))
    dist.init_process_group(
        devices.backend(device),
        store=store,
        rank=coordinates.rank,
        world_size=coordinates.world,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.index is not None and devices.splits_groups(device) else None,
    )
    if coordinates.rank == 0:
        store.set(_SECRET, secrets.token_hex(32))
    prove(bytes(store.get(_SECRET)), device)


def _interface(coordinates: RankCoordinates, store: dist.Store) -> str:
    """Returns the network interface for gloo's ports. They ask for no credentials, so where all ranks are on one node they
    are opened on loopback."""
    if address := getattr(store, "own_address", ""):
        store.set(f"node {coordinates.rank}", node_id(shared_memory_directory()))
        if len({bytes(store.get(f"node {rank}")) for rank in range(coordinates.world)}) > 1:
            found = psutil.net_if_addrs().items()
            return next(name for name, addresses in found if address in [each.address for each in addresses])
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def prove(secret: bytes, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Each rank of ``group`` proves to the others that it knows ``secret``, which it read from the store in which the ranks
    met. A process of another user that has connected to a rank's port cannot. Raises ``PermissionError``."""

    def proof(rank: int) -> bytes:
        return hmac.digest(secret, f"{dist.get_process_group_ranks(group)} {rank}".encode(), "sha256")

    own = torch.frombuffer(bytearray(proof(dist.get_rank(group))), dtype=torch.uint8).to(device)
    proofs = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(proofs, own, group=group)
    for rank, found in enumerate(proofs):
        if not hmac.compare_digest(bytes(found.cpu().numpy()), proof(rank)):
            raise PermissionError(
                f"rank {rank} of a train engine's group is a process that did not meet the others; start again"
            )


class ShardedTrainEngine(TorchTrainEngine):
    """A :class:`TorchTrainEngine` with a model sharded over the ranks of a layout; this one is at ``coordinates``.
    With ``store`` it joins the others (:func:`join`) and leaves at :meth:`close`; without, torch.distributed is
    initialised already.

    Every rank passes the same whole ``model`` (on the CPU), or with ``weights`` a skeleton of it, of which it reads its own
    shard alone (:mod:`stages.weight_files`). To :meth:`train_batch` and :meth:`logprobs` it passes the rows of its replica's
    share: at least one, disjoint from those of other replicas. Mini-batches are cut from the rows of all ranks; a replica
    without a row of one makes idle passes. Results equal those of one process with all rows, up to the order of sums;
    metrics are the same on all ranks. With ``compute``, FSDP2 makes the copies in which a rank computes as it gathers a
    layer; a rank holds shards of the master weights alone. Micro-batches have ``token_budget`` tokens for each
    context-parallel rank.

    Raises ValueError for a tensor-parallel plan that this engine does not support.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        coordinates: RankCoordinates,
        *,
        weights: WeightFiles | None = None,
        store: dist.Store | None = None,
        timeout: float = 300.0,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        layout = coordinates.layout
        self.coordinates = coordinates
        self._weights = weights
        self._kind = type(model).__name__  # FSDP makes it another class
        self._joined, self._secret = store is not None, b""
        device = devices.of_rank(torch.device(device) if device is not None else devices.select(), coordinates.rank)
        if store is not None:
            join(coordinates, store, device, timeout)
            self._secret = bytes(store.get(_SECRET))
        self._base: dict[str, torch.Tensor] = {}  # on rank 0: what exports add adapters to, where no file has it
        self._context_parallel = layout.context_parallel
        heads = model.config.get_text_config().num_attention_heads if layout.cp > 1 else layout.tp
        if layout.context_parallel == "ulysses" and not fits_ulysses(heads, layout.tp, layout.cp):
            raise ValueError(f"cp: {layout.cp} ranks cannot share {heads} heads evenly; use context_parallel = 'ring'")
        if layout.defers_gradients and options.get("adapters") is not None:
            raise ValueError("pipeline: 'zbv' defers gradients of matrices, which adapters freeze; use 'auto'")
        super().__init__(model, device=device, **options)
        if self._token_budget is not None:
            self._token_budget *= layout.cp

    def _place(self, compute: torch.dtype) -> dict[str, nn.Parameter]:
        own, kind = self.coordinates, self.device.type
        self._meshes = Meshes(own.layout, kind, partial(prove, self._secret, self.device))
        self.checkpoint_group = dist.new_group(backend="gloo")  # of calls beside those of training
        prove(self._secret, torch.device("cpu"), self.checkpoint_group)
        master = getattr(torch, self._adapters.dtype) if self._adapters else self._dtype
        self._dtype = compute
        if self._adapters is not None and self._weights is None and own.rank == 0:  # no file has them
            self._base = {name: value.clone() for name, value in base_weights(self.model).items()}
        saved, buffers = self.model.state_dict(), dict(self.model.named_buffers())
        # Of the whole model, also where pipeline stages have parts of it: what is learned, and what else it saves.
        self._learned = {n: _like(p) for n, p in self.model.named_parameters()}
        self._fixed = {n: _like(saved[n]) for n in buffers.keys() & saved.keys()}
        parts, self._stage_of = keep_own(self.model, own) if self._meshes.pipes else ([], {})
        # Of these each rank has the gradient of its tokens or heads.
        self._partial = cut_matrices(self.model, self._meshes.tp, self._feeding) if self._meshes.tp else set()
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=master)
        for experts in deal_experts(self.model, self._meshes):
            _shard(experts, self._meshes.experts, policy, 1.0)
        layers = _layers(self.model)
        for layer in layers:
            _shard(layer, self._meshes.layers, policy, 1.0)
        in_turn = [part.layers for part in parts] or [layers]
        ahead = in_turn if kind == "cpu" else []  # devices gather ahead by streams of their own
        for layer, following in chain(*map(pairwise, ahead)):
            layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator, union-attr]
            following._set_unshard_async_op(True)  # type: ignore[operator, union-attr]
        # The model's own parameters have the same gradient on all tp ranks of a replica.
        _shard(self.model, self._meshes.outside, policy, float(own.layout.tp))
        if self._weights is not None:
            materialize(self.model, self.device)
            self._weights.fill(self.model)
            if self._adapters is not None:
                fill_adapters(self.model, self._adapters)
        self.model.forward = lambda compute, *arguments: compute(*arguments)  # FSDP gathers parameters around forward
        self._pipeline = Pipeline(self, parts, self._meshes) if parts else None
        self._passes = self._pipeline or self._passes
        take_over(self)
        self.model.reshard()  # type: ignore[operator]
        words: Any = self.model.get_input_embeddings()
        self._tied = ""  # the parameter that the first and the last pipeline stage have
        if self._pipeline is not None:
            words.sparse = False  # no head beside it adds a dense gradient
            ties = getattr(self.model, "_tied_weights_keys", None) or {}
            self._tied = next((of for name, of in ties.items() if name not in self._learned), "")
            self._tied = self._tied if self._pipeline.rank_of(self._pipeline.last) != self._pipeline.rank_of(0) else ""
        self._sharded: dict[str, DTensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}  # type: ignore[misc]
        return {name: nn.Parameter(p.to_local().detach()) for name, p in self._sharded.items()}

    def _run(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        return self.model(compute, *arguments)  # type: ignore[no-any-return]

    def _compute(self, packed: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._meshes.cp is None:
            return super()._compute(self._routed(packed))
        share = divide(packed, self._meshes.cp.get_group(), self._context_parallel)
        logprobs, entropy, values = super()._compute(self._routed(share.fed))
        return share.whole(logprobs), share.whole(entropy), share.whole(values)

    def _fed(self, packed: PackedBatch) -> PackedBatch:
        """What this rank feeds of ``packed``."""
        cp = self._meshes.cp
        return self._routed(packed if cp is None else divide(packed, cp.get_group(), self._context_parallel).fed)

    def _routed(self, packed: PackedBatch) -> PackedBatch:
        """``packed`` with the experts of the tokens that this rank's routers see."""
        if self._meshes.tp is None or packed.experts is None:
            return packed
        return replace(packed, experts=own_slice(packed.experts, self._meshes.tp.get_group()))

    def all_gather_counts(self, passes: Sequence[int]) -> list[tuple[int, int]]:
        counts = self._gathered(torch.tensor(passes, dtype=torch.int64))
        return list(zip(counts.amin(0).tolist(), counts.amax(0).tolist(), strict=True))

    def _of_all_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        counts = self._gathered(torch.tensor([len(rows)])).flatten().tolist()
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        every = [own[:count] for own, count in zip(self._gathered(padded), counts, strict=True)]
        return torch.cat(every)

    def _everywhere(self, holds: bool) -> bool:
        flag = torch.tensor(int(holds), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        return self._gathered(values.flatten()).sum(0).view_as(values).cpu()

    def _total_of_tokens(self, counts: torch.Tensor) -> torch.Tensor:
        counts = counts.to(self.device, copy=True)
        for mesh in (self._meshes.cp, self._meshes.tp):
            if mesh is not None:
                dist.all_reduce(counts, group=mesh.get_group())
        return self._passes.total(self._total(counts))

    def reduce_metrics(self, metrics: dict[str, float], everywhere: bool) -> dict[str, float]:
        names = sorted(metrics)
        if not everywhere:  # a replica without a row has measured nothing
            own = torch.frombuffer(bytearray(json.dumps(names).encode() + b"\n"), dtype=torch.uint8)
            lines = bytes(self._of_all_ranks(own[:, None]).numpy()).splitlines()
            names = sorted({name for line in lines for name in json.loads(line)})
        given = [metrics.get(name, -math.inf if name.startswith("max_") else 0.0) for name in names]
        values = self._gathered(torch.tensor(given, dtype=torch.float32)).double()
        totals, peaks = values.sum(0).tolist(), values.amax(0).tolist()
        added = {name: (peaks if name.startswith("max_") else totals)[at] for at, name in enumerate(names)}
        return self._passes.broadcast_from_last(added)

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """The tensors [n, …] of all replicas: [dp, n, …]."""
        widest = devices.widest_float(self.device)
        own = values.to(self.device, widest if values.dtype == torch.float64 else values.dtype)
        replicas = [torch.empty_like(own) for _ in range(self.coordinates.layout.replicas)]
        dist.all_gather(replicas, own, group=self._meshes.replicas.get_group())
        return torch.stack(replicas).cpu().to(values.dtype)

    def _clip(self) -> float:
        of_own = [p.grad.to_local() for n, p in self._sharded.items() if n in self._partial and p.grad is not None]  # type: ignore[attr-defined]
        if of_own and self._meshes.tp is not None:
            dist.all_reduce(summed := torch.cat([each.flatten() for each in of_own]), group=self._meshes.tp.get_group())
            for each, value in zip(of_own, summed.split([each.numel() for each in of_own]), strict=True):
                each.copy_(value.view_as(each))
        by_copies: dict[int, list[torch.Tensor]] = {}
        for name, parameter in self._sharded.items():
            is_tied = self._pipeline is not None and name == self._tied
            if is_tied and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                self._trained[name].grad = gradient = parameter.grad.to_local()  # type: ignore[attr-defined]
                if is_tied and self._pipeline is not None:
                    self._pipeline.join_tied(gradient)
                by_copies.setdefault(self._meshes.copies(parameter) * (2 if is_tied else 1), []).append(gradient)
        heads = []  # of values: whole on every rank, which has added up the gradient of its own rows
        for head in self._value_head.values():
            head.grad = torch.zeros_like(head) if head.grad is None else head.grad
            meshes = [mesh for mesh in (self._meshes.replicas, self._meshes.cp) if mesh is not None]
            for group in (*(mesh.get_group() for mesh in meshes), *self._meshes.pipes[:1]):
                dist.all_reduce(head.grad, group=group)
            heads.append(head.grad)
        if heads:
            by_copies.setdefault(self.coordinates.world, []).extend(heads)
        squares = torch.zeros((), device=self.device)
        for copies, gradients in by_copies.items():
            squares += nn.utils.get_total_norm(gradients).float().square() / copies
        dist.all_reduce(squares)
        return bound_gradients(self._trained.values(), self._grad_clip, squares.sqrt())

    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        self.model.zero_grad(set_to_none=True)

    def _take_back(self) -> None:
        super()._take_back()
        self.model.reshard()  # type: ignore[operator]  # what a forward has gathered is of the weights that are gone

    @torch.no_grad()
    def logprobs(self, batch: Any) -> torch.Tensor:
        try:
            return super().logprobs(batch)
        finally:
            self.model.reshard()  # type: ignore[operator]  # its own parameters stay gathered after a forward alone

    def close(self) -> None:
        super().close()
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Whole tensors, gathered one at a time. Every rank must iterate over all of them."""
        own = dict(self.model.named_parameters())
        for name, like in self._learned.items():
            if like.requires_grad:
                value = _whole(own[name].detach().to(self._dtype)) if name in own else None
                yield name, self._broadcast_from_stage(name, value, like)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = dict(self.model.named_buffers())
        return ((name, self._broadcast_from_stage(name, own.get(name), like)) for name, like in self._fixed.items())

    def _broadcast_from_stage(self, name: str, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """``value``, which the pipeline stage of ``name`` has."""
        if self._pipeline is None:
            return value  # type: ignore[return-value]
        dtype = like.dtype if name in self._fixed else self._dtype
        if value is None or self._stage_of[name] not in self.coordinates.virtual_stages:
            value = torch.empty(like.shape, dtype=dtype, device=self.device)
        return self._pipeline.broadcast(value.contiguous(), self._stage_of[name])

    def _saved(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if (like := self._sharded.get(name)) is None:  # a value head, which each rank has
            return value
        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        """Every rank calls this, unless ``state`` is given. Rank 0 writes files of at most ``FILE_BYTES``, or of one
        tensor."""
        if self._adapters is not None:
            return self._save_adapters(path, self._adapters, state)
        empty = {
            n: torch.empty(p.shape, dtype=self._dtype, device="meta") for n, p in self._learned.items()
        } | self._fixed
        values: Iterable[tuple[str, torch.Tensor]] = chain(self.weights(), self._buffers())
        if state is not None:
            values = ((name, state["model"][name]) for name in empty)
        if self.coordinates.rank:
            deque(values, maxlen=0)  # the calls that gather them
            return
        saved = (pair for n, v in values for pair in checkpoint_tensors(self.model, {n: v}).items())
        sizes = checkpoint_tensors(self.model, empty)
        write_checkpoint(self.model, path, sizes, saved, kind=self._kind, dtype=self._dtype, file_bytes=FILE_BYTES)

    def _save_adapters(self, path: Path, adapters: AdapterOptions, state: Mapping[str, Any] | None) -> None:
        names = [name for name, like in self._learned.items() if like.requires_grad]
        matrices = dict(self.weights()) if state is None else {name: state["model"][name] for name in names}
        if self.coordinates.rank == 0:
            matrices = {name: value.to(self._dtype) for name, value in matrices.items()}
            save_adapter(path.with_name(ADAPTER), self._adapter_config, matrices)
            base = self._weights or self._base
            write_merged(path, self.model, matrices, adapters.scale, base=base, kind=self._kind)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def _shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, divisor: float) -> None:
    sharded: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=policy)  # type: ignore[assignment]
    # Each rank's loss is its share of the whole, so gradients add up. gloo has no premultiplied sum.
    sharded.set_gradient_divide_factor(divisor)
    sharded.set_force_sum_reduction_for_comms(True)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered over dp first: torch warns about a gather over both dimensions, which it does in this order
    too."""
    if not isinstance(parameter, DTensor):
        return parameter
    placements = parameter.placements
    for dim in range(1, len(placements)):
        parameter = parameter.redistribute(placements=[*[Replicate()] * dim, *placements[dim:]])
    return parameter.full_tensor()
