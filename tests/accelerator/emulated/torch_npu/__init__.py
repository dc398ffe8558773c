"""A torch_npu for tests: a device ``npu`` on the CPU with the names, operators and schemas of the
real library.

    EMULATED_NPU=2.10           its allocator is none that torch.accelerator can ask, as up to torch_npu 2.12
    EMULATED_NPU_LIBRARY=FILE   device.cpp, compiled
    EMULATED_NPU_CALLS=FOLDER   at its end each process writes there how often it called which operator

It says whether code asks the right device in the right order. It says nothing about a real NPU's
numbers or speed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_spec = importlib.util.spec_from_file_location("emulated_npu", os.environ["EMULATED_NPU_LIBRARY"])
assert _spec is not None
assert _spec.loader is not None
_C: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_C)
__version__ = os.environ.get("EMULATED_NPU", "2.13")

torch.utils.rename_privateuse1_backend("npu")


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Stream:
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)  # type: ignore[no-any-return]


@contextlib.contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    with contextlib.nullcontext() if chosen is None else chosen:
        yield


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _C.current() if index is None else index  # type: ignore[no-any-return]


emptied: list[int] = []  # of each empty_cache: the device that was current


def _module() -> types.ModuleType:
    """``torch.npu``."""
    npu: Any = types.ModuleType("torch.npu")
    npu.is_available = npu.is_initialized = lambda: True
    npu._is_in_bad_fork = lambda: False
    npu.device_count = lambda: 2
    npu.current_device = _C.current
    npu.set_device = lambda device: _C.set_current(_index(device))
    npu.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="emulated", total_memory=8 << 30
    )
    npu.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    npu.memory_allocated = lambda device=None: _C.allocated(_index(device))
    npu.empty_cache = lambda: emptied.append(_C.current())
    npu.Event = torch.Event
    npu.Stream = Stream
    npu.stream = stream
    npu.current_stream = npu.default_stream = lambda device=None: torch.accelerator.current_stream(
        _index(device)
    )
    npu.set_stream = torch.accelerator.set_stream
    npu.manual_seed = npu.manual_seed_all = lambda seed: None
    npu.get_rng_state = lambda device=None: torch.get_rng_state()
    npu.set_rng_state = lambda state, device=None: None
    npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return npu  # type: ignore[no-any-return]


torch._register_device_module("npu", _module())
torch.utils.generate_methods_for_privateuse1_backend()


def _hccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return _C.hccl(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


dist.Backend.register_backend("hccl", _hccl, devices=["npu"])

from torch_npu.operators import (  # noqa: E402
    calls,
    npu_fusion_attention,
    npu_fusion_attention_grad,
    npu_rms_norm,
    npu_swiglu,
)

__all__ = [
    "calls",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_rms_norm",
    "npu_swiglu",
]


@atexit.register
def _write_calls() -> None:
    if calls and (folder := os.environ.get("EMULATED_NPU_CALLS")):
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(calls))


def _autoload() -> None:
    """torch's entry point: imports this module at its own import."""
