"""What only a machine with an accelerator can measure: the torch engines' numbers against the
CPU's, and their speed.

    make gpu-check                                            # or: python -m benchmarks.gpu_check [--json FILE]
    python -m benchmarks.gpu_check --device cpu --smoke       # does it run; its speeds then mean nothing
    make gpu-wheels                                           # what to carry to a machine that has torch and no network

  numerics   tiny models, float32. Rollout: the device's responses, scored by transformers' plain forward on the CPU,
             before and after a swap of weights. Update: one step on the device and one on the CPU from equal weights.
             Replay: the same three steps by two engines of the device, in float32 and in mixed precision; no weight may
             differ in a bit. The command fails (exit code 1) when a gap passes its limit.
  speed      a model of 0.5 billion random weights (the sizes of Qwen2.5-0.5B), bfloat16. Tokens/s of rollout and of an
             update, each beside its floor: operations / matmul rate and bytes / bandwidth of this device, measured here.
  swap       new weights from host memory into the running engine: bytes, exposed and hidden seconds, and the rate
             beside that of a page-locked copy.
  turns      both engines on one device, one after the other: the bytes that training takes away and brings back, their
             rates beside those of page-locked copies, and what is left of training while the other has the device
             (the command fails when that is anything).
  run        GRPO with that model as a colocated run, with and without prefetch (benchmarks/colocated.py): seconds a step,
             exposed and hidden seconds of a step's swaps, bytes on the device in either turn.

Decode steps are recorded and replayed by the device where torch can (``stages.device.new_graph``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_wheels import missing

if problem := missing():  # before anything of it is imported
    print(problem, file=sys.stderr)
    sys.exit(2)

import torch
from tensordict import TensorDict
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks import colocated
from benchmarks.rollout import Case, Machine, Sizes, best, floor_seconds
from orchestration.logs import configure
from stages import device as devices
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import Completion, GroupRequest, SamplingParams
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import tiny_tokenizer
from stages.parallel.layout import Layout
from stages.parallel.placement import model_state, place
from stages.resharding.plan import Phase, plan_reshard
from stages.resharding.swap import Swap
from stages.resharding.tensors import empty, local_weights, separate

LOGPROB_LIMIT = 2e-3  # float32, sums of a few thousand terms in another order
UPDATE_LIMIT = 1e-3  # relative, of loss and gradient norm
TINY: dict[str, Any] = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
)
LARGE: dict[str, Any] = dict(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
CASES = [Case(64, 8, 128, prompt=256), Case(256, 8, 256, prompt=256)]
SMOKE = [Case(4, 2, 6, prompt=9)]


@dataclass(frozen=True)
class Figure:
    """One line of the report: ``value`` in ``unit``, beside its ``floor`` or its ``limit`` where it
    has one. ``timed`` figures mean nothing on a CPU."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    limit: float | None = None
    timed: bool = True

    @property
    def failed(self) -> bool:
        return self.limit is not None and not self.value <= self.limit


def tiny_models() -> dict[str, Callable[[], PreTrainedModel]]:
    return {
        "Llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
        "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=16)),
        "Qwen3 MoE": lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim
                **TINY, head_dim=16, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2
            )
        ),
    }


def made(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return build().eval()


def requests(case: Case, vocabulary: int, temperature: float = 1.0) -> list[GroupRequest]:
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=case.tokens, temperature=temperature)
    prompts = [
        torch.randint(0, vocabulary, (case.prompt,), generator=generator)
        for _ in range(case.rows // case.group)
    ]
    return [
        GroupRequest(i, tuple(range(case.group)), ids, params, i) for i, ids in enumerate(prompts)
    ]


async def responses(engine: TorchRolloutEngine, asked: Sequence[GroupRequest]) -> list[Completion]:
    return [done async for done in engine.generate(asked)]


def batch_of(asked: Sequence[GroupRequest], done: Sequence[Completion]) -> TensorDict:
    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    return TensorDict(
        {
            "group": torch.tensor([one.group for one in done]),
            "place": torch.tensor([one.place for one in done]),
            "prompt_ids": jagged([asked[one.group].prompt_ids for one in done]),
            "response_ids": jagged([one.token_ids for one in done]),
            "rollout_logprobs": jagged([one.logprobs for one in done]),
            "advantage": torch.linspace(-1, 1, len(done)),
        },
        batch_size=[len(done)],
    )


# -- numerics
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def logprob_gap(
    reference: PreTrainedModel, asked: Sequence[GroupRequest], done: Sequence[Completion]
) -> float:
    """Largest difference to the logprobs that ``reference``, on the CPU, gives the same tokens."""
    gaps = []
    for one in done:
        prompt = asked[one.group].prompt_ids
        logits = reference(input_ids=torch.cat([prompt, one.token_ids])[None]).logits[
            0, len(prompt) - 1 : -1
        ]
        gaps.append(
            (logits.log_softmax(-1).gather(-1, one.token_ids[:, None])[:, 0] - one.logprobs)
            .abs()
            .max()
        )
    return float(torch.stack(gaps).max())


async def rollout_numerics(
    name: str, build: Callable[[], PreTrainedModel], device: torch.device
) -> list[Figure]:
    engine = TorchRolloutEngine(made(build, 0), max_rows=6, device=device, accelerated=True)
    asked = requests(Case(12, 4, 70, prompt=33), TINY["vocab_size"])
    first = made(build, 0)
    second = made(build, 1)
    before = logprob_gap(first, asked, await responses(engine, asked))
    await engine.load_weights(
        1, {key: parameter.detach() for key, parameter in second.named_parameters()}
    )
    after = logprob_gap(second, asked, await responses(engine, asked))
    await engine.close()
    return [
        Figure(f"{name} rollout logprobs", before, "largest gap", limit=LOGPROB_LIMIT, timed=False),
        Figure(
            f"{name} rollout logprobs, new weights",
            after,
            "largest gap",
            limit=LOGPROB_LIMIT,
            timed=False,
        ),
    ]


def update_numerics(
    name: str, build: Callable[[], PreTrainedModel], device: torch.device
) -> list[Figure]:
    asked = requests(Case(8, 4, 20, prompt=17), TINY["vocab_size"])
    generator = torch.Generator().manual_seed(0)
    done = [
        Completion(
            request.group,
            place,
            torch.randint(0, TINY["vocab_size"], (5 + 3 * place,), generator=generator),
            torch.full((5 + 3 * place,), -5.5),
            ((0, 5 + 3 * place),),
            "length",
        )
        for request in asked
        for place in request.places
    ]
    batch = batch_of(asked, done)
    results = []
    for where in (torch.device("cpu"), device):
        engine = TorchTrainEngine(made(build, 0), learning_rate=1e-3, total_steps=10, device=where)
        metrics = engine.train_batch(batch, GRPO())
        results.append((metrics["loss"], metrics["grad_norm"]))
        engine.close()
    replays = []
    for compute in (torch.float32, torch.bfloat16):
        one, other = (replayed(build, batch, compute, device) for _ in range(2))
        differ = sum(int((one[n] != other[n]).sum()) for n in one)
        what = f"{name} replay, {'float32' if compute == torch.float32 else 'mixed precision'}"
        replays.append(Figure(what, differ, "weights that differ", limit=0, timed=False))
    return replays + [
        Figure(
            f"{name} update, {what}",
            abs(there - here) / abs(here),
            "relative gap",
            limit=UPDATE_LIMIT,
            timed=False,
        )
        for what, here, there in zip(("loss", "gradient norm"), *results, strict=True)
    ]


def fused_numerics(device: torch.device) -> list[Figure]:
    """Each fused function of the device against plain arithmetic in float64 on the CPU: outputs and
    gradients."""

    def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight

    plain: dict[str, Callable[..., torch.Tensor]] = {
        "rms_norm": norm,
        "swiglu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    }
    figures = []
    for name, function in devices.fused_layers(device).items():
        first = torch.randn(64, 256)
        second = torch.randn(256) if name == "rms_norm" else torch.randn(64, 256)
        results = []
        for where, dtype, compute in (
            ("cpu", torch.float64, plain[name]),
            (device, torch.float32, function),
        ):
            given = [value.to(where, dtype).requires_grad_() for value in (first, second)]
            out = compute(*given, 1e-5) if name == "rms_norm" else compute(*given)
            out.square().sum().backward()
            results.append(
                [value.detach().cpu().double() for value in (out, *(each.grad for each in given))]
            )
        gap = max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True))
        figures.append(Figure(f"fused {name}", gap, "relative gap", limit=1e-5, timed=False))
    return figures


def replayed(
    build: Callable[[], PreTrainedModel],
    batch: TensorDict,
    compute: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The weights, master weights in mixed precision, after three steps of a new engine."""
    engine = TorchTrainEngine(
        made(build, 0),
        learning_rate=1e-3,
        total_steps=3,
        token_budget=64,
        compute=compute,
        device=device,
    )
    for _ in range(3):
        engine.train_batch(batch, GRPO())
    return {name: value.cpu().clone() for name, value in engine.shards().items()}


# -- speed
# --------------------------------------------------------------------------------------------------


def machine_of(device: torch.device, dtype: torch.dtype, small: bool) -> Machine:
    """The device's matmul rate and memory bandwidth (a copy reads and writes each byte)."""
    n, length = (512, 2**20) if small else (8192, 2**30)
    square = torch.randn(n, n, device=device, dtype=dtype)
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


async def rollout_speed(
    engine: TorchRolloutEngine,
    sizes: Sizes,
    machine: Machine,
    case: Case,
    vocabulary: int,
    repeat: int,
) -> Figure:
    asked = requests(case, vocabulary)
    count = case.rows * case.tokens
    took = []
    for _ in range(repeat + 1):  # the first records the steps
        began = time.perf_counter()
        done = await responses(engine, asked)
        took.append(time.perf_counter() - began)
        assert sum(len(one.token_ids) for one in done) == count
    floor = floor_seconds(
        sizes, case, machine, lambda i, o, tokens: 2 * i * o * tokens / machine.rate
    )
    return Figure(
        f"rollout {case}", count / statistics.median(took[1:]), "tokens/s", floor=count / floor
    )


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


def made_up(asked: Sequence[GroupRequest], case: Case, vocabulary: int) -> TensorDict:
    """A train batch of random responses."""
    generator = torch.Generator().manual_seed(1)
    done = [
        Completion(
            request.group,
            number,
            torch.randint(0, vocabulary, (case.tokens,), generator=generator),
            torch.full((case.tokens,), -11.0),
            ((0, case.tokens),),
            "length",
        )
        for request in asked
        for number in request.places
    ]
    return batch_of(asked, done)


async def turns(
    build: Callable[[], PreTrainedModel],
    shape: dict[str, Any],
    case: Case,
    device: torch.device,
    repeat: int,
) -> list[Figure]:
    """Both engines of one rank, as a colocated run has them (``stages/training/colocated.py``)."""
    rollout = TorchRolloutEngine(build(), max_rows=case.rows, device=device, packed=False)
    await rollout.sleep()
    empty(rollout.tensors.values())
    model = build()
    separate(model.parameters())
    trainer = TorchTrainEngine(
        model, learning_rate=1e-6, total_steps=100, token_budget=16384, device=device
    )
    asked = requests(case, shape["vocab_size"])
    # AdamW makes its moments
    trainer.train_batch(made_up(asked, case, shape["vocab_size"]), GRPO())
    state = model_state(Qwen2Config(**shape), model.dtype)
    target = place(state, Layout(), names="vllm" if rollout.fused else "hf")
    plan = plan_reshard(place(state, Layout()), target)
    swap = Swap(plan, 0, local_weights(model), trainer.held, device=device, rollout=rollout.tensors)
    away = list[float]()
    back = list[float]()
    exposed = list[float]()
    left = 0
    training = swap.training_bytes()
    for version in range(1, repeat + 2):  # the first makes the host's memory
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
    return [
        Figure("turn, training bytes", training / 1e6, "MB", timed=False),
        Figure("turn, of them left on the device", left, "B", limit=0.0, timed=False),
        *counted,
        Figure("turn, to host memory", statistics.median(away[1:]) / 1e9, "GB/s", floor=to_host),
        Figure("turn, back", statistics.median(back[1:]) / 1e9, "GB/s", floor=to_device),
        Figure("turn, to generation, exposed", statistics.median(exposed[1:]), "s"),
    ]


async def whole_run(
    model: PreTrainedModel, device: torch.device, smoke: bool
) -> AsyncIterator[list[Figure]]:
    """Colocated GRPO runs of ``model``, with weights read from a folder."""
    with tempfile.TemporaryDirectory(prefix="asyncdock-gpu-check-") as folder:
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        changes: colocated.Changes = {
            "model": {"dtype": str(model.dtype).removeprefix("torch.")},
            "rollout": {"device": device.type, "max_rows": 64, "max_tokens": 4 if smoke else 256},
            "train": {
                "device": device.type,
                "groups_per_step": 2 if smoke else 8,
                "token_budget": 16384,
            },
            "pipeline": {"arena": "128MiB"},
        }
        for arm in ("colocated", "colocated, prefetch"):
            launcher, steps = ("inline", 3) if smoke else ("process", 8)
            measured = await colocated.measure(
                arm, colocated.recipe_of(arm, folder, steps, launcher, changes)
            )
            yield [
                Figure(f"{arm}: step", measured.step_seconds, "s"),
                Figure(f"{arm}: exposed", measured.exposed, "s"),
                Figure(f"{arm}: hidden", measured.hidden, "s"),
                Figure(f"{arm}: training", measured.training / 1e6, "MB", timed=False),
                Figure(f"{arm}: generating", measured.generating / 1e6, "MB", timed=False),
                Figure(f"{arm}: released", measured.released / 1e6, "MB", timed=False),
            ]


def update_speed(
    model: PreTrainedModel,
    sizes: Sizes,
    machine: Machine,
    case: Case,
    vocabulary: int,
    device: torch.device,
    repeat: int,
) -> list[Figure]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    asked = requests(case, vocabulary)
    batch = made_up(asked, case, vocabulary)
    engine = TorchTrainEngine(
        model, learning_rate=1e-6, total_steps=100, token_budget=16384, device=device
    )
    took = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        engine.train_batch(batch, GRPO())
        devices.synchronize(device)
        took.append(time.perf_counter() - began)
    held = devices.allocated(device)
    engine.close()
    count = case.rows * case.tokens
    seconds = statistics.median(took[1:])
    floor = update_floor(sizes, machine, parameters, asked, case)
    memory = [] if held is None else [Figure("update, live tensors", held / 1e9, "GB")]
    return [
        Figure(f"update {case}", count / seconds, "response tokens/s", floor=count / floor),
        *memory,
    ]


# -- the run
# --------------------------------------------------------------------------------------------------


async def check(device: torch.device, smoke: bool, repeat: int) -> AsyncIterator[list[Figure]]:
    yield fused_numerics(device)
    for name, build in tiny_models().items():
        yield await rollout_numerics(name, build, device)
        yield update_numerics(name, build, device)
    shape, dtype, cases = (TINY, torch.float32, SMOKE) if smoke else (LARGE, torch.bfloat16, CASES)
    machine = machine_of(device, dtype, smoke)
    yield [
        Figure("matmul rate", machine.rate / 1e12, "TFLOP/s"),
        Figure("memory bandwidth", machine.bandwidth / 1e9, "GB/s"),
    ]

    def build_large() -> PreTrainedModel:
        return made(lambda: Qwen2ForCausalLM(Qwen2Config(**shape)), 0).to(dtype)  # type: ignore[arg-type]

    model = build_large()
    vocabulary = shape["vocab_size"]
    sizes = Sizes.of(model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = TorchRolloutEngine(
        model, max_rows=max(case.rows for case in cases), device=device, accelerated=True
    )
    for case in cases:
        yield [await rollout_speed(engine, sizes, machine, case, vocabulary, repeat)]
    yield await swap_speed(engine, weights, device)
    await engine.close()
    del engine, model
    devices.release_cached(device)
    yield update_speed(build_large(), sizes, machine, cases[0], vocabulary, device, repeat)
    devices.release_cached(device)
    yield await turns(build_large, shape, cases[0], device, repeat)
    devices.release_cached(device)
    async for of_arm in whole_run(build_large(), device, smoke):
        yield of_arm


async def printed(found: AsyncIterator[list[Figure]], device: torch.device) -> list[Figure]:
    """All figures, each printed once it is there."""
    figures: list[Figure] = []
    async for some in found:
        figures += some
        for figure in some:
            print(line(figure, device), flush=True)
    return figures


def line(figure: Figure, device: torch.device) -> str:
    text = f"{figure.name:<38}{figure.value:>12.4g} {figure.unit}"
    if figure.floor is not None:
        text += f", {figure.value / figure.floor:.0%} of {figure.floor:.4g}"
    if figure.limit is not None:
        text += f", limit {figure.limit:g}: {'FAILED' if figure.failed else 'ok'}"
    return text + (" (no meaning on a CPU)" if figure.timed and device.type == "cpu" else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, npu")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models and cases everywhere: does it run"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    device = devices.select(args.device)
    if device.type == "cpu" and not args.smoke:
        parser.error(
            "no accelerator here; --device cpu --smoke shows that the command runs, its "
            "speeds mean nothing"
        )
    configure(terminal=False)  # what the runs log is not for standard output
    graphs = "not recorded" if devices.new_graph(device) is None else "recorded"
    print(
        f"torch {torch.__version__}, device {device}, decode steps {graphs}, medians of "
        f"{args.repeat}"
    )
    figures = asyncio.run(printed(check(device, args.smoke, args.repeat), device))
    if args.json:
        record = {
            "torch": torch.__version__,
            "device": str(device),
            "figures": [asdict(figure) for figure in figures],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(any(figure.failed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
