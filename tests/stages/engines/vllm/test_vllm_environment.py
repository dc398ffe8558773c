"""vLLM reads the environment variables that it is started with."""

from __future__ import annotations

import pytest
from vllm import envs

from stages.engines.vllm.library import ENVIRONMENT, vllm_environment


def test_vllm_knows_each_of_its_variables() -> None:
    names = {name for name in ENVIRONMENT if name.startswith("VLLM_")}
    assert names <= envs.environment_variables.keys()


def test_processes_are_spawned_on_every_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU vLLM spawns them anyway; elsewhere its default is to fork a process that has
    threads."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    with vllm_environment(threads=None):
        assert envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"
