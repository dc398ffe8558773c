"""The Ray driver of a run: a process that starts hosts on the nodes of a Ray cluster, as actors in
placement groups.

:mod:`orchestration.cluster.ray_cluster` begins it, once it has found the cluster.

    stdin    {"do": "nodes"}                                 stdout    {"nodes": {id: {…}}, "address": own, "cluster"}
             {"do": "start", "hosts": [{node, bundle, …}]}             {"ended": name, "reason": …}, once for each host
             its end: the hosts end, and this process too              (one JSON object a line)

It is apart from the supervisor, because Ray ends a process whose raylet dies. When it ends, its
actors end. Ray restarts nothing (`max_restarts = 0`): the supervisor places the workers of a lost
host again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import sys
import threading
from typing import Any

import stamina

from orchestration.cluster.host_actor import HostActor
from pipeline.compat.extras import extra
from pipeline.node import LOOPBACK, route_to

with extra("ray"):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

GRANT_SECONDS = 30.0  # for Ray to reserve what was free a moment ago
CONNECT_ATTEMPTS = 3
OBJECT_STORE = 100 * 2**20  # bytes of shared memory: hosts bring samples and weights by themselves
REASON_CHARACTERS = 300
END_SECONDS = 10.0  # in which hosts of an ended run end by themselves


class Driver:
    """The process that talks to Ray for a run.

    ``own_resource``: marks a cluster that is started for the run; "" for one that is joined.
    """

    def __init__(self, own_resource: str = "") -> None:
        self._own_resource = own_resource
        self._out = os.fdopen(os.dup(1), "w")
        self._lock = threading.Lock()
        os.dup2(2, 1)  # what Ray prints goes to the log
        self._watching: list[threading.Thread] = []

    def run(self, address: str, cpus: float) -> None:
        """Work until the standard input ends.

        A node of `local` has ``cpus`` at least, and is ended with its files.
        """
        options: dict[str, Any] = {
            "namespace": "asyncdock",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        if self._own_resource:
            options |= {
                "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)),
                "include_dashboard": False,
            }
            options |= {"resources": {self._own_resource: 1}, "object_store_memory": OBJECT_STORE}
        try:
            # A busy head may take longer to start a client's server than Ray waits for it.
            for attempt in stamina.retry_context(
                ConnectionError, attempts=CONNECT_ATTEMPTS, timeout=None
            ):
                with attempt:
                    context: Any = ray.init(address=address, **options)
        except (OSError, RuntimeError, ValueError) as error:
            return self._send(failed=" ".join(str(error).split())[:REASON_CHARACTERS])
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "nodes":
                nodes = self._nodes()
                self._send(nodes=nodes, address=self._own_address(nodes), cluster=address)
            for host in request.get("hosts", ()):
                self._watching.append(
                    threading.Thread(target=self._watch, args=(host,), daemon=True)
                )
                self._watching[-1].start()
        for thread in self._watching:
            thread.join(END_SECONDS)
        ray.shutdown()  # it ends the actors that are left
        if self._own_resource:
            shutil.rmtree(context.address_info["session_dir"], ignore_errors=True)

    def _send(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=self._out, flush=True)

    def _nodes(self) -> dict[str, Any]:
        free = ray.get(_free.remote()) if ray.util.client.ray.is_connected() else _free_resources()
        alive = [node for node in ray.nodes() if node["Alive"]]
        if ray.get_runtime_context().get_node_id() not in [node["NodeID"] for node in alive]:
            sys.exit(
                "the driver's own node is lost, and Ray has ended its actors"
            )  # the supervisor starts another driver
        return {
            node["NodeID"]: {
                "total": node["Resources"],
                "free": free.get(node["NodeID"], {}),
                "address": node["NodeManagerAddress"],
            }
            for node in alive
        }

    def _own_address(self, nodes: dict[str, Any]) -> str:
        """Return the address by which the nodes reach this machine: as Ray knows it, where it is
        one of them."""
        if self._own_resource:
            return LOOPBACK
        if not ray.util.client.ray.is_connected():
            return str(nodes[ray.get_runtime_context().get_node_id()]["address"])
        return route_to(next(iter(nodes.values()))["address"])

    def _watch(self, host: dict[str, Any]) -> None:
        """Start ``host`` and wait for its end; then what it had reserved is free again."""
        bundle = dict(host["bundle"])
        reason = ""
        group = placement_group(
            [host["bundle"]], bundle_label_selector=[{"ray.io/node-id": host["node"]}]
        )
        try:
            if not group.wait(GRANT_SECONDS):
                raise TimeoutError(f"Ray did not grant {bundle} within {GRANT_SECONDS:.0f} s")
            actor = ray.remote(HostActor).options(  # type: ignore[attr-defined]
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                resources=bundle,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=0
                ),
            )
            handle: Any = actor.remote()
            ray.get(handle.run.remote(**host["run"]))
        except Exception as error:
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()[0]
        with contextlib.suppress(Exception):  # the cluster is gone too
            remove_placement_group(group)  # with its actor
        self._send(ended=host["name"], reason=reason)


def _free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by its id."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


_free = ray.remote(num_cpus=0)(_free_resources)  # through Ray's client, which does not know them
