"""Hosts in the status of a run: machines, states, and the workers that each has started last."""

from __future__ import annotations

from typing import Any

from api.schemas.runs import Host
from api.server.routes.runs import _hosts
from api.server.service.run_status import RunStatus
from pipeline.data.events import Event


def test_hosts_are_shown_with_their_workers_of_now() -> None:
    status = RunStatus()
    number = 0

    def change(worker: str, change: str, **where: Any) -> None:
        nonlocal number
        number += 1
        data = {"stage": worker.rpartition("-")[0], "worker": worker, "change": change, **where}
        status.totals.apply(Event(f"{number}-0", 1.0, "worker", data))

    change("flow-0", "ready", node="head", host="")
    for host, node in (("host-a1", "m1"), ("host-b2", "m2")):
        change(host, "ready", node=node, host=host)
    change("rollout-0", "ready", node="m1", host="host-a1")
    change("update-0", "ready", node="m2", host="host-b2")
    change("host-a1", "died")
    change("rollout-0", "ready", node="m2", host="host-b2")
    assert list(_hosts(status)) == [
        Host(name="host-a1", node="m1", state="died", workers=[]),
        Host(name="host-b2", node="m2", state="ready", workers=["rollout-0", "update-0"]),
    ]
