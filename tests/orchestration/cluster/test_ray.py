"""Runs on a Ray cluster of three raylets on this machine."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from orchestration.recipe.schema import Recipe
from orchestration.run.run import Run
from pipeline.index.embedded import EmbeddedIndex
from tests.orchestration.runs import TINY, complete, executing, recipe

pytest.importorskip("ray")


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network address")
        return str(probe.getsockname()[0])


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an index that other machines reach, with a password."""
    server = EmbeddedIndex(tmp_path_factory.mktemp("index"))
    server.start()
    address = own_address()
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    with redis.Redis.from_url(server.url) as client:
        for name, value in (("requirepass", "a-password"), ("bind", address), ("port", port)):
            client.config_set(name, value)
            client.execute_command("AUTH", "a-password") if name == "requirepass" else None
    yield f"redis://:a-password@{address}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    # Ray lowers the priority of workers; on a busy machine they would get no time.
    # Its memory monitor kills workers when other processes of this machine fill the memory.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=3)
    yield cluster
    cluster.shutdown()


CLUSTER: dict[str, Any] = {
    "launch__launcher": "ray",
    "pipeline__serve": "0.0.0.0",
    "sync__transport": "collective",
    "sync__serve": "0.0.0.0",
    "rollout__workers": 3,
    "train__dp": 2,
    "launch__startup_timeout": 280.0,
}


def on_ray(index: str, cluster: Any, **changes: Any) -> Recipe:
    return recipe(TINY, **{**CLUSTER, "pipeline__index": index, "launch__address": cluster.address, **changes})


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_tiny_trains_on_three_nodes(index: str, cluster: Any, tmp_path: Path) -> None:
    run = Run.create(on_ray(index, cluster), tmp_path / "run")
    watched, result = await complete(run)
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == list(range(6))
    assert result.checkpoint is not None
    assert result.checkpoint.version == 6
    hosts = [event for event in watched.of("worker") if event["stage"] == "host"]
    ready = {event["worker"]: event for event in hosts if event["change"] == "ready"}
    assert len(ready) == 3, hosts
    assert {"ready"} <= {event["change"] for event in hosts} <= {"ready", "stopped"}
    assert all(event["node"] == platform.node() for event in ready.values())
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} >= {"update-0.log", "rollout-2.log", "ray.log"}
    places = {event["worker"]: event.get("host", "") for event in watched.of("worker") if event["change"] == "ready"}
    assert places["update-0"] == places["update-1"] in ready
    assert {places[f"rollout-{number}"] for number in range(3)} <= set(ready)
    assert places["flow-0"] == "", "on the head"
    for event in ready.values():
        assert ended(event["pid"])


async def test_a_cluster_that_is_too_small_is_refused(index: str, cluster: Any, tmp_path: Path) -> None:
    of = on_ray(index, cluster, rollout__threads=64)
    watched, result = await complete(Run.create(of, tmp_path / "run"))
    assert result.state == watched.of("state")[-1]["state"] == "failed"
    assert "no room for rollout-0 (CPU 64)" in result.reason


async def test_an_address_without_a_cluster_is_refused(index: str, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        of = recipe(
            TINY, **{**CLUSTER, "pipeline__index": index, "launch__address": f"127.0.0.1:{unused.getsockname()[1]}"}
        )
        _, result = await complete(Run.create(of, tmp_path / "run"))
    assert result.state == "failed"
    assert "launch.address = '127.0.0.1:" in result.reason


async def test_a_killed_raylet_costs_no_sample(index: str, cluster: Any, tmp_path: Path) -> None:
    of = on_ray(index, cluster, train__steps=3000, checkpoint__every=4)
    async with executing(Run.create(of, tmp_path / "run")) as (watched, work):

        def events(worker: str | None, change: str) -> int:
            return sum((e["worker"], e["change"]) == (worker, change) for e in watched.of("worker"))

        await watched.until(lambda: len(watched.of("step")) >= 6, 280)
        assert watched.run.supervisor is not None
        documents = watched.run.supervisor.index
        host = await documents.get(f"host:{await documents.get('life:rollout-0')}")
        pid = next(event["pid"] for event in watched.of("worker") if event["worker"] == host)
        raylet = psutil.Process(pid).parent()
        assert raylet is not None
        assert raylet.name() == "raylet"
        raylet.kill()
        await watched.until(lambda: events(host, "died") == 1 and events("rollout-0", "ready") >= 2, 280)
        made = len(watched.of("step"))
        await watched.until(lambda: len(watched.of("step")) > made + 3, 280)
        watched.stop.set()
        result = await work
    assert result.state == "stopped", result.reason
    assert events(host, "died") == 1
    groups = {step["step"]: step["groups"] for step in watched.of("step")}  # of each step its last event
    assert sorted(groups) == list(range(len(groups)))
    assert sorted(group for of_step in groups.values() for group in of_step) == list(range(len(groups) * 4))
