"""The process groups of a train engine's ranks, one device mesh for each use."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from stages.parallel.layout import Layout


class Meshes:
    """Meshes of the ranks of ``layout``, whose neighbours in a mesh are a process group. Every rank makes them
    together; ``checked`` is called with each group. Attributes are this rank's part of each.

    ``layers``, ``outside``, ``experts``: see :attr:`~stages.parallel.layout.Layout.meshes`; dimensions ``("dp",)``, or
    with copies ``("dp_replicate", "dp")``. ``tp``, ``ep``, ``cp``: None for one rank. ``replicas``: one rank of each
    share of the batch. ``pipes``: two groups of the same ranks, one of each pipeline stage; none for one stage.
    """

    def __init__(self, layout: Layout, kind: str, checked: Callable[[dist.ProcessGroup], None]) -> None:
        self.layout = layout
        self._kind = kind
        self._checked = checked
        layers = self._mesh("layers")
        self.layers = _data(layers)
        self.tp = layers["tp"] if layers["tp"].size() > 1 else None
        self.outside = _data(self._mesh("outside"))
        experts = self._mesh("experts")
        self.experts = _data(experts)
        self.ep = experts["ep"] if "ep" in _names(experts) else None
        context = layout.meshes["context"]["cp"] > 1
        shared = context or "dp_replicate" in _names(layers)
        self.replicas = self._mesh("replicas")["dp"] if shared else layers["dp"]
        self.cp = self._mesh("context")["cp"] if context else None
        stages = layout.meshes["stages"]["pp"]
        self.pipes = [self._mesh("stages")["pp"].get_group() for _ in range(2)] if stages > 1 else []

    def _mesh(self, use: str) -> DeviceMesh:
        """The mesh for ``use`` over all ranks, with dimensions of one rank left out but for ``dp`` and ``tp``."""
        sizes = {name: size for name, size in self.layout.meshes[use].items() if size > 1 or name in ("dp", "tp")}
        mesh = init_device_mesh(self._kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for group in mesh.get_all_groups():
            self._checked(group)
        return mesh

    def copies(self, parameter: DTensor) -> int:
        """How many ranks hold the same shard of ``parameter`` and get the same gradient."""
        distinct = 1
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            distinct *= 1 if placement.is_replicate() else size
        return self.layout.stage_ranks // distinct


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _data(mesh: DeviceMesh) -> DeviceMesh:
    """The data-parallel dimensions of ``mesh``."""
    return mesh["dp_replicate", "dp"] if "dp_replicate" in _names(mesh) else mesh["dp"]
