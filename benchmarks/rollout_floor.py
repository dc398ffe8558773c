"""How near the torch rollout engine is to what this machine could do at best, measured in the same run.

    python benchmarks/rollout_floor.py [--model smollm2|tiny|PATH] [--threads 2] [--peer] [--json FILE]

The floor of a case is the sum over its forwards (a prefill of all prompts, then a decode step per further token) of

    max(bytes of the weights / read bandwidth, floating point operations / matmul rate)

with the operations of the linear layers (2 per weight and token), of the logits (only where a token is drawn) and of
attention; bandwidth and rate are the best of this machine's readings, taken anew beside every repetition, so that other
work on the machine slows both sides. ``--peer`` adds transformers' ``generate`` on the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch_rollout import TorchRolloutEngine
from stages.models import load_model

PROMPT = 45  # tokens


@dataclass(frozen=True)
class Case:
    rows: int
    group: int  # rows that share a prompt
    tokens: int  # new tokens per row


CASES = [Case(1, 1, 32), Case(8, 8, 16), Case(32, 1, 16), Case(32, 8, 16), Case(64, 8, 16), Case(64, 8, 64)]


@dataclass(frozen=True)
class Sizes:
    """What a forward of the model costs: ``body`` weights of linear layers, ``head`` those of the logits."""

    body: int
    head: int
    layers: int
    attention: int  # query heads x head width
    item: int  # bytes per weight

    @classmethod
    def of(cls, model: Any) -> Sizes:
        config = model.config
        head = model.get_output_embeddings().weight.numel()
        linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            sum(linear) - head, head, config.num_hidden_layers, config.num_attention_heads * width, model.dtype.itemsize
        )

    def seconds(self, case: Case, rate: float, bandwidth: float) -> float:
        prompts = case.rows // case.group
        read = self.item * (self.body + self.head) / bandwidth
        # Causal attention of P tokens is P * P / 2 pairs, 4 operations per pair and attention channel.
        pairs = prompts * PROMPT * PROMPT / 2
        prefill = 2 * (self.body * prompts * PROMPT + self.head * prompts) + 4 * self.layers * self.attention * pairs
        total = max(read, prefill / rate)
        for step in range(1, case.tokens):
            pairs = case.rows * (PROMPT + step)
            decode = 2 * (self.body + self.head) * case.rows + 4 * self.layers * self.attention * pairs
            total += max(read, decode / rate)
        return total


def best(act: Callable[[], Any], times: int = 5) -> float:
    """Least seconds of ``times``."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def readings(dtype: torch.dtype) -> tuple[float, float]:
    """This machine's matmul rate (operations/s) and read bandwidth (bytes/s) just now."""
    square = torch.randn(1024, 1024, dtype=dtype)
    long = torch.ones(64 * 2**20, dtype=torch.float32)
    return 2 * 1024**3 / best(lambda: square @ square), 4 * long.numel() / best(long.sum)


def requests(case: Case, vocabulary: int) -> list[GroupRequest]:
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=case.tokens)
    return [
        GroupRequest(
            i, tuple(range(case.group)), torch.randint(0, vocabulary, (PROMPT,), generator=generator), params, i
        )
        for i in range(case.rows // case.group)
    ]


async def engine_seconds(engine: TorchRolloutEngine, asked: list[GroupRequest], expected: int) -> float:
    began = time.perf_counter()
    made = sum([len(done.token_ids) async for done in engine.generate(asked)])
    assert made == expected
    return time.perf_counter() - began


def peer_seconds(model: Any, asked: list[GroupRequest], case: Case) -> float:
    ids = torch.stack([request.prompt_ids for request in asked]).repeat_interleave(case.group, 0)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        min_new_tokens=case.tokens,
        max_new_tokens=case.tokens,
        pad_token_id=0,
    )
    assert out.shape[1] == PROMPT + case.tokens
    return time.perf_counter() - began


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a directory in Hugging Face format")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="also time transformers' generate")
    parser.add_argument("--case", help="ROWSxGROUPxTOKENS, e.g. 64x8x16, in place of the usual ones")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [Case(*map(int, args.case.split("x")))] if args.case else CASES
    model, _ = load_model(args.model, dtype=torch.float32, seed=0)
    peer = load_model(args.model, dtype=torch.float32, seed=0)[0] if args.peer else None
    sizes, dtype, vocabulary = Sizes.of(model), model.dtype, model.config.vocab_size
    engine = TorchRolloutEngine(model, max_rows=64, threads=args.threads, device="cpu")
    await engine_seconds(engine, requests(Case(8, 8, 4), vocabulary), 32)  # first calls choose kernels
    rows = []
    print(f"{args.model} float32, {args.threads} threads, prompts of {PROMPT} tokens; medians of {args.repeat}")
    for case in cases:
        asked, count = requests(case, vocabulary), case.rows * case.tokens
        took, floors, shares, peers = [], [], [], []
        for _ in range(args.repeat):
            rate, bandwidth = readings(dtype)
            took.append(await engine_seconds(engine, asked, count))
            floors.append(sizes.seconds(case, rate, bandwidth))
            shares.append(floors[-1] / took[-1])
            if peer is not None:
                peers.append(peer_seconds(peer, asked, case))
        row = {
            **asdict(case),
            "tokens_per_s": count / statistics.median(took),
            "floor_tokens_per_s": count / statistics.median(floors),
            "share_of_floor": statistics.median(shares),
            "matmul_gflops": rate / 1e9,
            "read_gb_per_s": bandwidth / 1e9,
            "transformers_tokens_per_s": count / statistics.median(peers) if peers else None,
        }
        rows.append(row)
        beside = f", transformers generate {row['transformers_tokens_per_s']:.0f}" if peers else ""
        print(
            f"{case.rows:3} rows in groups of {case.group} x {case.tokens:2} tokens: {row['tokens_per_s']:5.0f} tok/s, "
            f"floor {row['floor_tokens_per_s']:5.0f} ({rate / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.0f} GB/s), "
            f"{row['share_of_floor']:.0%} of it{beside}",
            flush=True,
        )
    await engine.close()
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "threads": args.threads, "cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
