"""The clusters on whose nodes the workers of a run can be started: a row each.

    launch.launcher = "ray" ─▶ CLUSTERS["ray"] ─▶ checks of launch.address, what must be installed
                                             └─▶ its class of hosts, which the run loads

A further backend is a row here and one file, with a class as
:class:`orchestration.launch.launchers.Hosts` describes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterBackend:
    """How a kind of cluster is named, found and used."""

    title: str
    """Its name in messages."""

    hosts: str
    """``module:class`` of what places workers on its nodes and starts hosts there."""

    extra: str
    """The extra of the package that it needs; "": none."""

    address: re.Pattern[str]
    """What ``launch.address`` may be, besides what the backend finds wrong when it connects."""

    address_fix: str
    """What to write there."""

    look: str = ""
    """``module:function``: says for `asyncdock check` in words which cluster an address leads to,
    or raises ValueError. "": nothing is said."""


CLUSTERS: dict[str, ClusterBackend] = {
    "ray": ClusterBackend(
        title="Ray",
        hosts="orchestration.cluster.ray_hosts:RayHosts",
        look="orchestration.cluster.ray_cluster:described",
        extra="ray",
        address=re.compile(r"auto|local|(ray://)?(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}"),
        address_fix="write HOST:6379, ray://HOST:10001, 'local', or 'auto' for the cluster of this "
        "machine",
    ),
}
