"""Parts that measure single actions of one model's engines: rollout, update, swap, turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, Qwen2Config

from benchmarks.engines.rollout import Case, Machine, Sizes, best, floor_seconds
from benchmarks.gpu.work import Figure, Setting, made_up, requests, responses
from stages import device as devices
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import GroupRequest
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.layout import Layout
from stages.parallel.placement import model_state, place
from stages.resharding.plan import Phase, plan_reshard
from stages.resharding.swap import Swap
from stages.resharding.tensors import empty, local_weights, separate


def machine_of(setting: Setting) -> Machine:
    """The device's matmul rate and memory bandwidth (a copy reads and writes each byte)."""
    n, length = (512, 2**20) if setting.small else (8192, 2**30)
    device = setting.device
    square = torch.randn(n, n, device=device, dtype=setting.dtype)
    source = torch.empty(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def finished(act: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            act()
            devices.synchronize(device)

        return run

    seconds = best(finished(lambda: square @ square))
    return Machine(2 * n**3 / seconds, 2 * length / best(finished(lambda: target.copy_(source))))


def host_rate(device: torch.device, nbytes: int, *, back: bool = False) -> float:
    """Bytes/s from page-locked host memory to the device, or ``back`` from there."""
    host = devices.host_empty(nbytes, device)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    source, target = (there, host) if back else (host, there)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        devices.synchronize(device)

    return nbytes / best(copy)


def update_floor(
    sizes: Sizes, machine: Machine, parameters: int, asked: Sequence[GroupRequest], case: Case
) -> float:
    """As in grpo_step.py: 6 operations per fed token and weight, attention's pairs, 7 passes of
    AdamW."""
    prompts = len(asked)
    predicted = case.rows * case.tokens
    fed = prompts * case.prompt + predicted - case.rows
    pairs = prompts * case.prompt**2 / 2 + case.rows * (case.tokens - 1) * (
        case.prompt + case.tokens / 2
    )
    operations = (
        6 * (sizes.body * fed + sizes.head * predicted)
        + 12 * sizes.layers * sizes.attention * pairs
    )
    return operations / machine.rate + 7 * sizes.item * parameters / machine.bandwidth


async def rollout(setting: Setting) -> AsyncIterator[list[Figure]]:
    """Tokens/s of each case, with decode steps recorded as the device can, and without; then the
    swap of new weights into the running engine."""
    machine = machine_of(setting)
    yield [
        Figure("matmul rate", machine.rate / 1e12, "TFLOP/s"),
        Figure("memory bandwidth", machine.bandwidth / 1e9, "GB/s"),
    ]
    model = setting.model()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sizes = Sizes.of(model)
    engine = rollout_engine(setting, model)
    for case in setting.cases:
        yield [await rollout_speed(setting, engine, sizes, machine, case)]
    yield await swap_speed(engine, weights, setting.device)
    await engine.close()
    with patch.object(devices, "new_graph", lambda device: None):
        engine = rollout_engine(setting, setting.model())
        yield [
            await rollout_speed(setting, engine, sizes, machine, setting.cases[0], "unrecorded ")
        ]
        await engine.close()


def rollout_engine(setting: Setting, model: PreTrainedModel) -> TorchRolloutEngine:
    most = max(case.rows for case in setting.cases)
    return TorchRolloutEngine(model, max_rows=most, device=setting.device, accelerated=True)


async def rollout_speed(
    setting: Setting,
    engine: TorchRolloutEngine,
    sizes: Sizes,
    machine: Machine,
    case: Case,
    how: str = "",
) -> Figure:
    asked = requests(case, setting.shape["vocab_size"])
    count = case.rows * case.tokens
    took = []
    for _ in range(setting.repeat + 1):  # the first records the steps
        began = time.perf_counter()
        done = await responses(engine, asked)
        took.append(time.perf_counter() - began)
        assert sum(len(one.token_ids) for one in done) == count
    floor = floor_seconds(
        sizes, case, machine, lambda i, o, tokens: 2 * i * o * tokens / machine.rate
    )
    speed = count / statistics.median(took[1:])
    return Figure(f"rollout {how}{case}", speed, "tokens/s", floor=count / floor)


async def swap_speed(
    engine: TorchRolloutEngine, weights: dict[str, torch.Tensor], device: torch.device
) -> list[Figure]:
    nbytes = sum(weight.nbytes for weight in weights.values())
    times = [await engine.load_weights(version, weights) for version in (1, 2, 3)]
    hidden, exposed = (
        statistics.median(getattr(t, what) for t in times) for what in ("hidden", "exposed")
    )
    return [
        Figure("swap, weights", nbytes / 1e6, "MB", timed=False),
        Figure("swap, exposed", exposed, "s"),
        Figure("swap, hidden", hidden, "s"),
        Figure(
            "swap, rate",
            nbytes / (exposed + hidden) / 1e9,
            "GB/s",
            floor=host_rate(device, nbytes) / 1e9,
        ),
    ]


async def update(setting: Setting) -> AsyncIterator[list[Figure]]:
    """Response tokens/s of a train step, as the engine is, and with the model's layers compiled."""
    machine = machine_of(setting)
    yield update_speed(setting, machine, "update")
    devices.release_cached(setting.device)
    yield update_speed(setting, machine, "update compiled", compiled=True)


def update_speed(
    setting: Setting, machine: Machine, name: str, *, compiled: bool = False
) -> list[Figure]:
    model = setting.model()
    sizes = Sizes.of(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    case = setting.cases[0]
    asked = requests(case, setting.shape["vocab_size"])
    batch = made_up(asked, case, setting.shape["vocab_size"])
    engine = TorchTrainEngine(
        model, learning_rate=1e-6, total_steps=100, token_budget=16384, device=setting.device
    )
    if compiled:
        for layer in engine.model.base_model.layers:
            layer.compile(backend="eager" if setting.small else "inductor")
    took = []
    for _ in range(setting.repeat + 1):
        began = time.perf_counter()
        engine.train_batch(batch, GRPO())
        devices.synchronize(setting.device)
        took.append(time.perf_counter() - began)
    held = devices.allocated(setting.device)
    engine.close()
    count = case.rows * case.tokens
    seconds = statistics.median(took[1:])
    floor = update_floor(sizes, machine, parameters, asked, case)
    memory = [] if held is None else [Figure(f"{name}, live tensors", held / 1e9, "GB")]
    return [
        Figure(f"{name} {case}", count / seconds, "response tokens/s", floor=count / floor),
        *memory,
    ]


async def turns(setting: Setting) -> AsyncIterator[list[Figure]]:
    """Both engines of one rank, as a colocated run has them (``stages/training/colocated.py``)."""
    device = setting.device
    case = setting.cases[0]
    vocabulary = setting.shape["vocab_size"]
    rollout = TorchRolloutEngine(setting.model(), max_rows=case.rows, device=device, packed=False)
    await rollout.sleep()
    empty(rollout.tensors.values())
    model = setting.model()
    separate(model.parameters())
    trainer = TorchTrainEngine(
        model, learning_rate=1e-6, total_steps=100, token_budget=16384, device=device
    )
    asked = requests(case, vocabulary)
    # AdamW makes its moments
    trainer.train_batch(made_up(asked, case, vocabulary), GRPO())
    state = model_state(Qwen2Config(**setting.shape), model.dtype)
    target = place(state, Layout(), names="vllm" if rollout.fused else "hf")
    plan = plan_reshard(place(state, Layout()), target)
    swap = Swap(plan, 0, local_weights(model), trainer.held, device=device, rollout=rollout.tensors)
    away = list[float]()
    back = list[float]()
    exposed = list[float]()
    left = 0
    training = swap.training_bytes()
    for version in range(1, setting.repeat + 2):  # the first makes the host's memory
        before = devices.allocated(device)
        began = time.perf_counter()
        swap.to_rollout()
        exposed.append(time.perf_counter() - began)
        left = max(left, swap.training_bytes())
        held = devices.allocated(device)
        await rollout.wake(version)
        await responses(rollout, asked)
        await rollout.sleep()
        swap.prefetch()
        swap.ready()
        away.append(
            training / (swap.seconds[Phase.OFFLOAD_STATE] + swap.seconds[Phase.OFFLOAD_WEIGHTS])
        )
        back.append(training / swap.seconds[Phase.PREFETCH])
    await rollout.close()
    trainer.close()
    nbytes = min(training, 2**30)
    counted = (
        []
        if before is None or held is None
        else [
            Figure("turn, live tensors before", before / 1e9, "GB", timed=False),
            Figure("turn, live tensors after", held / 1e9, "GB", timed=False),
        ]
    )
    to_host, to_device = (host_rate(device, nbytes, back=way) / 1e9 for way in (True, False))
    yield [
        Figure("turn, training bytes", training / 1e6, "MB", timed=False),
        Figure("turn, of them left on the device", left, "B", limit=0.0, timed=False),
        *counted,
        Figure("turn, to host memory", statistics.median(away[1:]) / 1e9, "GB/s", floor=to_host),
        Figure("turn, back", statistics.median(back[1:]) / 1e9, "GB/s", floor=to_device),
        Figure("turn, to generation, exposed", statistics.median(exposed[1:]), "s"),
    ]
