"""Adapters (LoRA) beside full training, in one process: bytes published, a train step, a decode step and a swap.

    train    an engine of each kind, in turns, on the same rows: seconds and processor seconds of a step
    decode   one decoder with adapters (unmerged) and one with the merged weights, in turns: seconds of a step
    swap     new adapters into the one; new merged weights into the other, made from the base and the adapters

    python benchmarks/lora.py [--model smollm2] [--rank 16] [--repeats 5] [--threads 2] [--json FILE]

Ratios are medians of those of neighbouring turns: they hold on a machine that does other work too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from stages.adapters.names import adapter_shapes, down_of, up_of
from stages.adapters.options import AdapterOptions
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.train import TorchTrainEngine
from stages.models import load_model

GROUPS, SIZE, PROMPT, RESPONSE = 4, 8, 40, 8  # of a train step, as in quickstart: groups, rows of each, tokens
ROWS = (1, 8, 64)  # that decode at once, in groups of 8
CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


def rows_of_a_step(vocabulary: int) -> TensorDict:
    random, count = torch.Generator().manual_seed(0), GROUPS * SIZE
    prompts = [torch.randint(vocabulary, (PROMPT,), generator=random) for _ in range(GROUPS)]
    responses = [torch.randint(vocabulary, (RESPONSE,), generator=random) for _ in range(count)]
    places = torch.arange(count)
    batch = TensorDict(
        {"group": places // SIZE, "place": places % SIZE, "advantage": 1.0 - 2.0 * (places % 2)}, [count]
    )
    ragged = {"prompt_ids": [prompts[i // SIZE] for i in range(count)], "response_ids": responses}
    ragged["rollout_logprobs"] = [torch.full((RESPONSE,), -10.0)] * count
    for name, rows in ragged.items():
        batch[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return batch


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Of the clock, and of the processor."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def in_turns(one: Callable[[], Any], other: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Medians of both after a first call of each, and of the ratios of neighbouring calls."""
    one(), other()
    pairs = [(seconds(one), seconds(other)) for _ in range(repeats)]
    found = {name: statistics.median(pair[at][0] for pair in pairs) for at, name in enumerate(("one", "other"))}
    for at, name in enumerate(("ratio", "cpu_ratio")):
        found[name] = statistics.median(pair[0][at] / pair[1][at] for pair in pairs)
    return found


def train(source: str, options: AdapterOptions, threads: int, repeats: int) -> dict[str, float]:
    def engine(adapters: AdapterOptions | None) -> TorchTrainEngine:
        model, _ = load_model(source, dtype=torch.float32, seed=0)
        given: dict[str, Any] = {"learning_rate": 1e-5, "total_steps": 1000, "token_budget": 2048, "device": CPU}
        return TorchTrainEngine(model, **given, threads=threads, adapters=adapters)

    with_adapters, full = engine(options), engine(None)
    batch = rows_of_a_step(full.model.config.get_text_config().vocab_size)
    return in_turns(lambda: with_adapters.train_batch(batch, GRPO()), lambda: full.train_batch(batch, GRPO()), repeats)


def merged(base: Weights, adapters: Weights, scale: float) -> Weights:
    """``base`` with the adapters' products added."""
    out = {}
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        product = (adapters[up_of(layer)], adapters[down_of(layer)]) if down_of(layer) in adapters else None
        out[name] = weight if product is None else torch.addmm(weight, *product, alpha=scale)
    return out


@torch.inference_mode()
def decode(source: str, options: AdapterOptions, repeats: int) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Of a decode step by the number of rows, and of a swap."""
    models = [load_model(source, dtype=torch.float32, seed=0)[0] for _ in range(3)]
    base = {name: value.detach() for name, value in models[2].named_parameters()}
    random = torch.Generator().manual_seed(0)
    shapes = adapter_shapes(models[2], options)
    adapters = {name: torch.empty(shape).normal_(std=0.01, generator=random) for name, shape in shapes.items()}
    unmerged, plain = TorchDecoder(models[0], CPU, adapters=options), TorchDecoder(models[1], CPU)

    def swap(decoder: TorchDecoder, make: Callable[[], Weights]) -> Callable[[], Any]:
        return lambda: decoder.weights.install(decoder.weights.prepare(make()))

    swaps = in_turns(
        swap(unmerged, lambda: adapters), swap(plain, lambda: merged(base, adapters, options.scale)), repeats
    )
    ids = torch.arange(PROMPT) + 5
    gap = max(float((unmerged.score(ids, ids) - plain.score(ids, ids)).abs().max()), 0.0)
    steps = {}
    for rows in ROWS:
        for decoder in (unmerged, plain):
            decoder.clear()
            prompts, _ = decoder.prefill([ids] * max(1, rows // SIZE))
            for row in range(rows):
                decoder.join(prompts[row // SIZE])
        tokens = [7] * rows
        steps[str(rows)] = in_turns(lambda: unmerged.decode(tokens), lambda: plain.decode(tokens), 4 * repeats)  # noqa: B023
    return steps, {**swaps, "logit_gap": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options = AdapterOptions(arguments.rank, 2.0 * arguments.rank)
    model, _ = load_model(arguments.model, dtype=torch.float32, seed=0)
    whole = 4 * sum(value.numel() for value in model.parameters())
    published = 4 * sum(torch.Size(shape).numel() for shape in adapter_shapes(model, options).values())
    del model
    print(f"published: {published / 2**20:.1f} MiB of {whole / 2**20:.1f} MiB, {published / whole:.2%}\n")
    found: dict[str, Any] = {"published": published, "whole": whole}

    def show(name: str, of: dict[str, float]) -> None:
        times = " | ".join(f"{1000 * of[kind]:.1f} ms" for kind in ("one", "other"))
        print(f"| {name} | {times} | {of['ratio']:.2f} | {of['cpu_ratio']:.2f} |", flush=True)

    print("| | adapters, unmerged | full or merged | ratio | of processor time |\n|---|---|---|---|---|", flush=True)
    found["train"] = train(arguments.model, options, arguments.threads, arguments.repeats)
    show("train step", found["train"])
    found["decode"], found["swap"] = decode(arguments.model, options, arguments.repeats)
    for rows, of in found["decode"].items():
        show(f"decode step, {rows} rows", of)
    show("swap", found["swap"])
    print(f"\nlargest difference of a logit, unmerged against merged: {found['swap']['logit_gap']:.2g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
