"""Part "numbers": the torch engines on the device against the CPU, on tiny models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import torch
from tensordict import TensorDict
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.engines.rollout import Case
from benchmarks.gpu.work import TINY, Figure, Setting, batch_of, made, requests, responses
from stages import device as devices
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import Completion, GroupRequest
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine

LOGPROB_LIMIT = 2e-3  # float32, sums of a few thousand terms in another order
UPDATE_LIMIT = 1e-3  # relative, of loss and gradient norm


async def numbers(setting: Setting) -> AsyncIterator[list[Figure]]:
    yield fused_numerics(setting.device)
    for name, build in tiny_models().items():
        yield await rollout_numerics(name, build, setting.device)
        yield update_numerics(name, build, setting.device)


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
