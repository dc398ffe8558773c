"""A Ray cluster of several raylets on this machine, for benchmarks and tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import needs


@contextmanager
def raylets(number: int, cpus: int, **head: Any) -> Iterator[Any]:
    """Yield a :class:`ray.cluster_utils.Cluster` of ``number`` raylets with ``cpus`` CPUs each;
    ``head``: more arguments of the first one."""
    # Ray lowers the priority of workers; on a busy machine they would get no time.
    # Its memory monitor kills workers when other processes of this machine fill the memory.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    with needs("bench"):
        from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False, **head}
    )
    try:
        for _ in range(number - 1):
            cluster.add_node(num_cpus=cpus)
        yield cluster
    finally:
        cluster.shutdown()


def on_ray(address: str) -> dict[str, str]:
    """Returns the section `launch` of a recipe whose workers are placed on the cluster at
    ``address``."""
    return {"launcher": "ray", "address": address}
