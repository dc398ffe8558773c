"""Runs on a Ray cluster of raylets on this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.runs.executed import on_ray, raylets
from benchmarks.runs.overlap import SMOKE, asynchronous, ray_table
from benchmarks.runs.synchronous import synchronous_run
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.supervise.scale import request_scale
from orchestration.workers.engines import train_engine
from tests.orchestration.runs import MOCK, TINY, Watched, complete, executing, forks, recipe
from tests.ports import free_port

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def client_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(client_port: int) -> Iterator[Any]:
    with raylets(3, cpus=6, ray_client_server_port=client_port) as cluster:
        yield cluster


def of(address: str, base: dict[str, Any] = TINY, **changes: Any) -> Recipe:
    keys = {f"launch__{key}": value for key, value in on_ray(address).items()}
    return recipe(
        base, **{**keys, "rollout__workers": 3, "launch__startup_timeout": 280.0, **changes}
    )


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def hosts_of(watched: Watched, change: str) -> dict[str, dict[str, Any]]:
    """The events of hosts with this change, by the host's name."""
    return {
        e["worker"]: e
        for e in watched.of("worker")
        if (e["stage"], e["change"]) == ("host", change)
    }


async def test_at_staleness_0_a_run_on_three_nodes_learns_what_the_plain_loop_learns(
    cluster: Any, tmp_path: Path
) -> None:
    run = Execution(
        RunFolder.create(
            of(cluster.address, pipeline__staleness=0, train__steps=40, checkpoint__every=40),
            tmp_path / "run",
        )
    )
    watched, result = await complete(run)
    assert result.state == "finished", result.reason
    ready = hosts_of(watched, "ready")
    assert len(ready) == 3
    assert {event["node"] for event in ready.values()} == {platform.node()}
    places = {
        event["worker"]: event.get("host", "")
        for event in watched.of("worker")
        if event["change"] == "ready"
    }
    assert {places["update-0"], *(places[f"rollout-{number}"] for number in range(3))} == set(ready)
    assert places["flow-0"] == "", "on the head"
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} >= {
        "update-0.log",
        "rollout-2.log",
        "ray.log",
    }
    assert not hosts_of(watched, "died")
    assert all(ended(event["pid"]) for event in ready.values())
    rewards = []
    weights = {}
    async for step in synchronous_run(run.recipe):
        rewards.append(step.reward_mean)
        weights = {name: value.clone() for name, value in step.engine.weights()}
    assert [step["reward_mean"] for step in watched.of("step")] == rewards
    assert sum(rewards[-10:]) > 3 * sum(rewards[:10])
    assert result.checkpoint is not None
    engine = train_engine(run.recipe)
    result.checkpoint.load_into(engine)
    for name, value in engine.weights():
        assert torch.equal(value, weights[name]), name


async def test_a_killed_host_gets_its_room_again_and_rollouts_leave_and_join_also_through_rays_client(
    cluster: Any, client_port: int, tmp_path: Path
) -> None:
    keys = {"rollout__threads": 4, "train__steps": 30_000}  # no two rollouts have room on one node
    run = Execution(
        RunFolder.create(of(f"ray://127.0.0.1:{client_port}", MOCK, **keys), tmp_path / "run")
    )
    async with executing(run) as (watched, work):
        await watched.until(
            lambda: len(watched.of("step")) >= 2 and len(hosts_of(watched, "ready")) == 3, 280
        )

        def homes() -> list[str]:
            ready = ("rollout-0", "ready")
            return [e["host"] for e in watched.of("worker") if (e["worker"], e["change"]) == ready]

        await watched.until(lambda: bool(homes()), 280)
        first = hosts_of(watched, "ready")
        host = homes()[0]
        psutil.Process(first[host]["pid"]).kill()
        await watched.until(lambda: len(hosts_of(watched, "ready")) == 4, 280)
        made = len(watched.of("step"))
        await watched.until(lambda: len(watched.of("step")) > made + 3, 280)
        assert set(hosts_of(watched, "died")) == {host}

        def last(worker: str) -> str:
            return [e["change"] for e in watched.of("worker") if e["worker"] == worker][-1]

        assert watched.run.supervisor is not None
        for rollouts, change in ((2, "left"), (3, "ready")):
            await request_scale(watched.run.supervisor.index, rollouts)
            await watched.until(lambda: last("rollout-2") == change, 280)  # noqa: B023
        watched.stop.set()
        result = await work
    assert result.state == "stopped", result.reason


@pytest.mark.parametrize("where", ["a cluster", "nothing listens"])
async def test_what_cannot_start_is_refused(cluster: Any, where: str, tmp_path: Path) -> None:
    address = cluster.address if where == "a cluster" else f"127.0.0.1:{free_port()}"
    watched, result = await complete(
        Execution(RunFolder.create(of(address, rollout__threads=64), tmp_path / "run"))
    )
    assert result.state == "failed"
    reason = (
        ("no room for rollout-0 (CPU 64)")
        if where == "a cluster"
        else f"launch.address = '{address}'"
    )
    assert reason in result.reason
    assert watched.of("state")[-1]["state"] == "failed"


async def test_the_overlap_benchmark_measures_hosts(cluster: Any, tmp_path: Path) -> None:
    workload = SMOKE.on_hosts(2, cluster.address)
    arm = await asynchronous(workload, 2, tmp_path / "run", forks=forks())
    average = workload.groups * workload.group_size * workload.mean_tokens * (arm.last - arm.first)
    assert 0.5 < arm.tokens / average < 2
    assert ray_table([2], [arm]).splitlines()[-1].split()[:3:2] == ["2", "100.0%"]


async def test_raylets_are_killed_and_no_sample_is_lost(cluster: Any, tmp_path: Path) -> None:
    """First that of a node with rollout workers, then that of the run's Ray driver, with which all
    hosts end."""
    run = Execution(
        RunFolder.create(
            of(cluster.address, train__steps=3000, train__dp=2, checkpoint__every=4),
            tmp_path / "run",
        )
    )
    async with executing(run) as (watched, work):

        async def more_steps() -> None:
            made = len(watched.of("step"))
            await watched.until(lambda: len(watched.of("step")) > made + 3, 280)

        await watched.until(lambda: len(watched.of("step")) >= 6, 280)
        places = {
            e["worker"]: e["host"]
            for e in watched.of("worker")
            if e["change"] == "ready" and e.get("host")
        }
        assert places["update-0"] == places["update-1"]
        first = set(hosts_of(watched, "ready"))
        of_driver = cluster.head_node.all_processes["raylet"][0].process.pid
        raylets = {
            host: raylet_of(event["pid"]) for host, event in hosts_of(watched, "ready").items()
        }
        lost = (
            places["rollout-0"]
            if raylets[places["rollout-0"]] != of_driver
            else places["rollout-1"]
        )
        psutil.Process(raylets[lost]).kill()
        await watched.until(lambda: lost in hosts_of(watched, "died"), 280)
        await more_steps()
        assert set(hosts_of(watched, "died")) == {lost}
        psutil.Process(of_driver).kill()
        await watched.until(lambda: first <= set(hosts_of(watched, "died")), 280)
        await more_steps()
        watched.stop.set()
        result = await work
    assert result.state == "stopped", result.reason
    deaths = [
        event["worker"]
        for event in watched.of("worker")
        if (event["stage"], event["change"]) == ("host", "died")
    ]
    assert len(deaths) == len(set(deaths)), "one event for each"
    # of each step its last event
    groups = {step["step"]: step["groups"] for step in watched.of("step")}
    assert sorted(groups) == list(range(1, len(groups) + 1))
    assert sorted(group for of_step in groups.values() for group in of_step) == list(
        range(len(groups) * 4)
    )


def raylet_of(host: int) -> int:
    """The raylet of a host's process: it names the folder in which the fork server of its node has
    its output."""
    server = psutil.Process(host).ppid()
    return int(Path(os.readlink(f"/proc/{server}/fd/1")).parent.name.split("-")[1])
