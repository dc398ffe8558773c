"""The vLLM rollout engine beside the trainer: how far their logprobs are apart, and what an update of the weights costs.

    .venv-vllm/bin/python benchmarks/vllm_rollout.py [--model smollm2|PATH] [--threads 2] [--json FILE]

Logprobs: ``groups`` prompts, 8 responses each, sampled at several temperatures; each token's logprob as vLLM reports it
against what the torch trainer computes for the same tokens. Updates: with rows in flight, the seconds in which no token
could be made (exposed) and those beside generation (hidden), for each way of treating the rows; beside them the seconds of
a plain copy of the same bytes, taken in the same run. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from pipeline.warehouse import shared_memory_directory
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch_train import TorchTrainEngine
from stages.engines.vllm_rollout import VllmRolloutEngine
from stages.models import load_model, load_tokenizer, model_folder

GROUP = 8
ARMS = [("keep", "keep"), ("keep", "rebuild"), ("abort", "rebuild")]
TEMPERATURES = (0.0, 0.7, 1.0)


def build(source: str, threads: int, pause: Any, kv_cache: Any) -> VllmRolloutEngine:
    return VllmRolloutEngine(
        model_folder(source),
        shared=shared_memory_directory() / f"asyncdock-benchmark-{time.monotonic_ns()}",
        dtype=torch.float32,
        max_rows=32,
        max_model_len=512,
        block_size=32,
        kv_cache_bytes=2**29,
        enforce_eager=True,
        pause=pause,
        kv_cache=kv_cache,
        threads=threads,
    )


def requests(source: str, groups: int, params: SamplingParams) -> list[GroupRequest]:
    tokenizer = load_tokenizer(source)
    made = []
    for group in range(groups):
        question = [{"role": "user", "content": f"What is {group + 2} + {3 * group + 1}? Explain."}]
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        made.append(GroupRequest(group, tuple(range(GROUP)), torch.tensor(ids), params, group))
    return made


async def gap(engine: VllmRolloutEngine, trainer: TorchTrainEngine, asked: list[GroupRequest]) -> torch.Tensor:
    """|vLLM's logprob - the trainer's| of every token."""
    done = [completion async for completion in engine.generate(asked)]
    done.sort(key=lambda completion: (completion.group, completion.place))
    rows = TensorDict({}, batch_size=[len(done)])
    rows["group"] = torch.tensor([c.group for c in done])
    rows["place"] = torch.tensor([c.place for c in done])
    rows["prompt_ids"] = jagged([asked[c.group].prompt_ids for c in done])
    rows["response_ids"] = jagged([c.token_ids for c in done])
    computed = await asyncio.to_thread(trainer.logprobs, rows)
    return (computed.values() - torch.cat([c.logprobs for c in done])).abs()


def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


async def updates(engine: VllmRolloutEngine, asked: list[GroupRequest], weights: Any, repeats: int) -> dict[str, float]:
    exposed, hidden, copies = [], [], []
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    for repeat in range(repeats + 1):
        stream = engine.generate(asked)
        await anext(stream)
        times = await engine.load_weights(engine.version + 1, weights)
        began = time.perf_counter()
        for name, tensor in weights.items():
            target[name].copy_(tensor)
        copied = time.perf_counter() - began
        await stream.aclose()  # type: ignore[attr-defined]
        if repeat:  # the first one finds no page of the shared memory in place
            exposed.append(times.exposed)
            hidden.append(times.hidden)
            copies.append(copied)
    return {
        "exposed": statistics.median(exposed),
        "hidden": statistics.median(hidden),
        "copy": statistics.median(copies),
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    model, _ = load_model(options.model, dtype=torch.float32, seed=0)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    result: dict[str, Any] = {"model": options.model, "bytes": nbytes, "gap": [], "update": []}
    print(f"{options.model}: weights of {nbytes / 2**20:.0f} MiB\n")
    for arm, (pause, kv_cache) in enumerate(ARMS):
        began = time.perf_counter()
        engine = await asyncio.to_thread(build, options.model, options.threads, pause, kv_cache)
        start = time.perf_counter() - began
        try:
            if not arm:
                print(f"{'temperature':<14}{'tokens':>8}{'max gap':>12}{'mean gap':>12}")
                for temperature in TEMPERATURES:
                    own, _ = load_model(options.model, dtype=torch.float32, seed=0)  # the trainer keeps its model
                    trainer = TorchTrainEngine(own, learning_rate=1e-6, total_steps=1, temperature=temperature)
                    params = SamplingParams(max_tokens=options.tokens, temperature=temperature)
                    found = await gap(engine, trainer, requests(options.model, options.groups, params))
                    row = {"temperature": temperature, "tokens": len(found)}
                    row |= {"max": float(found.max()), "mean": float(found.mean())}
                    result["gap"].append(row)
                    print(f"{temperature:<14}{len(found):>8}{row['max']:>12.2e}{row['mean']:>12.2e}", flush=True)
                names = ("exposed s", "hidden s", "copy s", "exposed/copy", "start s")
                print(f"\n{'rows':<8}{'their KV':<10}" + "".join(f"{name:>14}" for name in names))
            # One response of a token, so that an update begins when the other 31 are being made.
            first, *rest = requests(options.model, 4, SamplingParams(max_tokens=400))
            short = GroupRequest(9, (0,), first.prompt_ids, SamplingParams(max_tokens=1), 9)
            asked = [short, GroupRequest(0, first.places[1:], first.prompt_ids, first.params, 0), *rest]
            row = {"pause": pause, "kv_cache": kv_cache, "start": start}
            row |= await updates(engine, asked, weights, options.repeats)
        finally:
            await engine.close()
        result["update"].append(row)
        print(
            f"{pause:<8}{kv_cache:<10}{row['exposed']:>14.2f}{row['hidden']:>14.2f}{row['copy']:>14.2f}"
            f"{row['exposed'] / row['copy']:>14.1f}{start:>14.0f}",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":  # vLLM's processes import this file
    main()
