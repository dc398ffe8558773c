"""One GRPO step, generation and training together, against TRL's GRPOTrainer, on the same prompts
in the same run.

    pip install -e '.[bench,quickstart]'
    python -m benchmarks.training.grpo_step [--model smollm2|PATH] [--steps 3] [--peer plain|default|both|none] [--json FILE]
    python -m benchmarks.training.grpo_step --profile [--dtype bfloat16]     # where the seconds of a train step go

Both sides take the same 4 prompts x 8 completions of at most 16 tokens per step, float32 (--dtype
bfloat16: mixed precision), temperature 1, no filter of the distribution, the same reward function
and learning rate, and end a response at the same token. TRL comes twice: as it is by default (it
computes activations again in the backward), and "plain", without that, as our engine runs. Steps
alternate, TRL's and ours, so that other work on the machine slows both; ratios are taken step by
step, and their median is printed. The ratio in CPU seconds is printed too: on a busy machine it
varies less. Our step is the synchronous one: generate, reward, advantage, train, new weights into
the rollout engine.

Both sides run in the environment of a run's workers, where OpenMP's threads spin for a bounded
time.

Tokens are counted TRL's way for both (its ``num_tokens``): each completion's real tokens plus its
prompt's, the prompt once per completion, although our engines compute it once per group.

The floors of our engines are operations / matmul rate and bytes / read bandwidth, each measured
beside the step:

  train    6 operations per fed token and linear weight (logits: only where a response token is predicted), attention,
           and AdamW's 7 passes over the parameters
  rollout  linear layers and attention of each forward, with the lengths that were really drawn
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDict

from benchmarks import harness
from benchmarks.engines.rollout import Sizes, readings
from orchestration.processes.forkserver import ENVIRONMENT
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import Completion, GroupRequest, SamplingParams
from stages.engines.torch.model import packing
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import load_model
from stages.rewards.number_rewards import arithmetic

GROUPS = 4
ROWS = 8
MAX_TOKENS = 16
LEARNING_RATE = 1e-6


def dataset(steps: int) -> list[dict[str, Any]]:
    """``steps`` batches of sums, as conversations."""
    rng = random.Random(0)
    rows = []
    for _ in range(steps * GROUPS):
        a = rng.randint(10, 99)
        b = rng.randint(10, 99)
        asked = f"What is {a} + {b}? Answer with just the number."
        rows.append({"prompt": [{"role": "user", "content": asked}], "answer": str(a + b)})
    return rows


@dataclass(frozen=True)
class Measured:
    """One step of ours: seconds of its parts and of CPU, tokens as TRL counts, the floors of both
    engines in seconds."""

    generate: float
    train: float
    sync: float
    tokens: int
    generate_floor: float
    train_floor: float
    cpu: float
    gflops: float
    gb_per_s: float

    @property
    def seconds(self) -> float:
        return self.generate + self.train + self.sync


@dataclass(frozen=True)
class Peer:
    """One step of TRL's: its wall seconds, CPU seconds, and tokens by its own count."""

    seconds: float
    cpu: float
    tokens: int


class OurSide:
    def __init__(self, source: str, dtype: torch.dtype, threads: int, total_steps: int) -> None:
        model, self.tokenizer = load_model(source, dtype=torch.float32, seed=0)
        self.dtype = dtype
        self.sizes = Sizes.of(model)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainer = TorchTrainEngine(
            model,
            learning_rate=LEARNING_RATE,
            total_steps=total_steps,
            compute=dtype,
            threads=threads,
            device="cpu",
        )
        self.engine = TorchRolloutEngine(
            load_model(source, dtype=dtype, seed=0)[0],
            max_rows=GROUPS * ROWS,
            threads=threads,
            device="cpu",
        )
        self.algorithm = GRPO()

    async def step(self, number: int, rows: Sequence[dict[str, Any]]) -> Measured:
        rate, bandwidth = readings(self.dtype)
        began = time.perf_counter()
        cpu = time.process_time()
        prompts = [
            torch.tensor(
                self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)[
                    "input_ids"
                ]
            )
            for row in rows
        ]
        params = SamplingParams(
            max_tokens=MAX_TOKENS, stop_token_ids=(self.tokenizer.eos_token_id,)
        )
        asked = [
            GroupRequest(i, tuple(range(ROWS)), ids, params, seed=number)
            for i, ids in enumerate(prompts)
        ]
        made = [completion async for completion in self.engine.generate(asked)]
        made.sort(key=lambda completion: (completion.group, completion.place))
        generated = time.perf_counter()
        self.batch = self._batch(made, prompts, rows)
        self.trainer.train_batch(self.batch, self.algorithm)
        trained = time.perf_counter()
        await self.engine.load_weights(number + 1, dict(self.trainer.weights()))
        synced = time.perf_counter()
        cpu = time.process_time() - cpu
        lengths = [
            [len(c.token_ids) for c in made if c.group == group] for group in range(len(prompts))
        ]
        sizes = [len(ids) for ids in prompts]
        return Measured(
            generate=generated - began,
            train=trained - generated,
            sync=synced - trained,
            tokens=sum(len(c.token_ids) + sizes[c.group] for c in made),
            generate_floor=self._generate_floor(sizes, lengths, rate, bandwidth),
            train_floor=self._train_floor(sizes, lengths, rate, bandwidth),
            cpu=cpu,
            gflops=rate / 1e9,
            gb_per_s=bandwidth / 1e9,
        )

    def _batch(
        self,
        made: Sequence[Completion],
        prompts: Sequence[torch.Tensor],
        rows: Sequence[dict[str, Any]],
    ) -> TensorDict:
        texts = [
            self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            for completion in made
        ]
        rewards = torch.tensor(
            arithmetic(texts, answer=[rows[completion.group]["answer"] for completion in made])
        )
        return TensorDict(
            {
                "group": torch.tensor([completion.group for completion in made]),
                "place": torch.tensor([completion.place for completion in made]),
                "prompt_ids": jagged([prompts[completion.group] for completion in made]),
                "response_ids": jagged([completion.token_ids for completion in made]),
                "rollout_logprobs": jagged([completion.logprobs for completion in made]),
                "advantage": torch.cat(
                    [self.algorithm.credit({"reward": g})["advantage"] for g in rewards.split(ROWS)]
                ),
            },
            batch_size=[len(made)],
        )

    def _generate_floor(
        self, prompts: list[int], lengths: list[list[int]], rate: float, bandwidth: float
    ) -> float:
        sizes = self.sizes
        pairs_cost = 4 * self.sizes.layers * self.sizes.attention
        read = self.dtype.itemsize * (sizes.body + sizes.head) / bandwidth
        prefill = 2 * (sizes.body * sum(prompts) + sizes.head * len(prompts))
        total = max(read, (prefill + pairs_cost * sum(p * p / 2 for p in prompts)) / rate)
        for step in range(1, max(map(max, lengths))):
            active = [
                p + step
                for p, group in zip(prompts, lengths, strict=True)
                for length in group
                if length > step
            ]
            total += max(
                read,
                (2 * (sizes.body + sizes.head) * len(active) + pairs_cost * sum(active)) / rate,
            )
        return total

    def _train_floor(
        self, prompts: list[int], lengths: list[list[int]], rate: float, bandwidth: float
    ) -> float:
        sizes = self.sizes
        fed = sum(p + sum(group) - len(group) for p, group in zip(prompts, lengths, strict=True))
        predicted = fed - sum(prompts) + len(prompts)
        pairs = sum(
            p * p / 2 + sum((n - 1) * (p + n / 2) for n in group)
            for p, group in zip(prompts, lengths, strict=True)
        )
        operations = (
            6 * (sizes.body * fed + sizes.head * predicted)
            + 12 * sizes.layers * sizes.attention * pairs
        )
        return operations / rate + 7 * torch.float32.itemsize * self.parameters / bandwidth


# Records of a profile and the part of a step that they and what they call belong to; the first one
# that fits counts.
PARTS = {
    "part: packing": "packing",
    "part: clip": "clip",
    "Optimizer.step": "AdamW",
    "TokenLogprobsBackward": "head, logprobs, entropy: backward",
    "TokenLogprobs": "head, logprobs, entropy: forward",
    "_SharedPromptAttentionBackward": "attention: backward",
    "_SharedPromptAttention": "attention: forward",
    "_LinearBackward": "linear layers: backward",
    "evaluate_function: MmBackward": "linear layers: backward",
    "_Linear": "linear layers: forward",
    "aten::linear": "linear layers: forward",
    "AccumulateGrad": "gradients added",
    "evaluate_function": "norms, rope, activations, sums, embedding: backward",
    "part: forward": "norms, rope, activations, sums, embedding: forward",
}


def profiled(ours: OurSide) -> dict[str, dict[str, float]]:
    """Seconds of a train step on ``batch`` by its parts, and of its costliest operators without
    those that they call."""

    def labelled(name: str, call: Any) -> Any:
        def inside(*args: Any, **options: Any) -> Any:
            with torch.profiler.record_function(f"part: {name}"):
                return call(*args, **options)

        return inside

    engine: Any = ours.trainer
    parallel = engine.parallel
    model = engine.packed_model
    parallel.clip = labelled("clip", parallel.clip)
    model.hidden = labelled("forward", model.hidden)
    with (
        patch.object(packing, "pack", labelled("packing", packing.pack)),
        torch.profiler.profile() as profile,
    ):
        began = time.perf_counter()
        engine.train_batch(ours.batch, ours.algorithm)
        whole = time.perf_counter() - began
    del parallel.clip, model.hidden
    parts = dict.fromkeys(PARTS.values(), 0.0)
    operators: Counter[str] = Counter()
    for event in profile.events():
        names = ""
        at = event
        while at is not None:
            names = f"{names} {at.name}"
            at = at.cpu_parent
        if part := next((part for record, part in PARTS.items() if record in names), None):
            parts[part] += event.self_cpu_time_total / 1e6
        operators[event.name] += event.self_cpu_time_total / 1e6
    parts["everything else"] = whole - sum(parts.values())
    return {"parts": parts, "operators": dict(operators.most_common(12))}


def show_profile(found: dict[str, dict[str, float]]) -> None:
    whole = sum(found["parts"].values())
    print(f"\n{'train step by parts (with a profiler)':<56}{whole:>9.3f} s")
    for name, seconds in found["parts"].items():
        print(f"  {name:<54}{seconds:>9.3f} s{seconds / whole:>8.1%}")
    print("operators, without those that they call")
    for name, seconds in found["operators"].items():
        print(f"  {name[:54]:<54}{seconds:>9.3f} s{seconds / whole:>8.1%}")


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def against_trl(
    source: str, ours: OurSide, runner: asyncio.Runner, steps: int, recompute: bool
) -> dict[str, Any]:
    """Alternate ``steps`` of TRL's and ours, after one of each that is not counted."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load_model(source, dtype=torch.float32, seed=0)
    rows = dataset(steps + 1)
    theirs: list[Peer] = []
    measured: list[Measured] = []

    class Alternate(TrainerCallback):
        """Generation lies inside TRL's training step, so begin and end of the step enclose all of
        it."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.tokens = state.num_input_tokens_seen
            self.began = time.perf_counter()
            self.cpu = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.began
            cpu = time.process_time() - self.cpu
            theirs.append(Peer(seconds, cpu, int(state.num_input_tokens_seen - self.tokens)))
            number = len(measured)
            measured.append(
                runner.run(ours.step(number, rows[number * GROUPS : (number + 1) * GROUPS]))
            )

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GROUPS * ROWS,
            num_generations=ROWS,
            max_completion_length=MAX_TOKENS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            gradient_checkpointing=recompute,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            max_steps=steps + 1,
            shuffle_dataset=False,
            use_cpu=True,
            bf16=ours.dtype == torch.bfloat16,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        GRPOTrainer(
            model=model,
            reward_funcs=arithmetic,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Alternate()],
        ).train()
    return summary("TRL default" if recompute else "TRL plain", theirs[1:], measured[1:])


def alone(ours: OurSide, runner: asyncio.Runner, steps: int) -> dict[str, Any]:
    rows = dataset(steps + 1)
    measured = [
        runner.run(ours.step(i, rows[i * GROUPS : (i + 1) * GROUPS])) for i in range(steps + 1)
    ]
    return summary(None, [], measured[1:])


def summary(peer: str | None, theirs: list[Peer], measured: list[Measured]) -> dict[str, Any]:
    median = statistics.median
    result: dict[str, Any] = {
        "steps": len(measured),
        "seconds": median(m.seconds for m in measured),
        "tokens_per_step": median(m.tokens for m in measured),
        "tokens_per_s": median(m.tokens / m.seconds for m in measured),
        "generate_s": median(m.generate for m in measured),
        "generate_floor_s": median(m.generate_floor for m in measured),
        "generate_share_of_floor": median(m.generate_floor / m.generate for m in measured),
        "train_s": median(m.train for m in measured),
        "train_floor_s": median(m.train_floor for m in measured),
        "train_share_of_floor": median(m.train_floor / m.train for m in measured),
        "sync_s": median(m.sync for m in measured),
        "matmul_gflops": median(m.gflops for m in measured),
        "read_gb_per_s": median(m.gb_per_s for m in measured),
    }
    if peer:
        result["peer"] = {
            "name": peer,
            "seconds": median(t.seconds for t in theirs),
            "tokens_per_step": median(t.tokens for t in theirs),
            "tokens_per_s": median(t.tokens / t.seconds for t in theirs),
        }
        pairs = list(zip(measured, theirs, strict=True))
        result["ratio"] = median(m.tokens / m.seconds / (t.tokens / t.seconds) for m, t in pairs)
        result["cpu_ratio"] = median(m.tokens / m.cpu / (t.tokens / t.cpu) for m, t in pairs)
    return result


def show(result: dict[str, Any]) -> None:
    line = "{:<14}{:>10.2f} s{:>12.0f}{:>12.0f} tok/s".format
    print(f"\n{'':<14}{'step':>12}{'tokens':>12}{'speed':>18}")
    if "peer" in result:
        peer = result["peer"]
        print(line(peer["name"], peer["seconds"], peer["tokens_per_step"], peer["tokens_per_s"]))
    print(line("asyncdock", result["seconds"], result["tokens_per_step"], result["tokens_per_s"]))
    if "peer" in result:
        print(
            f"{'ratio':<14}{result['ratio']:>36.2f} x ({result['cpu_ratio']:.2f} x per CPU second)"
        )
    for part in ("generate", "train"):
        took, floor, share = (result[f"{part}_{key}"] for key in ("s", "floor_s", "share_of_floor"))
        print(
            f"  {part:<12}{took:>10.2f} s, floor {floor:.2f} s: {share:.0%} of what the machine "
            f"can do"
        )
    print(f"  {'sync':<12}{result['sync_s']:>10.2f} s")
    print(
        f"  this machine just then: {result['matmul_gflops']:.0f} GFLOP/s, "
        f"{result['read_gb_per_s']:.1f} GB/s"
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, or a directory in Hugging Face format"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="counted steps of each side; one more comes before"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--peer", choices=["plain", "default", "both", "none"], default="both")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the arithmetic"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the seconds of a train step go"
    )
    args = parser.parse_args()
    # libgomp and glibc read it when the process starts
    if any(name not in os.environ for name in ENVIRONMENT):
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**ENVIRONMENT, **os.environ}
        )
    torch.set_num_threads(args.threads)
    print(
        f"{args.model} {args.dtype}, {args.threads} threads, {GROUPS} prompts x {ROWS} completions "
        f"of at most {MAX_TOKENS} tokens, medians of {args.steps} steps\n"
        "tokens: completion + prompt, the prompt once per completion (TRL's count)"
    )
    if args.peer != "none":
        with harness.needs("bench"):
            import trl  # noqa: F401
    ours = OurSide(args.model, getattr(torch, args.dtype), args.threads, 3 * (args.steps + 1))
    results = []
    with asyncio.Runner() as runner:
        if args.peer == "none":
            results.append(alone(ours, runner, args.steps))
            show(results[-1])
        for peer, recompute in (("plain", False), ("default", True)):
            if args.peer in (peer, "both"):
                results.append(against_trl(args.model, ours, runner, args.steps, recompute))
                show(results[-1])
        if args.profile:
            results.append(profiled(ours))
            show_profile(results[-1])
        runner.run(ours.engine.close())
    if args.json:
        head = {"model": args.model, "dtype": args.dtype, "threads": args.threads}
        args.json.write({**head, "runs": results})


if __name__ == "__main__":
    main()
