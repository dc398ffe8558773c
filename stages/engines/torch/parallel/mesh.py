"""The process groups of a train engine's ranks, one device mesh for each use."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from stages.parallel.options import Ranks
from stages.parallel.placement import Layout


class Meshes:
    """Meshes of ``ranks``, whose neighbours in a mesh are a process group. Every rank makes them together; ``checked`` is
    called with each group.

    ``layers``: the ranks that divide a layer's weights, ``("dp",)``, or with copies ``("dp_replicate", "dp")``; here
    context-parallel ranks count as data-parallel ones. ``outside``: those that divide the stage's other weights, with
    tensor-parallel ranks among them. ``tp``: None for one rank. ``replicas``: one rank of each share of the batch, with
    this rank's part of them. ``ep``: None for one rank. ``experts``: those that divide the experts of one rank of ``ep``,
    in the order of :mod:`stages.parallel.placement`; dimensions as those of ``layers``. ``cp``: those that divide the
    tokens of this rank's replica; None for one rank. ``pipes``: two groups of the same ranks, one of each pipeline stage.
    """

    def __init__(self, ranks: Ranks, kind: str, checked: Callable[[dist.ProcessGroup], None]) -> None:
        self.ranks, copies = ranks, ranks.dp_replicate
        shards = ranks.dp // copies * ranks.cp
        self._kind, self._checked = kind, checked
        data = ("dp_replicate", "dp") if copies > 1 else ("dp",)
        layers = self._mesh(pp=ranks.pp, dp_replicate=copies, dp=shards, tp=ranks.tp)
        self.layers, self.tp = layers[data], layers["tp"] if ranks.tp > 1 else None
        self.outside = self._mesh(pp=ranks.pp, dp_replicate=copies, dp=shards * ranks.tp)[data]
        dealt = Layout(copies, shards, ranks.tp, ranks.ep, etp=1)
        same = ranks.of_stage // (ranks.ep * dealt.expert_shard)
        experts = self._mesh(pp=ranks.pp, dp_replicate=same, dp=dealt.expert_shard, ep=ranks.ep)
        self.ep = experts["ep"] if ranks.ep > 1 else None
        self.experts = experts["dp_replicate", "dp"] if same > 1 else experts["dp"]
        inner = ranks.cp * ranks.tp
        self.replicas = (
            self._mesh(pp=ranks.pp, dp=ranks.dp, inner=inner)["dp"] if ranks.cp * copies > 1 else layers["dp"]
        )
        self.cp = self._mesh(pp=ranks.pp, dp=ranks.dp, cp=ranks.cp, tp=ranks.tp)["cp"] if ranks.cp > 1 else None
        pipes = [self._mesh(pp=ranks.pp, dp=ranks.of_stage)["pp"] for _ in range(2)] if ranks.pp > 1 else []
        self.pipes = [mesh.get_group() for mesh in pipes]

    def _mesh(self, **sizes: int) -> DeviceMesh:
        """A mesh over all ranks, with dimensions of one rank left out but for ``dp``."""
        kept = {name: size for name, size in sizes.items() if size > 1 or name in ("dp", "tp")}
        mesh = init_device_mesh(self._kind, tuple(kept.values()), mesh_dim_names=tuple(kept))
        for group in mesh.get_all_groups():
            self._checked(group)
        return mesh

    def copies(self, parameter: DTensor) -> int:
        """How many ranks hold the same shard of ``parameter`` and get the same gradient."""
        mesh, distinct = parameter.device_mesh, 1
        for size, placement in zip(mesh.shape, parameter.placements, strict=True):
            distinct *= 1 if placement.is_replicate() else size
        return self.ranks.of_stage // distinct
