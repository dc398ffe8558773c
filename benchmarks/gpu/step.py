"""Parts "step": a whole GRPO step of a Qwen3 model with random weights, and a plain one beside it.

    ours    rollout engine, train engine with master weights, new weights into the rollout engine
    plain   transformers' generate, then one forward and backward over padded rows and AdamW, as
            TRL's trainer has them; weights, gradients and moments in the dtype of the arithmetic

Both generate the same number of tokens for the same prompts. Tokens/s are generated tokens over all
phases of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.engines.rollout import Case, Machine, Sizes
from benchmarks.gpu.speed import machine_of, update_floor
from benchmarks.gpu.work import TINY, Figure, Setting, batch_of, made, requests, responses
from stages import device as devices
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import GroupRequest
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine

QWEN3: dict[str, Any] = dict(
    vocab_size=151936,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
)
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "Qwen3-1.7B": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
}
CASE = Case(64, 8, 256, prompt=256)
PLAIN_ROWS = 8  # of a forward of the plain step
BUDGET = 8192  # tokens of a micro-batch of ours: as many as a forward of the plain step, at least


@dataclass(frozen=True)
class Seconds:
    """One step by its phases."""

    generate: float
    train: float
    sync: float = 0.0

    @property
    def whole(self) -> float:
        return self.generate + self.train + self.sync


def step_of(name: str) -> Callable[[Setting], AsyncIterator[list[Figure]]]:
    """Return the part of the shape ``name``."""

    async def step(setting: Setting) -> AsyncIterator[list[Figure]]:
        shape = {**TINY, "head_dim": 16} if setting.small else SHAPES[name]
        case = Case(4, 2, 6, prompt=9) if setting.small else CASE
        machine = machine_of(setting)

        def model(dtype: torch.dtype) -> PreTrainedModel:
            return made(lambda: Qwen3ForCausalLM(Qwen3Config(**shape)), 0).to(dtype)  # type: ignore[arg-type]

        asked = requests(case, shape["vocab_size"])
        sizes = replace(Sizes.of(model(torch.float32)), item=setting.dtype.itemsize)
        ours = await our_steps(setting, model, asked, case)
        devices.release_cached(setting.device)
        yield our_figures(name, ours, sizes, machine, asked, case)
        plain = plain_steps(setting, model(setting.dtype), asked, case)
        yield plain_figures(name, ours, plain, case)

    return step


async def our_steps(
    setting: Setting,
    model: Callable[[torch.dtype], PreTrainedModel],
    asked: Sequence[GroupRequest],
    case: Case,
) -> Seconds:
    """Medians of our step."""
    device = setting.device
    trainer = TorchTrainEngine(
        model(torch.float32),
        learning_rate=1e-6,
        total_steps=100,
        token_budget=BUDGET,
        compute=setting.dtype,
        device=device,
    )
    engine = TorchRolloutEngine(model(setting.dtype), max_rows=case.rows, device=device)
    advantage = torch.linspace(-1, 1, case.rows)
    measured = []
    for version in range(1, setting.repeat + 2):  # the first records decode steps
        began = time.perf_counter()
        done = await responses(engine, asked)
        generated = time.perf_counter()
        batch = batch_of(asked, done)
        batch["advantage"] = advantage
        trainer.train_batch(batch, GRPO())
        devices.synchronize(device)
        trained = time.perf_counter()
        await engine.load_weights(version, dict(trainer.weights()))
        synced = time.perf_counter()
        measured.append(Seconds(generated - began, trained - generated, synced - trained))
    await engine.close()
    trainer.close()
    return median_of(measured)


def plain_steps(
    setting: Setting, model: PreTrainedModel, asked: Sequence[GroupRequest], case: Case
) -> Seconds:
    """Medians of the plain step, the best of its settings: attention by torch's own kernels, no
    activations computed twice."""
    device = setting.device
    model.to(device)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    prompts = torch.stack([one.prompt_ids for one in asked]).repeat_interleave(case.group, 0)
    prompts = prompts.to(device)
    advantage = torch.linspace(-1, 1, case.rows, device=device)
    measured = []
    for _ in range(setting.repeat + 1):
        began = time.perf_counter()
        with torch.no_grad():
            rows = model.generate(  # type: ignore[operator]
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=case.tokens,
                min_new_tokens=case.tokens,
                pad_token_id=0,
            )
        devices.synchronize(device)
        generated = time.perf_counter()
        plain_update(model, optimizer, rows, advantage, case)
        devices.synchronize(device)
        measured.append(Seconds(generated - began, time.perf_counter() - generated))
    return median_of(measured)


def plain_update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rows: torch.Tensor,
    advantage: torch.Tensor,
    case: Case,
) -> None:
    """One GRPO step over ``rows`` [B, P + T]: the ratio to the detached logprobs, as where a batch
    has one optimizer step."""
    optimizer.zero_grad(set_to_none=True)
    for part, credit in zip(rows.split(PLAIN_ROWS), advantage.split(PLAIN_ROWS), strict=True):
        logits = model(part, logits_to_keep=case.tokens + 1, use_cache=False).logits[:, :-1]
        chosen = part[:, case.prompt :, None]
        logprobs = logits.float().log_softmax(-1).gather(-1, chosen)[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -(ratio * credit[:, None]).sum() / (case.rows * case.tokens)
        loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def median_of(steps: Sequence[Seconds]) -> Seconds:
    """Medians of the phases, without the first step."""
    return Seconds(
        *(
            statistics.median(getattr(one, phase) for one in steps[1:])
            for phase in ("generate", "train", "sync")
        )
    )


def our_figures(
    name: str,
    ours: Seconds,
    sizes: Sizes,
    machine: Machine,
    asked: Sequence[GroupRequest],
    case: Case,
) -> list[Figure]:
    """Tokens/s; operations/s of training beside the matmul rate (its MFU); bytes/s that decoding
    must read, weights once a step and keys and values, beside the bandwidth."""
    # without parameters: only the operations of the floor
    operations = update_floor(sizes, machine, 0, asked, case) * machine.rate
    cached = len(asked) * case.prompt + case.rows * case.tokens / 2  # mean of the steps
    read = case.tokens * sizes.item * (sizes.body + sizes.head + sizes.kv * cached)
    return [
        Figure(f"{name}: step", case.rows * case.tokens / ours.whole, "tokens/s"),
        Figure(f"{name}: generate", ours.generate, "s"),
        Figure(f"{name}: train", ours.train, "s"),
        Figure(f"{name}: new weights", ours.sync, "s"),
        Figure(
            f"{name}: training (MFU)",
            operations / ours.train / 1e12,
            "TFLOP/s",
            floor=machine.rate / 1e12,
        ),
        Figure(
            f"{name}: decoding",
            read / ours.generate / 1e9,
            "GB/s",
            floor=machine.bandwidth / 1e9,
        ),
    ]


def plain_figures(name: str, ours: Seconds, plain: Seconds, case: Case) -> list[Figure]:
    return [
        Figure(f"{name}: plain step", case.rows * case.tokens / plain.whole, "tokens/s"),
        Figure(f"{name}: plain generate", plain.generate, "s"),
        Figure(f"{name}: plain train", plain.train, "s"),
        Figure(f"{name}: ours to plain", plain.whole / ours.whole, "x"),
    ]
