"""Placement of workers on the nodes of a cluster: properties over random clusters, and the cases
that people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.cluster import ray_hosts
from orchestration.cluster.placement import Node, bundles, describe_lack, needs, place
from orchestration.cluster.ray_hosts import RayHosts
from orchestration.launch.launchers import Unplaceable
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import remote_workers
from pipeline.index.client import Index
from tests.orchestration.runs import TINY, recipe

ON_RAY: dict[str, Any] = {
    "launch__launcher": "ray",
    "pipeline__index": "redis://a.server",
    "pipeline__serve": "0.0.0.0",
    "sync__transport": "network",
}


def of(**changes: Any) -> Recipe:
    return recipe(TINY, **{**ON_RAY, **changes})


def node(name: str, cpus: float = 16, gpus: float = 0) -> Node:
    return Node(name, {"CPU": cpus, "GPU": gpus})


def test_what_has_an_engine_is_placed_and_the_rest_stays_on_the_head() -> None:
    run = of(rollout__workers=2, train__dp=2, reward__workers=3)
    assert remote_workers(run) == {("rollout", 0), ("rollout", 1), ("update", 0), ("update", 1)}


def test_ranks_are_packed_and_rollouts_go_where_most_room_is() -> None:
    run = of(rollout__workers=3, train__dp=2)
    placed = place(run, remote_workers(run), [node("a", 3), node("b", 4), node("c", 2)], ())
    assert placed == {
        ("update", 0): "c",  # the narrowest node that has room for both
        ("update", 1): "c",
        ("rollout", 0): "b",
        ("rollout", 1): "a",
        ("rollout", 2): "b",
    }


def test_devices_are_reserved_with_their_workers() -> None:
    run = of(
        rollout__workers=2,
        rollout__threads=4,
        train__dp=4,
        train__device="auto",
        rollout__device="auto",
    )
    nodes = [node("a", 16, 4), node("b", 16, 2)]
    placed = place(run, remote_workers(run), nodes, ["cuda"])
    assert {placed["update", rank] for rank in range(4)} == {"a"}
    assert bundles(run, placed, ["cuda"]) == {"a": {"CPU": 4, "GPU": 4}, "b": {"CPU": 8, "GPU": 2}}
    assert needs(run, ("rollout", 0), ["npu"]) == {"CPU": 4, "NPU": 1}


def test_a_tensor_parallel_replica_is_never_cut() -> None:
    run = of(train__dp=2, train__tp=2, rollout__workers=1)
    placed = place(run, remote_workers(run), [node("a", 3), node("b", 3)], ())
    assert placed["update", 0] == placed["update", 1] != placed["update", 2] == placed["update", 3]
    too_narrow = place(run, remote_workers(run), [node(name, 1) for name in "abcdef"], ())
    assert set(too_narrow) == {("rollout", 0)}, "of ranks that train together all or none"


def test_an_engine_over_several_devices_is_within_a_node() -> None:
    run = of(rollout__engine="vllm", rollout__device="cuda", rollout__vllm={"tensor_parallel": 4})
    assert needs(run, ("rollout", 0), ["cuda"])["GPU"] == 4
    assert ("rollout", 0) not in place(
        run, [("rollout", 0)], [node("a", 8, 2), node("b", 8, 2)], ["cuda"]
    )
    assert place(run, [("rollout", 0)], [node("a", 8, 2), node("b", 8, 4)], ["cuda"]) == {
        ("rollout", 0): "b"
    }


def test_what_lacks_room_is_named_with_what_there_is() -> None:
    lack = describe_lack(of(), [("rollout", 0)], [node("a", 0.5)], ["cuda"])
    assert lack == "no room for rollout-0 (CPU 1, GPU 1); free are CPU 0.5, GPU 0"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=5),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]),
    st.integers(1, 5),
    st.sampled_from([(), ("cuda",)]),
)
def test_no_node_gives_more_than_it_has(
    sizes: list[tuple[int, int]], ranks: tuple[int, int], rollouts: int, devices: tuple[str, ...]
) -> None:
    run = of(train__dp=ranks[0], train__tp=ranks[1], rollout__workers=rollouts)
    nodes = [node(str(number), *size) for number, size in enumerate(sizes)]
    placed = place(run, remote_workers(run), nodes, devices)
    for name, taken in bundles(run, placed, devices).items():
        assert all(nodes[int(name)].free[resource] >= amount for resource, amount in taken.items())
    world = ranks[0] * ranks[1]
    assert sum(kind == "update" for kind, _ in placed) in (0, world)
    # Nothing is left out that would still fit somewhere.
    left = [
        Node(
            n.name,
            {
                r: a - bundles(run, placed, devices).get(n.name, {}).get(r, 0)
                for r, a in n.free.items()
            },
        )
        for n in nodes
    ]
    assert not place(run, remote_workers(run) - set(placed), left, devices)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_workers_of_a_lost_node_find_room_on_the_others(lost: str) -> None:
    run = of(rollout__workers=2, train__dp=2)
    nodes = [node("a", 8), node("b", 8)]
    placed = place(run, remote_workers(run), nodes, ())
    missing = [worker for worker, name in placed.items() if name == lost]
    rest = [name for name in nodes if name.name != lost]
    assert set(place(run, missing, rest, ())) == set(missing)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (
            {"launch__launcher": "process", "launch__address": "auto:1"},
            r"launch\.address = .*is of a cluster; set launch\.launcher = 'ray'",
        ),
        ({"launch__remote_rollouts": 1}, r"launch\.launcher = .*places all of them itself"),
        (
            {"rollout__device": "cuda:1"},
            r"rollout\.device = .*has the number of a device, which "
            r"Ray gives",
        ),
        ({"pipeline__index": "unix:///x.sock"}, r"pipeline\.index = .*is on this machine alone"),
        (
            {"pipeline__serve": "127.0.0.1"},
            r"pipeline\.serve = .*is reached from this machine alone",
        ),
        (
            {"launch__placement": "colocated", "sync__transport": "shared_memory"},
            r"launch\.placement = .*one machine",
        ),
    ],
)
def test_what_a_cluster_cannot_run_is_refused(change: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RecipeError, match=wrong):
        of(**change)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
async def test_a_node_that_has_not_said_what_it_has_is_waited_for(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was found "alive" without any resource, and the run failed.

    A cluster that stays too small is refused.
    """
    of = recipe(TINY, launch__launcher="ray", launch__address="10.0.0.1:6379", rollout__workers=2)
    hosts = RayHosts(of, tmp_path)
    asked = list[dict[str, Any]]()

    async def answer() -> dict[str, Any]:
        asked.append({})
        known = {"a": {"CPU": 2.0}, "b": {"CPU": 2.0} if seconds == 0.0 and len(asked) > 1 else {}}
        return {name: {"total": room, "free": room} for name, room in known.items()}

    async def sent(message: dict[str, Any]) -> None:
        started.extend(message["hosts"])

    started = list[dict[str, Any]]()
    monkeypatch.setattr(hosts, "_ask", answer)
    monkeypatch.setattr(hosts, "_send", sent)
    monkeypatch.setattr(ray_hosts, "ASK_SECONDS", 0.01)
    hosts.begin(Index("redis://127.0.0.1:1", "a-run"), "redis://10.0.0.1:6379")
    hosts._began -= seconds
    if seconds:
        with pytest.raises(Unplaceable, match="add nodes, or ask for less"):
            await hosts.host_of(("rollout", 1))
        assert not started
    else:
        await hosts.host_of(("rollout", 1))
        assert {host["node"] for host in started} == {"a", "b"}
