"""The process groups of a train engine's ranks: how they meet, and one device mesh for each use."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pipeline.data.arena import shared_memory_directory
from pipeline.node import node_id
from stages import device as devices
from stages.parallel.layout import Layout, RankCoordinates

SECRET = "asyncdock-secret"  # key of the store in which the ranks meet


def join(
    coordinates: RankCoordinates, store: dist.Store, device: torch.device, timeout: float
) -> bytes:
    """Join torch.distributed's default group. Return a secret of the ranks.

    Every rank calls this; it returns when all have. A collective call that a rank does not join
    within ``timeout`` seconds raises on the others. Ranks of several nodes meet in a store that has
    ``own_address``, by which this rank reaches the others.
    """
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
        store.set(SECRET, secrets.token_hex(32))
    secret = bytes(store.get(SECRET))
    prove(secret, device)
    return secret


def _interface(coordinates: RankCoordinates, store: dist.Store) -> str:
    """Return the network interface for gloo's ports.

    They ask for no credentials, so where all ranks are on one node they are opened on loopback.
    """
    if address := getattr(store, "own_address", ""):
        store.set(f"node {coordinates.rank}", node_id(shared_memory_directory()))
        if len({bytes(store.get(f"node {rank}")) for rank in range(coordinates.world)}) > 1:
            interfaces = psutil.net_if_addrs().items()
            return next(
                name
                for name, addresses in interfaces
                if address in [each.address for each in addresses]
            )
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def prove(secret: bytes, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Prove to the other ranks of ``group`` that this one knows ``secret``, which it read from the
    store in which the ranks met, and check their proofs. A process of another user that has
    connected to a rank's port cannot. Raises ``PermissionError``."""

    def proof(rank: int) -> bytes:
        return hmac.digest(
            secret, f"{dist.get_process_group_ranks(group)} {rank}".encode(), "sha256"
        )

    local = torch.frombuffer(bytearray(proof(dist.get_rank(group))), dtype=torch.uint8).to(device)
    proofs = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(proofs, local, group=group)
    for rank, rank_proof in enumerate(proofs):
        if not hmac.compare_digest(bytes(rank_proof.cpu().numpy()), proof(rank)):
            raise PermissionError(
                f"rank {rank} of a train engine's group is a process that did not meet the others; "
                f"start again"
            )


class Meshes:
    """Meshes of the ranks of ``layout``, whose neighbours in a mesh are a process group.

    Every rank makes them together; ``checked`` is called with each group. Attributes are this
    rank's part of each.

    ``layers``, ``outside``, ``experts``: see :attr:`~stages.parallel.layout.Layout.meshes`;
    dimensions ``("dp",)``, or with copies ``("dp_replicate", "dp")``. ``tp``, ``ep``, ``cp``: None
    for one rank. ``replicas``: one rank of each share of the batch. ``pipes``: two groups of the
    same ranks, one of each pipeline stage; none for one stage.
    """

    def __init__(
        self, layout: Layout, kind: str, checked: Callable[[dist.ProcessGroup], None]
    ) -> None:
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
        self.pipes = (
            [self._mesh("stages")["pp"].get_group() for _ in range(2)] if stages > 1 else []
        )

    def _mesh(self, use: str) -> DeviceMesh:
        """Return the mesh for ``use`` over all ranks, with dimensions of one rank left out but for
        ``dp`` and ``tp``."""
        sizes = {
            name: size
            for name, size in self.layout.meshes[use].items()
            if size > 1 or name in ("dp", "tp")
        }
        mesh = init_device_mesh(self._kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for group in mesh.get_all_groups():
            self._checked(group)
        return mesh

    def copies(self, parameter: DTensor) -> int:
        """Return the number of ranks that hold the same shard of ``parameter`` and get the same
        gradient."""
        distinct = 1
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            distinct *= 1 if placement.is_replicate() else size
        return self.layout.stage_ranks // distinct


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _data(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data-parallel dimensions of ``mesh``."""
    return mesh["dp_replicate", "dp"] if "dp_replicate" in _names(mesh) else mesh["dp"]
