"""Discovery of a process's queue: from its parent's environment, or in the key-value store of its
Ray cluster.

A worker of Ray inherits the environment of its node's raylet, which has no entry for a queue that
the driver opens after ray.init. So a driver announces its queue in the cluster's store, and every
process of the cluster looks there first.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.compat.extras import extra
from pipeline.node import node_id

# environment of the children of a process that starts a queue
INDEX = "ASYNCDOCK_INDEX"
RUN = "ASYNCDOCK_RUN"
_KEY = b"queue"
_NAMESPACE = b"asyncdock.transfer_queue"


def _ray() -> Any:
    """Return Ray, when this process is part of a cluster."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and getattr(ray, "is_initialized", bool)() else None


def _is_worker(ray: Any) -> bool:
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _announced() -> dict[str, str] | None:
    """Return the cluster's queue: ``url``, ``run``, and the ``node`` of the process that announced
    it."""
    if _ray() is None:
        return None
    with extra("ray"):
        from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(_KEY, namespace=_NAMESPACE)
    return None if value is None else json.loads(value)


def _node() -> str:
    """Return the name of this node: that of processes which find each other's Unix sockets."""
    return node_id(Path(tempfile.gettempdir()))


def _has_ended(queue: Mapping[str, str]) -> bool:
    """Return whether the server of a queue that was opened on this node is gone."""
    if not queue["url"].startswith("unix://") or queue["node"] != _node():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(urlsplit(queue["url"]).path) != 0


def find_queue() -> dict[str, str]:
    """Return the URL and run of the queue that this process belongs to; empty when it may open one.

    Raises RuntimeError in a worker of Ray that cannot reach the cluster's queue, or finds none: no
    other process would find a queue that this worker opened, and it would end with the worker."""
    queue = _announced()
    if queue is not None:
        if queue["url"].startswith("unix://") and queue["node"] != _node():
            raise RuntimeError(
                f"the queue of this Ray cluster listens on node {queue['node']!r} alone; open it "
                f"with "
                "init({'url': 'redis://…'}) there, a server that all nodes reach"
            )
        if not _has_ended(queue):
            return {"url": queue["url"], "run": queue["run"]}
    elif INDEX in os.environ:
        return {"url": os.environ[INDEX], "run": os.environ[RUN]}
    ray = _ray()
    if ray is not None and _is_worker(ray):
        state = (
            ("the queue of this Ray cluster has ended")
            if queue
            else "this Ray cluster has no queue"
        )
        raise RuntimeError(
            f"{state}; call init() in the driver, after ray.init(), or give init() "
            f"a url in each worker"
        )
    return {}


def announce(conf: Mapping[str, Any], *, chosen: bool) -> bool:
    """Announce the queue ``conf`` as the cluster's, where it has none; returns whether that was
    done. Raises RuntimeError when the cluster has another queue and this process has not ``chosen``
    its own by a URL."""
    ray = _ray()
    if ray is None or _is_worker(ray):
        return False
    with extra("ray"):
        from ray.experimental.internal_kv import _internal_kv_put

    announcement = {"url": conf["url"], "run": conf["run"], "node": _node()}
    put = partial(_internal_kv_put, _KEY, json.dumps(announcement).encode(), namespace=_NAMESPACE)
    other = _announced() if put(overwrite=False) else None
    if other is None or _has_ended(other):
        put(overwrite=True)
        return True
    if not chosen and (other["url"], other["run"]) != (announcement["url"], announcement["run"]):
        raise RuntimeError(
            f"this Ray cluster has a queue, run {other['run']!r}, and this process another one, "
            f"run {announcement['run']!r}; close() "
            "one of them, or call init() after ray.init(), which finds the cluster's"
        )
    return False


def withdraw(conf: Mapping[str, Any]) -> None:
    """Remove what :func:`announce` announced."""
    if (queue := _announced()) is not None and (queue["url"], queue["run"]) == (
        conf["url"],
        conf["run"],
    ):
        with extra("ray"):
            from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(_KEY, namespace=_NAMESPACE)
