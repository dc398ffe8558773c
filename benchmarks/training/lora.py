"""Adapters (LoRA) beside full training, in one process: bytes published, a train step, a decode
step and a swap.

    train    an engine of each kind, in turns, on the same rows: seconds and processor seconds of a step
    decode   one decoder with adapters (unmerged) and one with the merged weights, in turns: seconds of a step
    swap     new adapters into the one; new merged weights into the other, made from the base and the adapters
    memory   bytes of the tensors that each decoder needs, between swaps and during one; the merged one starts from the base
    bfloat16 what rounding leaves of the update that follows the first optimizer step (B is +-2e-4, AdamW's first step)

    python -m benchmarks.training.lora [--model smollm2] [--rank 16] [--repeats 5] [--threads 2] [--json FILE]

A version costs a swap and its decode steps, so the table ends with the number of steps from which
merging is faster. Ratios are medians of those of neighbouring turns: they hold on a machine that
does other work too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import harness
from stages.adapters.names import adapter_shapes, down_of, up_of
from stages.adapters.options import AdapterOptions
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import load_model

# of a train step, as in quickstart: groups, rows of each, tokens
GROUPS = 4
SIZE = 8
PROMPT = 40
RESPONSE = 8
ROWS = (1, 8, 64)  # that decode at once, in groups of 8
FIRST_STEP = 2e-4  # the learning rate of recipes/lora.toml
CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


def rows_of_a_step(vocabulary: int) -> TensorDict:
    random = torch.Generator().manual_seed(0)
    count = GROUPS * SIZE
    prompts = [torch.randint(vocabulary, (PROMPT,), generator=random) for _ in range(GROUPS)]
    responses = [torch.randint(vocabulary, (RESPONSE,), generator=random) for _ in range(count)]
    places = torch.arange(count)
    batch = TensorDict(
        {"group": places // SIZE, "place": places % SIZE, "advantage": 1.0 - 2.0 * (places % 2)},
        [count],
    )
    ragged = {"prompt_ids": [prompts[i // SIZE] for i in range(count)], "response_ids": responses}
    ragged["rollout_logprobs"] = [torch.full((RESPONSE,), -10.0)] * count
    for name, rows in ragged.items():
        batch[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return batch


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Of the clock, and of the processor."""
    began = time.perf_counter()
    cpu = time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def in_turns(one: Callable[[], Any], other: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Medians of both after a first call of each, and of the ratios of neighbouring calls."""
    one(), other()
    pairs = [(seconds(one), seconds(other)) for _ in range(repeats)]
    found = {
        name: statistics.median(pair[at][0] for pair in pairs)
        for at, name in enumerate(("one", "other"))
    }
    for at, name in enumerate(("ratio", "cpu_ratio")):
        found[name] = statistics.median(pair[0][at] / pair[1][at] for pair in pairs)
    return found


def train(source: str, options: AdapterOptions, threads: int, repeats: int) -> dict[str, float]:
    def engine(adapters: AdapterOptions | None) -> TorchTrainEngine:
        model, _ = load_model(source, dtype=torch.float32, seed=0)
        given: dict[str, Any] = {
            "learning_rate": 1e-5,
            "total_steps": 1000,
            "token_budget": 2048,
            "device": CPU,
        }
        return TorchTrainEngine(model, **given, threads=threads, adapters=adapters)

    with_adapters = engine(options)
    full = engine(None)
    batch = rows_of_a_step(full.model.config.get_text_config().vocab_size)
    return in_turns(
        lambda: with_adapters.train_batch(batch, GRPO()),
        lambda: full.train_batch(batch, GRPO()),
        repeats,
    )


def merged(base: Weights, adapters: Weights, scale: float) -> Weights:
    """``base`` with the adapters' products added."""
    out = {}
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        product = (
            (adapters[up_of(layer)], adapters[down_of(layer)])
            if down_of(layer) in adapters
            else None
        )
        out[name] = weight if product is None else torch.addmm(weight, *product, alpha=scale)
    return out


def held(decoder: TorchDecoder) -> int:
    """Bytes of the weights that ``decoder`` computes with, adapters included; those in oneDNN's
    layout by their numbers."""
    own = {id(value): value for value in decoder.model.parameters()}
    prepared = [getattr(place.holder, place.attribute) for place in decoder.weights._places]
    linears = decoder.weights._llama.linears() if decoder.weights._llama else []
    packed = [linear.packed for linear in linears]
    return nbytes({**own, **{id(value): value for value in (*prepared, *packed)}}.values())


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors)


@torch.no_grad()
def rounding(source: str, options: AdapterOptions) -> dict[str, float]:
    """What bfloat16 loses of a small update s·B·A of the weights: the share of the adapted weights
    whose sum with it is rounded to what they were, and the error of the update that is left, as a
    share of it, merged and unmerged."""
    model, _ = load_model(source, dtype=torch.bfloat16, seed=0)
    random = torch.Generator().manual_seed(0)
    base = dict(model.named_parameters())
    kept = count = 0
    squares = dict.fromkeys(("update", "merged", "unmerged"), 0.0)
    for name, shape in adapter_shapes(model, options).items():
        if not name.endswith(down_of("")):
            continue
        weight = base[f"{name.removesuffix(down_of(''))}.weight"]
        down = torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=random)
        up = (
            FIRST_STEP
            * torch.randint(0, 2, (len(weight), options.rank), generator=random)
            .mul(2)
            .sub(1)
            .float()
        )
        update = options.scale * up @ down
        rounded = (weight.float() + update).bfloat16()
        kept = kept + int((rounded == weight).sum())
        count = count + weight.numel()
        squares["update"] += float(update.square().sum())
        squares["merged"] += float((rounded.float() - weight.float() - update).square().sum())
        of_parts = options.scale * up.bfloat16().float() @ down.bfloat16().float()
        squares["unmerged"] += float((of_parts - update).square().sum())
    errors = {name: (squares[name] / squares["update"]) ** 0.5 for name in ("merged", "unmerged")}
    return {"kept": kept / count, **errors}


@torch.inference_mode()
def decode(
    source: str, options: AdapterOptions, repeats: int
) -> tuple[dict[str, dict[str, float]], dict[str, float], dict[str, dict[str, int]]]:
    """Of a decode step by the number of rows, of a swap, and bytes: between swaps and during
    one."""
    models = [load_model(source, dtype=torch.float32, seed=0)[0] for _ in range(3)]
    base = {name: value.detach() for name, value in models[2].named_parameters()}
    random = torch.Generator().manual_seed(0)
    shapes = adapter_shapes(models[2], options)
    adapters = {
        name: torch.empty(shape).normal_(std=0.01, generator=random)
        for name, shape in shapes.items()
    }
    unmerged = TorchDecoder(models[0], CPU, adapters=options)
    plain = TorchDecoder(models[1], CPU)

    def swap(decoder: TorchDecoder, make: Callable[[], Weights]) -> Callable[[], Any]:
        return lambda: decoder.weights.install(decoder.weights.prepare(make()))

    swaps = in_turns(
        swap(unmerged, lambda: adapters),
        swap(plain, lambda: merged(base, adapters, options.scale)),
        repeats,
    )
    made = merged(base, adapters, options.scale)
    sets = {
        "unmerged": (
            held(unmerged),
            nbytes(tensor for *_, tensor in unmerged.weights.prepare(adapters)),
        ),
        "merged": (
            held(plain) + nbytes(base.values()),
            nbytes(tensor for *_, tensor in plain.weights.prepare(made)),
        ),
    }
    # A merge makes its sum before it lays that out: one tensor at a time at best, which is not
    # counted.
    memory = {name: {"between": rest, "swap": rest + new} for name, (rest, new) in sets.items()}
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
        steps[str(rows)] = in_turns(
            partial(unmerged.decode, tokens), partial(plain.decode, tokens), 4 * repeats
        )
    return steps, {**swaps, "logit_gap": gap}, memory


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options = AdapterOptions(arguments.rank, 2.0 * arguments.rank)
    model, _ = load_model(arguments.model, dtype=torch.float32, seed=0)
    whole = 4 * sum(value.numel() for value in model.parameters())
    published = 4 * sum(
        torch.Size(shape).numel() for shape in adapter_shapes(model, options).values()
    )
    del model
    print(
        f"published: {published / 2**20:.1f} MiB of {whole / 2**20:.1f} MiB, "
        f"{published / whole:.2%}\n"
    )
    found: dict[str, Any] = {"published": published, "whole": whole}

    def show(name: str, of: dict[str, float]) -> None:
        times = " | ".join(f"{1000 * of[kind]:.1f} ms" for kind in ("one", "other"))
        print(f"| {name} | {times} | {of['ratio']:.2f} | {of['cpu_ratio']:.2f} |", flush=True)

    print(
        "| | adapters, unmerged | full or merged | ratio | of processor time "
        "|\n|---|---|---|---|---|",
        flush=True,
    )
    found["train"] = train(arguments.model, options, arguments.threads, arguments.repeats)
    show("train step", found["train"])
    found["decode"], found["swap"], found["memory"] = decode(
        arguments.model, options, arguments.repeats
    )
    for rows, of in found["decode"].items():
        show(f"decode step, {rows} rows", of)
    show("swap", found["swap"])
    for when, name in (("between", "memory between swaps"), ("swap", "memory during a swap")):
        one, other = (found["memory"][kind][when] for kind in ("unmerged", "merged"))
        print(f"| {name} | {one / 2**20:.1f} MiB | {other / 2**20:.1f} MiB | {one / other:.2f} | |")
    print("\nMerging is faster from so many decode steps a version on:")
    for rows, of in found["decode"].items():
        saved = of["one"] - of["other"]
        from_steps = (
            (found["swap"]["other"] - found["swap"]["one"]) / saved if saved > 0 else math.inf
        )
        found["decode"][rows]["merging_pays_after"] = from_steps
        print(f"  {rows} rows: {from_steps:.0f}")
    found["bfloat16"] = of = rounding(arguments.model, options)
    print(
        f"\nIn bfloat16, of a first step's update, merging leaves {of['kept']:.1%} of the weights "
        f"as they were. The error of"
    )
    print(f"the update is {of['merged']:.3f} of it merged, and {of['unmerged']:.3f} unmerged.")
    print(
        f"\nlargest difference of a logit, unmerged against merged: "
        f"{found['swap']['logit_gap']:.2g}"
    )
    if arguments.json:
        arguments.json.write(found)


if __name__ == "__main__":
    main()
