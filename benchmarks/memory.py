"""Memory of a training step and of a rollout engine: derived from the recipe, beside what a process really takes.

    for each case:  random model ▶ folder ▶ a fresh process: warm up on another model ▶ (resident memory) ▶ the engine of
                    the recipe, two steps or one full batch of its longest rows ▶ highest resident memory ▶ compare

    python benchmarks/memory.py [--json FILE] [--case NAME …] [--default-allocator]

CPU and Linux only. Exit code 1: a total is further than 15 % from what was measured. Children run with
MALLOC_MMAP_THRESHOLD_=1048576, so that freed memory goes back to the system and the peak is that of live tensors.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any

from orchestration.recipe.load import parse_recipe
from orchestration.recipe.planner import memory_of
from orchestration.recipe.schema import Recipe

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # config of the model, changes of the recipe
    "small": (SMALL, {}),
    "small, long prompts": (SMALL, {"prompts.max_prompt_tokens": 512, "rollout.max_tokens": 64}),
    "small, checkpointing": (SMALL, {"train.activation_checkpointing": True}),
    "small, bfloat16": (SMALL, {"model.dtype": "bfloat16"}),
    "smollm2": (SMOLLM2, {"train.token_budget": 1024, "rollout.max_tokens": 128}),
    "smollm2, checkpointing": (
        SMOLLM2,
        {"train.token_budget": 1024, "rollout.max_tokens": 128, "train.activation_checkpointing": True},
    ),
}
TOLERANCE = 0.15


def recipe_of(folder: Path, changes: dict[str, Any]) -> Recipe:
    data: dict[str, Any] = {
        "name": "memory",
        "model": {"source": str(folder)},
        "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 64},
        "rollout": {"max_rows": 16, "max_tokens": 256, "threads": 2, "device": "cpu"},
        "reward": {"functions": [{"name": "spelling"}]},
        "algorithm": {"group_size": 8},
        "train": {"steps": 2, "groups_per_step": 4, "token_budget": 4096, "threads": 2, "device": "cpu"},
        "pipeline": {"arena": "1GiB"},
    }
    for key, value in changes.items():
        section, _, name = key.partition(".")
        data[section] = {**data[section], name: value}
    return parse_recipe(data)


def make_model(config: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stages.models import tiny_tokenizer

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config, max_position_embeddings=8192)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def resident(peak: bool = False) -> int:
    """Bytes of this process now, or at most since the last :func:`forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def of_tiny(recipe: Recipe) -> Recipe:
    """The recipe with another model, to load kernels before memory is compared."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"source": "tiny"})})


def train(recipe: Recipe) -> int:
    """Two steps of longest rows; the highest resident memory of this process above that before the model was there."""
    import torch
    from tensordict import TensorDict

    from orchestration.run.engines import train_engine
    from stages.algorithms.policy_gradient.grpo import GRPO

    def step(of: Recipe, prompt: int, response: int, groups: int) -> None:
        engine, size = train_engine(of), of.algorithm.group_size
        count = groups * size

        def ragged(length: int, value: float, dtype: torch.dtype) -> torch.Tensor:
            rows = [torch.full((length,), value, dtype=dtype) for _ in range(count)]
            return torch.nested.nested_tensor(rows, layout=torch.jagged)

        places = torch.arange(count)
        columns = {"group": places // size, "place": places % size, "advantage": 1.0 - 2.0 * (places % 2)}
        columns |= {"prompt_ids": ragged(prompt, 5, torch.int64), "response_ids": ragged(response, 7, torch.int64)}
        columns["rollout_logprobs"] = ragged(response, -3.0, torch.float32)
        forget_peak()
        for _ in range(2):
            engine.train_batch(TensorDict(columns, [count]), GRPO())

    step(of_tiny(recipe), 4, 4, 1)
    forget_peak()
    before = resident()
    assert recipe.prompts.max_prompt_tokens
    step(recipe, recipe.prompts.max_prompt_tokens, recipe.rollout.max_tokens, recipe.train.groups_per_step)
    return resident(peak=True) - before


def rollout(recipe: Recipe) -> int:
    """A full batch of longest rows, without a swap; as :func:`train`."""
    import torch

    from orchestration.run.engines import rollout_engine
    from stages.engines.protocols import GroupRequest, SamplingParams

    async def generate(of: Recipe, prompt: int, tokens: int) -> None:
        engine, size = rollout_engine(of, version=0), of.algorithm.group_size
        forget_peak()
        params, ids = SamplingParams(max_tokens=tokens), torch.full((prompt,), 5)
        groups = range(of.rollout.max_rows // size)
        requests = [GroupRequest(group, tuple(range(size)), ids, params, group) for group in groups]
        async with aclosing(engine.generate(requests)) as ended:  # type: ignore[type-var]
            async for _ in ended:
                pass
        await engine.close()

    asyncio.run(generate(of_tiny(recipe), 4, 4))
    forget_peak()
    before = resident()
    assert recipe.prompts.max_prompt_tokens
    asyncio.run(generate(recipe, recipe.prompts.max_prompt_tokens, recipe.rollout.max_tokens))
    return resident(peak=True) - before


def in_child(work: Any, recipe: Recipe) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return int(pool.apply(work, (recipe,)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--default-allocator", action="store_true", help="let glibc keep what was freed")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    if not arguments.default_allocator:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # children read it when they start
    for name in arguments.case:
        config, changes = CASES[name]
        with tempfile.TemporaryDirectory(prefix="adk-memory-") as home:
            make_model(config, Path(home))
            recipe = recipe_of(Path(home), changes)
            for side, parts in memory_of(recipe).items():
                parts = {part: size for part, size in parts.items() if part != "new weights"}  # nothing is swapped here
                derived, measured = sum(parts.values()), in_child({"train": train, "rollout": rollout}[side], recipe)
                found.append({"case": name, "side": side, "derived": derived, "measured": measured, "parts": parts})
                shown = ", ".join(f"{part} {size / 2**20:,.0f}" for part, size in parts.items())
                figures = (
                    f"derived {derived / 2**20:6,.0f} MiB  measured {measured / 2**20:6,.0f}  {derived / measured:.2f}"
                )
                print(f"{name:24} {side:8} {figures}   {shown}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(abs(case["derived"] / case["measured"] - 1) > TOLERANCE for case in found))


if __name__ == "__main__":
    raise SystemExit(main())
