"""Devices: the one module that depends on their kinds.

All other code uses ``torch.accelerator`` or this module.

    recipe "auto" | "cpu" | "cuda" | "npu" ──▶ select() ──▶ torch.device ──▶ backend(), host_empty(), synchronize(), …

``torch.accelerator`` does not work on machines with a CPU only (torch 2.13 raises for
``synchronize`` and for the memory counters), so each function here handles the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
import torch
import torch.distributed

from pipeline.problems import Fatal

log = structlog.get_logger(__name__)

AUTO = "auto"
INSTALL_NPU = (
    "install CANN, the version that torch-npu names, and source its set_env.sh, then pip install "
    "'asyncdock[ascend]' (torch 2.13 and its torch-npu)"
)


class DeviceMissing(Fatal, RuntimeError):
    """The requested device is not present. The message has what was looked for and what to
    install."""


def select(name: str = AUTO) -> torch.device:
    """Return the device ``name``: ``auto`` is the accelerator if there is one, else the CPU;
    ``npu`` imports torch_npu, which adds the device to torch. A number selects one of several
    (``cuda:1``). Raises :class:`DeviceMissing`."""
    if name == AUTO:
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        return torch.device("cpu") if accelerator is None else select(accelerator.type)
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    # without it cuBLAS is not deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise DeviceMissing(
                f"device {name!r}: torch_npu cannot be imported ({error}); {INSTALL_NPU}"
            ) from error
    if number and not number.isdecimal():
        raise DeviceMissing(f"device {name!r}: {number!r} is no number; write for example {kind}:0")
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None or there.type != kind:
        have = f"torch {torch.__version__} sees {there.type if there else 'no accelerator'} here"
        raise DeviceMissing(
            f"device {name!r}: {have}; install the torch build and the driver for it, or set 'auto'"
        )
    if number and int(number) >= torch.accelerator.device_count():
        raise DeviceMissing(
            f"device {name!r}: there are {torch.accelerator.device_count()}, counted from 0"
        )
    return torch.device(name)


def on_cpu(name: str) -> bool:
    """Return whether :func:`select` returns the CPU for ``name``."""
    return name.partition(":")[0] == "cpu" or (name == AUTO and select().type == "cpu")


def memory_bytes(name: str) -> int | None:
    """Return the memory of the accelerator that :func:`select` returns for ``name``; None for the
    CPU, and where that is not known."""
    try:
        device = select(name)
        module: Any = torch.get_device_module(device)
        return (
            None if device.type == "cpu" else int(module.get_device_properties(device).total_memory)
        )
    except (AttributeError, DeviceMissing, RuntimeError):
        return None


def may_fork() -> bool:
    """Return whether a process that has imported torch, and used no device, may be forked. torch's
    own backends initialise at their first use; a plugin backend (torch_npu) may initialise at its
    import."""
    return torch._C._get_privateuse1_backend_name() == "privateuseone"


def of_rank(device: torch.device, rank: int) -> torch.device:
    """Return the device of this kind that process ``rank`` of a node uses, round robin.

    ``device`` itself when it has a number, and on the CPU.
    """
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, rank % torch.accelerator.device_count())


def use(device: torch.device) -> None:
    """Make ``device`` the default device of this process's libraries."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def backend(device: torch.device) -> str:
    """Return the ``torch.distributed`` backend for this device's tensors: gloo, nccl, hccl."""
    return torch.distributed.get_default_backend_for_device(device)


def splits_groups(device: torch.device) -> bool:
    """Return whether :func:`backend` can split a process group. torch's device meshes split one
    that is bound to a device, so only such a group may be: NCCL and XCCL split; HCCL does not, up
    to torch_npu 2.13."""
    return device.type in ("cuda", "xpu")


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype of sums that need many bits: float64, but float32 on NPUs and Apple's GPUs,
    which do not compute in it."""
    return torch.float32 if device.type in ("npu", "mps") else torch.float64


def multiplies_into_float32(device: torch.device) -> bool:
    """Return whether ``torch.mm`` accepts ``out_dtype=torch.float32`` for bfloat16 matrices on the
    device."""
    return device.type == "cuda" and torch.version.cuda is not None


def has_flash_attention(device: torch.device) -> bool:
    """Return whether torch has FlashAttention's kernels for 16-bit numbers on the device."""
    return device.type == "cuda"


def fused_attention(
    device: torch.device,
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], ...] | None:
    """Return attention and its gradient by the device's own kernel for 16-bit numbers, as
    ``forward(q, k, v, causal, hidden, scale)`` and ``backward((gradient, q, k, v, out, total),
    causal, hidden, scale)`` of :mod:`stages.engines.torch.model.attention`; None: it has none beside
    torch's. torch_npu's has not been run by this project. Source: torch_npu.npu_fusion_attention,
    whose backward takes maximum and sum of the softmax over keys that it does not see, as in a
    ring."""
    if device.type != "npu":
        return None
    npu = importlib.import_module("torch_npu")

    def seen(q: torch.Tensor, causal: bool, hidden: torch.Tensor | None) -> dict[str, Any]:
        if causal:
            return {"atten_mask": _compressed_causal_mask(q.device), "sparse_mode": 2}
        return {} if hidden is None else {"atten_mask": hidden}

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        hidden: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, ...]:
        inputs = (x.contiguous() for x in (q, k, v))
        outputs = npu.npu_fusion_attention(
            *inputs, q.shape[1], "BNSD", scale=scale, **seen(q, causal, hidden)
        )
        # maximum and sum: float32 [B, H, n, 8], 8 times the same
        return outputs[0], (outputs[1] + outputs[2].log())[..., 0]

    def backward(
        given: tuple[torch.Tensor, ...], causal: bool, hidden: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, ...]:
        gradient, q, k, v, out, total = given
        largest = total.float()[..., None].expand(*total.shape, 8).contiguous()
        softmax = {
            "softmax_max": largest,
            "softmax_sum": torch.ones_like(largest),
            "attention_in": out.contiguous(),
        }
        parts = (x.contiguous() for x in (q, k, v, gradient))
        options = {**softmax, "scale_value": scale, **seen(q, causal, hidden)}
        return tuple(npu.npu_fusion_attention_grad(*parts, q.shape[1], "BNSD", **options)[:3])

    return forward, backward


@functools.cache
def _compressed_causal_mask(device: torch.device) -> torch.Tensor:
    """Return the tensor that npu_fusion_attention takes for a causal mask of any length (its mode
    2): bool [2048, 2048], 4 MiB."""
    with torch.inference_mode(False):
        return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


def fused_layers(device: torch.device) -> dict[str, Callable[..., torch.Tensor]]:
    """Return fused functions with gradients that are installed for the device: ``rms_norm(x,
    weight, epsilon)`` and ``swiglu(gate, up)``. Liger Kernel's (extra ``kernels``) go before the
    device's own; none for a CPU. Liger's and torch_npu's have not been run by this project."""
    if device.type not in ("cuda", "npu"):
        return {}
    functions: dict[str, Callable[..., torch.Tensor]]
    if device.type == "npu":
        npu = importlib.import_module("torch_npu")
        functions = {"rms_norm": lambda x, weight, epsilon: npu.npu_rms_norm(x, weight, epsilon)[0]}
        functions["swiglu"] = lambda gate, up: npu.npu_swiglu(torch.cat([gate, up], -1))
    else:
        functions = {
            "rms_norm": lambda x, weight, epsilon: torch.nn.functional.rms_norm(
                x, weight.shape, weight, epsilon
            )
        }
    try:
        norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        swiglu = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    except ImportError:
        return functions
    functions["rms_norm"] = lambda x, weight, epsilon: norm.apply(
        x, weight, epsilon, 0.0, "llama", False
    )
    return functions | {"swiglu": swiglu.apply}


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Inside, ``device`` computes the same bits from the same inputs each time.

    The CPU does so always. On an accelerator sums of ``index_add_``, ``index_put_``, embeddings and
    attention otherwise have the order in which threads end. torch raises for an operation that it
    has no deterministic algorithm for. One thread uses this at a time.
    """
    if device.type == "cpu":
        yield
        return
    config: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    fills = config.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    config.fill_uninitialized_memory = False  # it only helps to find faults
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        config.fill_uninitialized_memory = fills


def host_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [nbytes] of host memory for copies from and to ``device``, page-locked where
    that is faster."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


def synchronize(device: torch.device) -> None:
    """Wait until all work submitted to ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def allocated(device: torch.device) -> int | None:
    """Return the number of bytes of live tensors on ``device``; None on the CPU, where torch does
    not count them.

    The device's own module is asked: ``torch.accelerator`` raises for torch_npu up to 2.12, and for
    mps.
    """
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return int(module.current_allocated_memory())
    return int(module.memory_allocated(device))


def release_cached(device: torch.device) -> None:
    """Return the memory that torch has cached to the device."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.empty_cache()


def stream(device: torch.device) -> Any:
    """Return a new stream of ``device`` for copies beside compute; None on the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).Stream()


def mark(stream: Any) -> Any:
    """Record an event on ``stream``; None: the host's clock."""
    if stream is None:
        return time.perf_counter()
    moment = torch.Event(stream.device, enable_timing=True)
    moment.record(stream)
    return moment


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two events of :func:`mark` that have happened."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``tensor`` to ``device``, from host memory through page-locked memory, without blocking
    the host."""
    if tensor.device.type == "cpu" and device.type != "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetch(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy ``tensor`` to host memory.

    The returned function waits for that copy, not for work submitted later.
    """
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


def record(
    device: torch.device, act: Callable[[], torch.Tensor]
) -> tuple[Callable[[], Any], torch.Tensor]:
    """Return a function that runs ``act`` again on the same tensors, and the tensor of its
    results. Where the device can (:func:`new_graph`), it replays a recording; else ``act`` is
    called, as where something in it may not be recorded: in float32 the experts of a layer read
    numbers back to the host, in bfloat16 they do not."""
    if (graph := new_graph(device)) is not None:
        try:
            return graph.replay, _recorded(device, graph, act)
        except RuntimeError as error:
            _say_not_recorded(str(error))
    result = act()
    return lambda: result.copy_(act()), result


def _recorded(device: torch.device, graph: Any, act: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Record ``act`` beside the current stream. Returns the tensor that a replay writes to."""
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream, graph:
        result = act()
    torch.accelerator.current_stream(device).wait_stream(stream)
    return result


@functools.cache
def _say_not_recorded(reason: str) -> None:
    log.warning(
        "steps are computed one operation after the other: the device could not record one",
        reason=reason,
    )


def new_graph(device: torch.device) -> Any:
    """Return a graph for a recording on ``device``: ``torch.accelerator.Graph`` (torch 2.13, where
    the device implements it), or CUDA's own before that; else None."""
    if device.type == "cuda" and not hasattr(torch.accelerator, "Graph"):
        return _CudaGraph()
    if device.type == "cpu" or not hasattr(torch.accelerator, "Graph"):
        return None
    try:
        return torch.accelerator.Graph(capture_error_mode="thread_local")
    except (NotImplementedError, RuntimeError):  # the backend does not implement it
        return None


class _CudaGraph(torch.cuda.CUDAGraph):
    """Records what its block enqueues on the current stream, as ``torch.accelerator.Graph``
    does."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the recording has memory of its own
        self.capture_begin(capture_error_mode="thread_local")

    def __exit__(self, *_: object) -> None:
        self.capture_end()


@contextmanager
def trimmed_by_layer(model: torch.nn.Module) -> Iterator[None]:
    """Meanwhile, host memory that a layer of ``model`` has freed goes back to the system after each
    forward of it. Where the C library is glibc, small blocks that stay would else keep it from
    using the freed ones between them again: an engine that gathers one layer after the other would
    take the memory of all of them."""
    layers = [
        layer
        for stack in model.modules()
        if isinstance(stack, torch.nn.ModuleList)
        for layer in stack
    ]
    hooks = [layer.register_forward_hook(lambda *_: trim()) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        trim()


def trim() -> None:
    """Return host memory that was freed to the system, where the C library keeps it (glibc)."""
    if (trims := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trims(0)
