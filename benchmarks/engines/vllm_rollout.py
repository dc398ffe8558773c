"""The vLLM rollout engine beside the trainer: how far their logprobs are apart, and what an update
of the weights costs.

    .venv-vllm/bin/python -m benchmarks.engines.vllm_rollout [--model smollm2|PATH] [--threads 2]
                                                             [--json FILE]

Logprobs: ``groups`` prompts, 8 responses each, sampled at several temperatures; each token's
logprob as vLLM reports it against what the torch trainer computes for the same tokens. Updates:
with rows in flight, the seconds in which no token could be made (exposed) and those beside
generation (hidden), for each transport and way of treating the rows. Of the exposed ones, ``pause``
is until vLLM has stopped between two tokens, ``load`` until its workers have split, fused and
packed the weights. Beside them the seconds of a plain copy of the same bytes, taken in the same
run. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import harness
from pipeline.data.arena import shared_memory_directory
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch.train import TorchTrainEngine
from stages.engines.vllm.rollout import VllmReceivingEngine, VllmRolloutEngine
from stages.model.load import load_model, load_tokenizer, model_folder
from stages.weights.transport.network import Credentials, WeightSender
from stages.weights.transport.store import WeightStore

GROUP = 8
ARMS: list[tuple[type[VllmRolloutEngine], str]] = [
    (VllmRolloutEngine, "keep"),
    (VllmRolloutEngine, "rebuild"),
    (VllmReceivingEngine, "keep"),
]
TEMPERATURES = (0.0, 0.7, 1.0)
SECRET = b"of the benchmark of vLLM"


def build(
    kind: type[VllmRolloutEngine], source: str, threads: int, kv_cache: Any
) -> VllmRolloutEngine:
    shared = shared_memory_directory() / f"asyncdock-benchmark-{time.monotonic_ns()}"
    shared.mkdir()
    Credentials(SECRET, shared).write(shared)
    return kind(
        model_folder(source),
        shared=shared,
        dtype=torch.float32,
        max_rows=32,
        max_model_len=512,
        block_size=32,
        kv_cache_bytes=2**29,
        enforce_eager=True,
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


async def gap(
    engine: VllmRolloutEngine, trainer: TorchTrainEngine, asked: list[GroupRequest]
) -> torch.Tensor:
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


class Timed:
    """Calls of ``act``, each one's seconds."""

    def __init__(self, act: Callable[..., Awaitable[Any]]) -> None:
        self.act = act
        self.seconds = list[float]()

    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return await self.act(*arguments, **options)
        finally:
            self.seconds.append(time.perf_counter() - began)


async def updates(
    engine: VllmRolloutEngine,
    sender: WeightSender,
    asked: list[GroupRequest],
    weights: Any,
    repeats: int,
) -> dict[str, float]:
    found: dict[str, list[float]] = {
        name: [] for name in ("exposed", "hidden", "pause", "load", "copy")
    }
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    pause = engine._llm.pause_generation = Timed(engine._llm.pause_generation)
    load = engine._llm.update_weights = Timed(engine._llm.update_weights)
    for repeat in range(repeats + 1):
        stream = engine.generate(asked)
        await anext(stream)
        received = 0.0
        version = engine.version + 1
        if isinstance(engine, VllmReceivingEngine):
            published = await asyncio.to_thread(sender.publish, version, weights.items())
            began = time.perf_counter()
            landed = await engine.receive(published)
            received = time.perf_counter() - began
            times = await engine.load_weights(version, landed)
        else:
            times = await engine.load_weights(version, weights)
        began = time.perf_counter()
        for name, tensor in weights.items():
            target[name].copy_(tensor)
        copied = time.perf_counter() - began
        await stream.aclose()  # type: ignore[attr-defined]
        if repeat:  # the first one finds no page of the shared memory in place
            took = (
                times.exposed,
                times.hidden + received,
                pause.seconds[-1],
                load.seconds[-1],
                copied,
            )
            for name, seconds in zip(found, took, strict=True):
                found[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    model, _ = load_model(options.model, dtype=torch.float32, seed=0)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    result: dict[str, Any] = {"model": options.model, "bytes": nbytes, "gap": [], "update": []}
    print(f"{options.model}: weights of {nbytes / 2**20:.0f} MiB\n")
    directory = shared_memory_directory() / f"asyncdock-benchmark-trainer-{time.monotonic_ns()}"
    sender = WeightSender(WeightStore(directory), host="127.0.0.1", secret=SECRET)
    try:
        await arms(options, sender, weights, result)
    finally:
        sender.close()
        shutil.rmtree(directory, ignore_errors=True)
    return result


async def arms(
    options: argparse.Namespace, sender: WeightSender, weights: Any, result: dict[str, Any]
) -> None:
    for arm, (kind, kv_cache) in enumerate(ARMS):
        began = time.perf_counter()
        engine = await asyncio.to_thread(build, kind, options.model, options.threads, kv_cache)
        start = time.perf_counter() - began
        try:
            if not arm:
                print(f"{'temperature':<14}{'tokens':>8}{'max gap':>12}{'mean gap':>12}")
                for temperature in TEMPERATURES:
                    # the trainer keeps its model
                    own, _ = load_model(options.model, dtype=torch.float32, seed=0)
                    trainer = TorchTrainEngine(
                        own, learning_rate=1e-6, total_steps=1, temperature=temperature
                    )
                    params = SamplingParams(max_tokens=options.tokens, temperature=temperature)
                    found = await gap(
                        engine, trainer, requests(options.model, options.groups, params)
                    )
                    row = {"temperature": temperature, "tokens": len(found)}
                    row |= {"max": float(found.max()), "mean": float(found.mean())}
                    result["gap"].append(row)
                    print(
                        f"{temperature:<14}{len(found):>8}{row['max']:>12.2e}{row['mean']:>12.2e}",
                        flush=True,
                    )
                names = (
                    "exposed s",
                    "pause s",
                    "load s",
                    "hidden s",
                    "copy s",
                    "exposed/copy",
                    "start s",
                )
                print(
                    f"\n{'transport':<15}{'their KV':<10}"
                    + "".join(f"{name:>13}" for name in names)
                )
            # One response of a token, so that an update begins when the other 31 are being made.
            first, *rest = requests(options.model, 4, SamplingParams(max_tokens=400))
            short = GroupRequest(9, (0,), first.prompt_ids, SamplingParams(max_tokens=1), 9)
            asked = [
                short,
                GroupRequest(0, first.places[1:], first.prompt_ids, first.params, 0),
                *rest,
            ]
            transport = "network" if issubclass(kind, VllmReceivingEngine) else "shared_memory"
            row: dict[str, Any] = {"transport": transport, "kv_cache": kv_cache, "start": start}
            row |= await updates(engine, sender, asked, weights, options.repeats)
        finally:
            await engine.close()
        result["update"].append(row)
        print(
            f"{transport:<15}{kv_cache:<10}"
            + "".join(
                f"{row[name]:>13.2f}" for name in ("exposed", "pause", "load", "hidden", "copy")
            )
            + f"{row['exposed'] / row['copy']:>13.1f}{start:>13.0f}",
            flush=True,
        )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    if options.json:
        options.json.write(result)


if __name__ == "__main__":  # vLLM's processes import this file
    main()
