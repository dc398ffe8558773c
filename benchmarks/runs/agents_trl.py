"""Agents beside TRL's GRPOTrainer and its ``environment_factory``: the same class, the same tools, the
same rows, one after the other.

    pip install -e '.[bench,quickstart,agents]'
    python -m benchmarks.runs.agents_trl [--steps 4] [--repeats 2] [--bounds 0 1 2] [--json FILE]

Both sides take 4 prompts x 8 trajectories a step, float32, temperature 1, the template of TRL for
models that it knows (it refuses others), at most 3 turns and 192 tokens of turns and tool results.
The prompt has one call as an example, without which this model calls no tool. Repeats alternate, so
that other work on the machine slows both; the median of the repeats' ratios is printed.

    tokens    of turns and tool results of a step, as TRL counts completions
    seconds   TRL: from the beginning to the end of a step. Ours: from one step to the next, with all of a
              run: processes, the index, the environment in a process of its own. The first step of
              either is left out.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.runs.executed import executed
from orchestration.logs import configure
from orchestration.processes.pool import spawned_pool
from orchestration.recipe.loading.load import parse_recipe
from stages.model.load import load_model
from stages.samples.reading import groups
from stages.samples.sample_log import FOLDER
from stages.tasks.calculator import Calculator

GROUPS = 4
ROWS = 8
TURNS = 3
TOKENS = 192  # of a trajectory
LEARNING_RATE = 1e-6


class Sums(Calculator):
    """The task's own environment, which TRL gives all columns of a row."""

    def reset(self, answer: int = 0, **_: Any) -> None:
        super().reset(answer)


def rows(count: int) -> list[dict[str, Any]]:
    """Return ``count`` rows with a sum of two numbers of four digits, after the call of another one."""
    draw = random.Random(0)
    call = {"name": "add", "arguments": {"a": 352, "b": 761}}
    example = [
        {"role": "user", "content": "What is 352 + 761?"},
        {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
    ]
    out = []
    for _ in range(count):
        a, b = draw.randint(1000, 9999), draw.randint(1000, 9999)
        question = {"role": "user", "content": f"What is {a} + {b}?"}
        out.append({"prompt": [*example, question], "answer": a + b})
    return out


def of_trl(steps: int, folder: Path) -> list[tuple[float, float]]:
    """Return tokens and seconds of each of TRL's ``steps``, after one that is not counted."""
    with harness.needs("trl"):
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
        from trl.chat_template_utils import qwen2_5_chat_template

    model, tokenizer = load_model("smollm2", dtype=torch.float32, seed=0)
    tokenizer.chat_template = qwen2_5_chat_template
    seconds: list[float] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,  # all rows at once took more than 24 GiB
        gradient_accumulation_steps=GROUPS,
        num_generations=ROWS,
        max_completion_length=TOKENS,
        max_tool_calling_iterations=TURNS - 1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        max_steps=steps + 1,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows(GROUPS * (steps + 1))),
        processing_class=tokenizer,
        environment_factory=Sums,
        callbacks=[Watch()],
    )
    trainer.train()
    name = "completions/mean_length"
    lengths = [entry[name] for entry in trainer.state.log_history if name in entry]
    tokens = [length * GROUPS * ROWS for length in lengths]
    return list(zip(tokens, seconds, strict=True))[1:]


async def of_ours(steps: int, bound: int, folder: Path) -> list[tuple[float, float]]:
    """Return tokens and seconds of each of our ``steps``, after one that is not counted."""
    with harness.needs("trl"):
        from trl.chat_template_utils import qwen2_5_chat_template
    table = folder / "sums.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows(GROUPS * (steps + 1))))
    template = folder / "chat.jinja"
    template.write_text(qwen2_5_chat_template)
    recipe = parse_recipe(
        {
            "name": "agents-trl",
            "model": {"source": "smollm2"},
            "prompts": {
                "source": "jsonl",
                "path": str(table),
                "chat_template": str(template),
                "max_prompt_tokens": 512,
            },
            "environment": {
                "use": "benchmarks.runs.agents_trl:Sums",
                "max_turns": TURNS,
                "max_tokens": 2 * TOKENS,  # a turn begins where a whole one has room
            },
            "rollout": {"max_rows": 64, "max_tokens": TOKENS},
            "reward": {"functions": [{"name": "environment"}]},
            "algorithm": {"group_size": ROWS},
            "train": {
                "steps": steps + 1,
                "groups_per_step": GROUPS,
                "learning_rate": LEARNING_RATE,
                "token_budget": 4096,
            },
            "pipeline": {"staleness": bound},
        }
    )
    events = await executed(recipe, folder / "run")
    times = [event.time for event in events if event.kind == "step"]
    tokens: dict[int, int] = {}
    for group in groups(folder / "run" / FOLDER):
        for sample in group:
            count = len(sample["response_ids"])
            tokens[sample["step"]] = tokens.get(sample["step"], 0) + count
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return list(zip([tokens[step] for step in sorted(tokens)][1:], seconds, strict=True))


def measured_steps(steps: int, bound: int | None) -> list[tuple[float, float]]:
    """Return tokens and seconds of each step of TRL (None), or of a run under a bound."""
    configure()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return (
            of_trl(steps, folder) if bound is None else asyncio.run(of_ours(steps, bound, folder))
        )


def in_a_process(steps: int, bound: int | None) -> list[tuple[float, float]]:
    """Return :func:`measured_steps` of a process whose memory is free again afterwards."""
    with spawned_pool(1) as executor:
        return executor.submit(measured_steps, steps, bound).result()


def rate(steps: Sequence[tuple[float, float]]) -> float:
    return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[0, 1], help="staleness bounds of our runs"
    )
    options = parser.parse_args(arguments)
    measured: list[dict[str, Any]] = []
    print("| repeat | | tokens a step | seconds a step | tokens/s | to TRL's |")
    print("|---|---|---|---|---|---|")
    for repeat in range(options.repeats):
        theirs = math.nan
        for bound in (None, *options.bounds):
            steps = in_a_process(options.steps, bound)
            if bound is None:
                theirs = rate(steps)
            arm = "TRL" if bound is None else f"ours, η = {bound}"
            tokens = statistics.fmean(tokens for tokens, _ in steps)
            seconds = statistics.fmean(seconds for _, seconds in steps)
            ratio = rate(steps) / theirs
            measured.append({"arm": arm, "repeat": repeat, "steps": steps, "ratio": ratio})
            print(
                f"| {repeat} | {arm} | {tokens:,.0f} | {seconds:.2f} | {rate(steps):,.0f} "
                f"| {ratio:.2f} |",
                flush=True,
            )
    for bound in options.bounds:
        ratios = [row["ratio"] for row in measured if row["arm"] == f"ours, η = {bound}"]
        print(f"η = {bound}: {statistics.median(ratios):.2f} times TRL's tokens a second")
    if options.json:
        options.json.write(measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
