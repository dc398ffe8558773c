"""What the ranks of a train engine open to others: ports on loopback alone, and a group that only
they are in."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stages.engines.torch.parallel.mesh import prove
from stages.parallel.layout import RankCoordinates
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def listening_addresses(ranks: RankCoordinates) -> list[str]:
    """Local addresses, as /proc/net has them, on which this process listens once its groups have
    been made."""
    mesh = init_device_mesh("cpu", (ranks.layout.replicas,), mesh_dim_names=("dp",))
    dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))
    links = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)
    ]
    own = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in own]


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def refused(ranks: RankCoordinates) -> str:
    """What is raised where one rank has another secret than the others."""
    prove(b"shared by both", CPU)
    try:
        prove(b"shared by both" if ranks.rank == 0 else b"a guess", CPU)
    except PermissionError as error:
        return str(error)
    return ""


def test_ranks_listen_on_loopback_alone() -> None:
    found = [address for addresses in on_ranks(2, 1, listening_addresses) for address in addresses]
    assert found
    assert set(found) <= {
        "0100007F",
        "00000000000000000000000001000000",
        "0000000000000000FFFF00000100007F",
    }


def test_a_rank_that_does_not_know_the_secret_is_refused_by_all() -> None:
    assert [message[:6] for message in on_ranks(2, 1, refused)] == ["rank 1", "rank 0"]
