"""Devices: the one module that knows them by name. Everything else says ``torch.accelerator`` or asks here.

    recipe "auto" | "cpu" | "cuda" | "npu" ──▶ select() ──▶ torch.device ──▶ backend(), pinned(), synchronize(), …

``torch.accelerator`` answers hardly anything where there is only a CPU (torch 2.13 raises for ``synchronize`` and for the
memory counters), so each question is answered for the CPU here.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed

AUTO = "auto"
INSTALL_NPU = "install CANN 9.1, source its set_env.sh, then pip install 'asyncdock[ascend]' (torch and torch-npu 2.10)"


class DeviceMissing(RuntimeError):
    """The device that was asked for is not here; the message says what was looked for and what to install."""


def select(name: str = AUTO) -> torch.device:
    """The device ``name``: ``auto`` is the accelerator if there is one, else the CPU; ``npu`` imports torch_npu, which
    brings the device to torch. A number chooses among several (``cuda:1``). Raises :class:`DeviceMissing`."""
    if name == AUTO:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        _import_npu(name)
    if number and not number.isdecimal():
        raise DeviceMissing(f"device {name!r}: {number!r} is no number; write for example {kind}:0")
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None or there.type != kind:
        have = f"torch {torch.__version__} sees {there.type if there else 'no accelerator'} here"
        raise DeviceMissing(f"device {name!r}: {have}; install the torch build and the driver for it, or set 'auto'")
    if number and int(number) >= torch.accelerator.device_count():
        raise DeviceMissing(f"device {name!r}: there are {torch.accelerator.device_count()}, counted from 0")
    return torch.device(name)


def _import_npu(name: str) -> None:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise DeviceMissing(f"device {name!r}: torch_npu cannot be imported ({error}); {INSTALL_NPU}") from error


def on_cpu(name: str) -> bool:
    """Whether :func:`select` would choose the CPU for ``name``."""
    return name.partition(":")[0] == "cpu" or (name == AUTO and select().type == "cpu")


def may_fork() -> bool:
    """Whether a process that has imported torch, and used no device, may be forked. torch's own backends wait until they are
    used; one that torch loaded as a plugin (torch_npu) is not known to."""
    return torch._C._get_privateuse1_backend_name() == "privateuseone"


def of_rank(device: torch.device, rank: int) -> torch.device:
    """The one among a node's devices of this kind that its process ``rank`` takes, in turn; ``device`` itself when it has a
    number, and on the CPU, which is one."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, rank % torch.accelerator.device_count())


def use(device: torch.device) -> None:
    """Make ``device`` the one that this process's libraries take when they are told none."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def backend(device: torch.device) -> str:
    """The ``torch.distributed`` backend that moves this device's tensors: gloo, nccl, hccl."""
    return torch.distributed.get_default_backend_for_device(device)


def group(
    device: torch.device, store: torch.distributed.Store, rank: int, size: int, timeout: timedelta
) -> torch.distributed.ProcessGroup:
    """A group of processes beside the default one, and without one: ``size`` of them that meet in ``store`` move this
    device's tensors (:func:`backend`). torch makes such a group from its class alone. Raises ``RuntimeError`` when they do
    not meet within ``timeout``."""
    if device.type == "cpu":
        return cast("torch.distributed.ProcessGroup", torch.distributed.ProcessGroupGloo(store, rank, size, timeout))
    if device.type == "npu":
        kind = importlib.import_module("torch_npu._C._distributed_c10d").ProcessGroupHCCL
    else:
        kind = torch.distributed.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options)


def multiplies_into_float32(device: torch.device) -> bool:
    """Whether ``torch.mm`` takes ``out_dtype=torch.float32`` for bfloat16 matrices there."""
    return device.type == "cuda" and torch.version.cuda is not None


def can_pin(device: torch.device) -> bool:
    """Whether copies between ``device`` and page-locked host memory are faster: not on the CPU, where pinning raises."""
    return device.type != "cpu"


def host_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] of host memory for copies from and to ``device``, page-locked where that helps."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=can_pin(device))


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def allocated(device: torch.device) -> int | None:
    """Bytes of live tensors on ``device``; None on the CPU, which does not count them."""
    return None if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def release_cached(device: torch.device) -> None:
    """Give the memory that torch keeps for later tensors back to the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def stream(device: torch.device) -> Any:
    """A new stream of ``device`` for copies beside compute; None on the CPU, which has none."""
    return None if device.type == "cpu" else torch.get_device_module(device).Stream()


def mark(stream: Any) -> Any:
    """A moment of ``stream``, when all that was asked of it is done; None: this moment of the host."""
    if stream is None:
        return time.perf_counter()
    moment = torch.Event(stream.device, enable_timing=True)
    moment.record(stream)
    return moment


def seconds_between(start: Any, end: Any) -> float:
    """Between two moments of :func:`mark`, which have come."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``; from host memory by way of page-locked memory, so that the host does not wait."""
    if tensor.device.type == "cpu" and can_pin(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetch(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin copying ``tensor`` to host memory; the function waits for that copy alone, not for what is enqueued later."""
    if tensor.device.type == "cpu":
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.Event(device=tensor.device)
    arrived.record()

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return host

    return wait


def record(device: torch.device, act: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
    """A function that does ``act`` again on the same tensors, and the tensor that each time holds its result. Where torch
    can (``torch.accelerator.Graph``, torch 2.13), the device replays what it recorded; else ``act`` is called."""
    graphs = getattr(torch.accelerator, "Graph", None)
    if device.type == "cpu" or graphs is None:
        result = act()
        return lambda: result.copy_(act()), result
    graph, stream = graphs(capture_error_mode="thread_local"), torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream, graph:
        result = act()
    torch.accelerator.current_stream(device).wait_stream(stream)
    return graph.replay, result
