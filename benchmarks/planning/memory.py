"""Memory of the processes with torch engines: derived from a recipe, beside what such a process
really takes.

    for each case:  random model ▶ folder ▶ a fresh process: warm up on a small model ▶ (resident memory) ▶ the engine of
                    the recipe, at its longest rows ▶ highest resident memory ▶ compare

    train      two steps, and a copy for a checkpoint between them; with dp = 2 on two ranks, and the larger of both
    rollout    a full batch, while new weights are swapped in again and again
    reference  logprobs of one step's rows

    python -m benchmarks.planning.memory [--json FILE] [--case NAME …] [--side train rollout reference]
    python -m benchmarks.planning.memory --live [--case NAME …]
    python -m benchmarks.planning.memory --varied 300 [--case NAME …] [--side train rollout]

``--live``: instead, of ``train``, what torch's allocator has given and not got back, at most, in
the second step: without what the C library keeps, and without the copy for a checkpoint. This is
what a device would need.

``--varied STEPS``: instead, resident memory after each tenth of so many steps (train) or batches
(rollout) of rows of random lengths, above that after the first one. Environment variables that are
set replace those of workers.

CPU and Linux only. Exit code 1: a total is further than 15 % from what was measured.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from orchestration.processes.forkserver import ENVIRONMENT
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.model_files import experts_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.memory_parts import CPU_PARTS, HOST_PARTS, Engine
from orchestration.recipe.sizes.planner import config_of, memory_of
from stages.model.load import empty_model, weight_shapes
from stages.parallel.layout import ALONE, RankCoordinates

Model = str | dict[str, Any]  # a source, or the sizes of a Llama, with experts of a Qwen3-MoE
Changes = dict[str, Any]  # of the recipe, by key
SMALL: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True}
FIRST = {
    **SMALL,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "head_dim": 48}
EXPERTS = {**SMALL, **ROUTED}
MANY_WORDS = {**SMALL, "num_hidden_layers": 2, "vocab_size": 49152}
CHECKPOINTING: Changes = {"train.activation_checkpointing": True}
BFLOAT16: Changes = {"model.dtype": "bfloat16"}
LORA: Changes = {"model.lora": {"rank": 16}}
LONG: Changes = {"rollout.max_tokens": 1024, "algorithm.group_size": 2, "train.token_budget": 2080}
TWO_RANKS: Changes = {"train.dp": 2, "train.groups_per_step": 2}
STAGES: Changes = {"train.pp": 2, "train.groups_per_step": 4}  # and as many micro-batches
QUICKSTART: Changes = {
    "prompts.max_prompt_tokens": 64,
    "rollout.max_rows": 64,
    "rollout.max_tokens": 16,
}
# as in recipes/quickstart.toml
QUICKSTART |= {"train.groups_per_step": 4, "train.token_budget": 2048}


def long_rows(tokens: int) -> Changes:
    """A step of two responses of so many tokens, in a micro-batch each."""
    return {
        **LONG,
        "rollout.max_tokens": tokens,
        "train.token_budget": tokens + 32,
        "rollout.max_rows": 2,
    }


# for a rank as many tokens as of rows of 1k
TWICE = {**long_rows(2048), "train.cp": 2, "train.token_budget": 1040}

CASES: dict[str, tuple[Model, Changes]] = {
    "small": (SMALL, {}),
    "small, short answers": (SMALL, {"rollout.max_tokens": 16, "rollout.max_rows": 64}),
    "small, long prompts": (SMALL, {"prompts.max_prompt_tokens": 512, "train.token_budget": 1024}),
    "small, long answers": (SMALL, {**LONG, "rollout.max_rows": 8}),
    "small, two micro-batches": (SMALL, {"train.token_budget": 300}),
    "small, checkpointing": (SMALL, {**LONG, "rollout.max_tokens": 512, **CHECKPOINTING}),
    "small, bfloat16": (SMALL, BFLOAT16),
    "small, bfloat16, checkpointing": (SMALL, {**BFLOAT16, **CHECKPOINTING}),
    "small, rows of 1k tokens": (SMALL, long_rows(1024)),
    "small, rows of 2k tokens": (SMALL, long_rows(2048)),
    "small, rows of 4k tokens": (SMALL, long_rows(4096)),
    "small, rows of 4k tokens, bfloat16": (SMALL, {**long_rows(4096), **BFLOAT16}),
    "small, dp = 2": (SMALL, TWO_RANKS),
    "small, dp = 2, bfloat16": (SMALL, {**TWO_RANKS, **BFLOAT16}),
    "many words, dp = 2": (MANY_WORDS, TWO_RANKS),
    "small, dp = 2, two copies": (SMALL, {**TWO_RANKS, "train.dp_replicate": 2}),
    "small, tp = 2": (SMALL, {"train.tp": 2}),
    "small, rows of 2k tokens, cp = 2": (SMALL, TWICE),
    "small, rows of 2k tokens, cp = 2, ring": (SMALL, {**TWICE, "train.context_parallel": "ring"}),
    "small, pp = 2": (SMALL, STAGES),
    "small, pp = 2, vpp = 2": (SMALL, {**STAGES, "train.vpp": 2}),
    "small, pp = 2, bfloat16": (SMALL, {**STAGES, **BFLOAT16}),
    "many words, pp = 2": (MANY_WORDS, STAGES),
    "experts, dp = 2": (EXPERTS, TWO_RANKS),
    "experts, dp = 2, ep = 2": (EXPERTS, {**TWO_RANKS, "train.ep": 2}),
    "many words": (MANY_WORDS, {"rollout.max_rows": 64}),
    "many words, bfloat16": (MANY_WORDS, BFLOAT16),
    "quickstart": ("smollm2", QUICKSTART),
    "quickstart, bfloat16": ("smollm2", {**QUICKSTART, **BFLOAT16}),
    "quickstart, dp = 2": ("smollm2", {**QUICKSTART, "train.dp": 2}),
    "small, lora": (SMALL, LORA),
    "quickstart, lora": ("smollm2", {**QUICKSTART, **LORA}),
    "quickstart, bfloat16, lora": ("smollm2", {**QUICKSTART, **BFLOAT16, **LORA}),
}
TOLERANCE = 0.15


def recipe_of(source: str, changes: Changes) -> Recipe:
    data: dict[str, Any] = {
        "name": "memory",
        # the tokenizer of "tiny" has far fewer tokens
        "model": {"source": source, "vocabulary": "model"},
        "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 32},
        "rollout": {"max_rows": 16, "max_tokens": 64, "threads": 2, "device": "cpu"},
        "reward": {"functions": [{"name": "spelling"}]},
        "algorithm": {"group_size": 8, "options": {"kl_coef": 0.01}},
        "train": {
            "steps": 2,
            "groups_per_step": 1,
            "token_budget": 640,
            "threads": 2,
            "device": "cpu",
        },
        "pipeline": {"arena": "1GiB"},
        "checkpoint": {"every": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition(".")
        data[section] = {**data[section], name: value}
    return parse_recipe(data)


def make_model(config: dict[str, Any], folder: Path, dtype: str = "float32") -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from stages.model.load import tiny_tokenizer

    torch.manual_seed(0)
    config_class = LlamaConfig
    model_class = LlamaForCausalLM
    if "num_experts" in config:
        config_class, model_class = Qwen3MoeConfig, Qwen3MoeForCausalLM  # type: ignore[assignment]
    model: Any = model_class(config_class(**config, max_position_embeddings=8192))  # type: ignore[arg-type]
    torch.nn.Module.to(model, getattr(torch, dtype))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def resident(peak: bool = False) -> int:
    """Bytes of this process now, or at most since the last :func:`forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measured(side: Engine, recipe: Recipe, other: str, ranks: RankCoordinates) -> int:
    """The highest resident memory of this process while it works, above that before.

    It works with the model in the folder ``other`` first, which loads libraries and fills their
    buffers.
    """
    work = WORK[side]
    work(
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"source": other})}),
        ranks,
        Path(other, "0"),
    )
    gc.collect()
    forget_peak()
    before = resident()
    work(recipe, ranks, Path(other, "1"))
    return resident(peak=True) - before


def rows_of_a_step(recipe: Recipe, chance: random.Random | None = None) -> Any:
    """The columns of one replica's rows of a step, as long as the recipe allows, or of random
    lengths by ``chance``."""
    import torch
    from tensordict import TensorDict

    size = recipe.algorithm.group_size
    count = recipe.train.groups_per_step * size // recipe.train.dp

    def ragged(lengths: list[int], value: float, dtype: torch.dtype) -> torch.Tensor:
        rows = [torch.full((length,), value, dtype=dtype) for length in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    places = torch.arange(count)
    longest = recipe.rollout.max_tokens
    prompts = [recipe.prompts.max_prompt_tokens or 0] * count
    responses = [chance.randint(1, longest) if chance else longest for _ in range(count)]
    columns = {
        "group": places // size,
        "place": places % size,
        "advantage": 1.0 - 2.0 * (places % 2),
    }
    columns["prompt_ids"] = ragged(prompts, 5, torch.int64)
    columns["response_ids"] = ragged(responses, 7, torch.int64)
    columns |= {
        name: ragged(responses, -3.0, torch.float32)
        for name in ("rollout_logprobs", "ref_logprobs")
    }
    return TensorDict(columns, [count])


def train(recipe: Recipe, ranks: RankCoordinates, meeting: Path) -> None:
    """Two steps, and a copy for a checkpoint between them."""
    from torch.distributed import FileStore

    from orchestration.checkpoints.checkpoint import Writer
    from orchestration.recipe.flow import algorithm_of
    from orchestration.workers.engines import train_engine

    store = FileStore(str(meeting), ranks.world)
    engine = train_engine(recipe, *((ranks, store) if ranks.world > 1 else ()))
    rows = rows_of_a_step(recipe)
    algorithm = algorithm_of(recipe)
    writer = Writer(engine)
    engine.train_batch(rows, algorithm)
    writer.copy()
    engine.train_batch(rows, algorithm)
    engine.close()


def live(recipe: Recipe, ranks: RankCoordinates, meeting: Path) -> int:
    """Bytes of tensors in the second step of :func:`train`, at most."""
    from torch.distributed import FileStore

    from orchestration.recipe.flow import algorithm_of
    from orchestration.workers.engines import train_engine
    from tests.allocations import Allocations

    store = FileStore(str(meeting), ranks.world)
    engine: Any = train_engine(recipe, *((ranks, store) if ranks.world > 1 else ()))
    rows = rows_of_a_step(recipe)
    algorithm = algorithm_of(recipe)
    engine.train_batch(rows, algorithm)
    # with AdamW's moments
    held = 3 * sum(parameter.nbytes for parameter in engine.trained.values())
    if engine.packed_model.dtype != next(iter(engine.trained.values())).dtype and ranks.world == 1:
        held += sum(parameter.nbytes for parameter in engine.model.parameters())
    record = Allocations()
    engine.train_batch(rows, algorithm)
    record.stop()
    engine.close()
    return held + max(itertools.accumulate(record.sizes()))


def reference(recipe: Recipe, *_: Any) -> None:
    """Logprobs of one step's rows."""
    from orchestration.workers.engines import reference_engine

    reference_engine(recipe).logprobs(rows_of_a_step(recipe))


def rollout(recipe: Recipe, *_: Any) -> None:
    """A full batch, while versions of the weights are swapped in one after the other."""
    asyncio.run(generate(recipe))


async def generate(recipe: Recipe) -> None:
    import torch

    from orchestration.workers.engines import rollout_engine
    from stages.adapters.names import adapter_shapes
    from stages.engines.protocols import GroupRequest, SamplingParams

    engine = rollout_engine(recipe, version=0)
    size = recipe.algorithm.group_size
    params = SamplingParams(max_tokens=recipe.rollout.max_tokens)
    ids = torch.full((recipe.prompts.max_prompt_tokens or 0,), 5)
    groups = range(recipe.rollout.max_rows // size)
    requests = [GroupRequest(group, tuple(range(size)), ids, params, group) for group in groups]
    dtype = getattr(torch, recipe.model.dtype)
    if (adapters := recipe.adapters) is None:
        shapes = weight_shapes(recipe.model.source)
    else:
        shapes = adapter_shapes(empty_model(recipe.model.source), adapters)

    async def swap() -> None:
        for version in itertools.count(1):
            await engine.load_weights(
                version, {n: torch.zeros(shape, dtype=dtype) for n, shape in shapes.items()}
            )

    swapping = asyncio.create_task(swap())
    async with aclosing(engine.generate(requests)) as ended:  # type: ignore[type-var]
        async for _ in ended:
            pass
    swapping.cancel()
    await asyncio.gather(swapping, return_exceptions=True)
    await engine.close()


async def growth(side: Engine, recipe: Recipe, steps: int) -> list[int]:
    """Bytes of this process after each tenth of ``steps`` steps of rows of random lengths, above
    those after the first."""
    import torch

    from orchestration.recipe.flow import algorithm_of
    from orchestration.workers.engines import rollout_engine, train_engine
    from stages.engines.protocols import GroupRequest, SamplingParams

    chance = random.Random(0)
    found = list[int]()
    rows = recipe.rollout.max_rows
    longest = recipe.rollout.max_tokens
    prompt = recipe.prompts.max_prompt_tokens or 1
    trainer = train_engine(recipe) if side == "train" else None
    engine = rollout_engine(recipe, version=0) if side == "rollout" else None
    for step in range(steps + 1):
        if trainer is not None:
            trainer.train_batch(rows_of_a_step(recipe, chance), algorithm_of(recipe))
        if engine is not None:
            lengths = [SamplingParams(max_tokens=chance.randint(1, longest)) for _ in range(rows)]
            ids = torch.full((prompt,), 5)
            async for _ in engine.generate(
                [GroupRequest(row, (0,), ids, lengths[row], row) for row in range(rows)]
            ):
                pass
        if step % (steps // 10) == 0:
            found.append(resident())
    if engine is not None:
        await engine.close()
    return [size - found[0] for size in found[1:]]


WORK: dict[Engine, Callable[[Recipe, RankCoordinates, Path], None]] = {
    "train": train,
    "rollout": rollout,
    "reference": reference,
}


def in_children(side: Engine, recipe: Recipe, of_torch: bool) -> int:
    """What :func:`measured`, or ``of_torch`` :func:`live` returns in a process of its own for each
    rank of the side: the most."""
    os.environ.update({**ENVIRONMENT, **os.environ})  # as workers have
    of = recipe.train.layout.coordinates(0) if side == "train" else ALONE
    with tempfile.TemporaryDirectory(prefix="adk-memory-") as other, ExitStack() as stack:
        layers = {"num_hidden_layers": max(FIRST["num_hidden_layers"], of.layout.virtual_stages)}
        routed = ROUTED if experts_of(config_of(recipe.model.source))[0] else {}
        make_model({**FIRST, **layers, **routed}, Path(other))
        children = [
            stack.enter_context(multiprocessing.get_context("spawn").Pool(1))
            for _ in range(of.world)
        ]
        found = [
            child.apply_async(live, (recipe, replace(of, rank=rank), Path(other, "1")))
            if of_torch
            else child.apply_async(measured, (side, recipe, other, replace(of, rank=rank)))
            for rank, child in enumerate(children)
        ]
        return max(each.get() for each in found)


def compare(
    model: Model, changes: Changes, sides: Collection[Engine], of_torch: bool = False
) -> Iterator[dict[str, Any]]:
    """Derived parts and measured bytes of each side of a case."""
    with tempfile.TemporaryDirectory(prefix="adk-memory-") as home:
        if not isinstance(model, str):
            make_model(model, Path(home), changes.get("model.dtype", "float32"))
        recipe = recipe_of(model if isinstance(model, str) else home, changes)
        for side, parts in memory_of(recipe).items():
            if of_torch:
                parts = {
                    part: size
                    for part, size in parts.items()
                    if part not in (*HOST_PARTS, *CPU_PARTS)
                }
            if side in sides:
                total = sum(parts.values())
                taken = in_children(side, recipe, of_torch)
                yield {"side": side, "derived": total, "measured": taken, "parts": parts}


def show_growth(cases: Collection[str], sides: Collection[Engine], steps: int) -> int:
    os.environ.update({**ENVIRONMENT, **os.environ})
    print("| case | process | MiB above the first step, by tenths |\n|---|---|---|")
    for name, side in itertools.product(cases, sides):
        model, changes = CASES[name]
        with (
            tempfile.TemporaryDirectory(prefix="adk-memory-") as home,
            multiprocessing.get_context("spawn").Pool(1) as child,
        ):
            if not isinstance(model, str):
                make_model(model, Path(home), changes.get("model.dtype", "float32"))
            recipe = recipe_of(model if isinstance(model, str) else home, changes)
            sizes = child.apply(run_growth, (side, recipe, steps))
        print(
            f"| {name} | {side} | {', '.join(f'{size / 2**20:,.0f}' for size in sizes)} |",
            flush=True,
        )
    return 0


def run_growth(side: Engine, recipe: Recipe, steps: int) -> list[int]:
    return asyncio.run(growth(side, recipe, steps))


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--side", nargs="*", default=list(WORK), choices=list(WORK))
    parser.add_argument(
        "--varied", type=int, metavar="STEPS", help="growth over so many steps instead, at least 10"
    )
    parser.add_argument(
        "--live", action="store_true", help="what torch has allocated in a train step instead"
    )
    arguments = parser.parse_args()
    if arguments.varied:
        return show_growth(arguments.case, arguments.side, arguments.varied)
    found: list[dict[str, Any]] = []
    print(
        "| case | process | derived, MiB | measured, MiB | ratio | parts, MiB "
        "|\n|---|---|---|---|---|---|"
    )
    for name in arguments.case:
        for row in compare(
            *CASES[name], ["train"] if arguments.live else arguments.side, arguments.live
        ):
            found.append({"case": name, **row})
            parts = ", ".join(
                f"{part} {size / 2**20:,.0f}"
                for part, size in row["parts"].items()
                if size >= 2**20
            )
            derived = row["derived"]
            taken = row["measured"]
            sizes = f"{derived / 2**20:,.0f} | {taken / 2**20:,.0f} | {derived / taken:.2f}"
            print(f"| {name} | {row['side']} | {sizes} | {parts} |", flush=True)
    if arguments.json:
        arguments.json.write(found)
    return int(any(abs(case["derived"] / case["measured"] - 1) > TOLERANCE for case in found))


if __name__ == "__main__":
    raise SystemExit(main())
