"""Devices of workers, on simulated nodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from api.terminal.plan_table import plan_table
from orchestration.launch.launchers import ProcessLauncher
from orchestration.recipe import devices
from orchestration.recipe.devices import DevicePool, Devices, assign
from orchestration.recipe.sizes.planner import plan
from stages import device_names
from tests.orchestration.recipe.test_planner import recipe

FOUR = {"cuda": ["0", "1", "2", "3"]}
REFERENCE = {"algorithm": {"options": {"kl_coef": 0.1}}}


def on(node: dict[str, list[str]], **sections: Any) -> dict[str, str]:
    given = assign(recipe(**sections), node)
    return {
        f"{kind}-{number}": f"{of.kind}:{'+'.join(of.names)}"
        for (kind, number), of in given.items()
    }


def test_two_replicas_a_reference_and_a_trainer_use_four_devices() -> None:
    found = on(FOUR, rollout={"workers": 2}, **REFERENCE)
    assert found == {
        "update-0": "cuda:0",
        "rollout-0": "cuda:1",
        "rollout-1": "cuda:2",
        "reference-0": "cuda:3",
    }


def test_a_critic_of_its_own_comes_before_the_reference() -> None:
    sections = {"algorithm": {"name": "ppo", "options": {"critic": "own", "kl_coef": 0.1}}}
    found = on(FOUR, **sections)
    assert found == {
        "update-0": "cuda:0",
        "rollout-0": "cuda:1",
        "critic-0": "cuda:2",
        "reference-0": "cuda:3",
    }


def test_fewer_devices_are_shared_in_turn_and_ranks_get_their_own_first() -> None:
    found = on({"npu": ["4", "6"]}, rollout={"workers": 2}, train={"dp": 2}, **REFERENCE)
    assert found == {
        "update-0": "npu:4",
        "update-1": "npu:6",
        "rollout-0": "npu:4",
        "rollout-1": "npu:6",
        "reference-0": "npu:4",
    }


def test_a_numbered_device_is_kept_and_the_others_avoid_it() -> None:
    section = {"workers": 2, "device": "cuda:1"}
    found = on({"cuda": ["7", "8", "9"]}, rollout=section, train={"dp": 2})
    assert found == {
        "update-0": "cuda:7",
        "update-1": "cuda:9",
        "rollout-0": "cuda:1",
        "rollout-1": "cuda:1",
    }
    assert assign(recipe(rollout=section), FOUR)["rollout", 0].environment() == {}, (
        "cuda:1 of all that are visible"
    )


def test_a_vllm_engine_gets_a_device_for_each_of_its_ranks() -> None:
    rollout = {"engine": "vllm", "workers": 2, "vllm": {"tensor_parallel": 2}}
    found = on({"cuda": ["0", "1", "2", "3", "4"]}, rollout=rollout)
    assert found == {"update-0": "cuda:0", "rollout-0": "cuda:1+2", "rollout-1": "cuda:3+4"}
    assert Devices("cuda", ("1", "2")).environment() == {"CUDA_VISIBLE_DEVICES": "1,2"}


def test_a_host_gives_the_devices_of_ended_workers_to_the_next_ones() -> None:
    pool = DevicePool({"cuda": ["5", "6"]})
    of = recipe(rollout={"workers": 4, "device": "cuda"})
    for number in range(3):
        pool.give(of, ("rollout", number))
    assert [devices.names for devices in pool.given.values()] == [("5",), ("6",), ("5",)]
    pool.take_back(("rollout", 1))
    pool.give(of, ("rollout", 3))
    assert pool.given["rollout", 3].names == ("6",)
    numbered = DevicePool({"cuda": ["5", "6"]})
    numbered.give(recipe(rollout={"device": "cuda:0"}), ("rollout", 0))
    numbered.give(of, ("rollout", 1))
    assert [devices.names for devices in numbered.given.values()] == [("0",), ("6",)], (
        "not that of the number 0"
    )


def test_colocated_ranks_have_a_device_each() -> None:
    found = on(FOUR, train={"dp": 2}, launch={"placement": "colocated"})
    assert found == {"colocated-0": "cuda:0", "colocated-1": "cuda:1"}


def test_what_computes_on_the_cpu_gets_no_device() -> None:
    assert on({}) == {}
    assert on(FOUR, rollout={"device": "cpu"}) == {"update-0": "cuda:0"}
    assert (
        on(FOUR, model={"source": "mock"}, rollout={"engine": "mock"}, train={"engine": "mock"})
        == {}
    )
    assert on(FOUR, rollout={"device": "npu"}) == {"update-0": "cuda:0"}, "torch refuses it by name"


def test_the_devices_of_a_node_are_those_that_its_processes_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(device_names, "_cpu_build", lambda: "")
    for name in (*device_names.VISIBLE["cuda"], *device_names.VISIBLE["npu"]):
        monkeypatch.delenv(name, raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert device_names.visible_devices("cuda", tmp_path) == ["0", "1"]
    assert device_names.visible_devices("npu", tmp_path) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5ebe")
    assert device_names.visible_devices("cuda", tmp_path) == ["3", "GPU-5ebe"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert device_names.visible_devices("cuda", tmp_path) == []


def test_check_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.terminal.plan_table.on_this_node", lambda: FOUR)
    of = recipe(rollout={"workers": 2}, launch={"launcher": "process"})
    cells = [str(cell) for column in plan_table(of, plan(of)).columns for cell in column.cells]
    assert "update-0 on cuda 0, rollout-0 on cuda 1, rollout-1 on cuda 2" in cells


async def test_a_worker_process_sees_its_own_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    launcher = ProcessLauncher(
        tmp_path, "spawn", devices=assign(recipe(), devices.on_this_node() or FOUR)
    )
    started: list[dict[str, str]] = []

    async def start(launch: Any) -> Any:
        started.append(launch.env)

    monkeypatch.setattr(launcher._starter, "start", start)
    for kind in ("update", "rollout", "flow"):
        await launcher.launch("run", "unix:///nothing", kind, 0, kind)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == [
        "0",
        "1",
        os.environ["CUDA_VISIBLE_DEVICES"],
    ]
