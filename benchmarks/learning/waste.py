"""Generated tokens to the same held-out score, when half of the prompts teach nothing: uniform
sampling, drops, difficulty.

    python -m benchmarks.learning.waste --seeds 0 1 2 --json waste.json --plot waste.png

The recipe is ``tiny`` with three sources: half of the prompts want a letter repeated; a quarter is
solved by any response; a quarter is never solved. Half of all prompts are held out. Each run begins
with a model that some supervised steps have taught a part of it (:func:`base`). A run ends when two
evaluations in a row have reached ``--target`` on the held-out prompts that can be learned. The
table has for each way of sampling and seed the tokens that were generated until the first of the
two, what they are of those of uniform sampling, and what the ledger says of all generated tokens:
trained, and dropped by reason. Runs that ``--json`` already holds are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.learning.rewards import hopeless, learnable, trivial
from benchmarks.learning.trials import COLOURS, Trial, read_trials, trial, write_trials
from orchestration.logs import configure
from orchestration.recipe.loading.load import load_recipe, parse_recipe, read_recipe
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.prompts.sources import load_prompts
from stages.rollout.evaluate import distinct_prompts

WARM_STEPS = 5  # they leave a mean reward of about 0.1
ARMS: Mapping[str, tuple[str, ...]] = {
    "uniform": (),
    "uniform, drop": ("algorithm.options.drop_equal=true",),
    "difficulty": ("prompts.sampling=difficulty",),
    "difficulty, drop": ("algorithm.options.drop_equal=true", "prompts.sampling=difficulty"),
}


def warm_recipe(seed: int) -> Recipe:
    """``recipes/sft.toml`` on the prompts that can be learned and are not held out."""
    data = read_recipe("recipes/sft.toml")[0]
    prompts = {
        "source": "datasets",
        "path": "benchmarks.learning.rewards:learnable",
        "held_out": 0.5,
    }
    data["prompts"] = {**prompts, "responses": ["answer"], "max_prompt_tokens": 16}
    data["train"] |= {"steps": WARM_STEPS, "groups_per_step": 32, "learning_rate": 1e-3}
    data |= {"seed": seed, "launch": {"launcher": "inline"}, "evaluate": {"every": 0}}
    return parse_recipe(data)


async def base(folder: Path, seed: int) -> Path:
    """A model that solves part of what can be learned, as a model before RL does: ``tiny`` after
    WARM_STEPS of ``sft`` on the prompts that are not held out. From random weights the runs differ
    by when they first find a letter, not by what they sample."""
    result = await Execution(RunFolder.create(warm_recipe(seed), folder)).execute()
    if result.checkpoint is None:
        raise RuntimeError(f"seed {seed}: the model to begin with was not trained: {result.reason}")
    return result.checkpoint.model


def recipe(folder: Path, model: Path) -> Path:
    """``recipes/tiny.toml`` with the sources and the reward of this benchmark, from ``model``."""
    data = read_recipe("recipes/tiny.toml")[0]
    data["model"] = {"source": str(model)}
    kinds: tuple[Callable[..., Any], ...] = (learnable, trivial, hopeless)
    sources = [
        {
            "source": "datasets",
            "path": f"benchmarks.learning.rewards:{of.__name__}",
            "weight": len(of()) / 32,
        }
        for of in kinds
    ]
    data["prompts"] = {"sources": sources, "max_prompt_tokens": 16, "held_out": 0.5}
    data["reward"] = {"functions": [{"name": "benchmarks.learning.rewards:reward"}]}
    data["evaluate"] = {"every": 5, "prompts": 128}
    # Half of tiny's groups and a third of its learning rate: several passes over the prompts until
    # they are learned.
    data["train"] |= {"groups_per_step": 4, "learning_rate": 1e-3}
    data["launch"] = {"launcher": "inline"}
    path = folder / "waste.json"
    path.write_text(json.dumps(data))
    return path


def reached(one: Trial, target: float) -> int | None:
    """Tokens generated until the first of two evaluations in a row that are at least ``target``;
    None: never."""
    versions = sorted(one.held_out)
    for version, following in itertools.pairwise(versions):
        if min(one.held_out[version], one.held_out[following]) >= target:
            return one.tokens[version - 1] if version else 0
    return None


def of_learnable(path: Path, seed: int) -> Callable[[float], float]:
    """The function that makes of a held-out score that of the prompts that can be learned."""
    of = load_recipe(path, [f"seed={seed}"])
    held_out = load_prompts(of.prompts, tokenizer_of(of), seed, limits=prompt_limits(of)).held_out
    assert held_out is not None
    kinds = [prompt.fields["kind"] for prompt in distinct_prompts(held_out, of.evaluate.prompts)]
    share = {kind: kinds.count(kind) / len(kinds) for kind in set(kinds)}
    return lambda score: (score - share["trivial"]) / share["learnable"]


async def measure(options: argparse.Namespace) -> list[Trial]:
    trials = read_trials(options.json) if options.json.exists() else []
    done = {(t.recipe, t.seed) for t in trials}
    sets = [f"train.steps={options.steps}", *(options.set or [])]
    for seed, arm in itertools.product(options.seeds, options.arms):
        if (arm, seed) in done:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = recipe(folder, await base(folder / "base", seed))
            scaled = of_learnable(path, seed)

            def enough(
                found: Mapping[int, float], scaled: Callable[[float], float] = scaled
            ) -> bool:
                high = [scaled(found[version]) >= options.target for version in sorted(found)]
                return any(a and b for a, b in itertools.pairwise(high))

            run_sets = [
                *(*ARMS[arm], *sets),
                f"pipeline.staleness={options.staleness}",
                f"seed={seed}",
            ]
            one = await trial(load_recipe(path, run_sets), folder / "run", enough=enough)
        held_out = {version: scaled(score) for version, score in one.held_out.items()}
        trials.append(replace(one, recipe=arm, held_out=held_out))
        write_trials(options.json, trials)
    return trials


def table(trials: list[Trial], target: float) -> Table:
    shown = Table(
        title=f"tokens until a held-out score of {target:g} on prompts that can be learned"
    )
    for column in (
        "sampling",
        "seed",
        "tokens",
        "of uniform",
        "last",
        "generated",
        "trained",
        "dropped",
    ):
        shown.add_column(column, justify="right")
    base = {t.seed: reached(t, target) for t in trials if t.recipe == "uniform"}
    for arm in [arm for arm in ARMS if any(t.recipe == arm for t in trials)]:
        ratios = []
        for t in sorted((t for t in trials if t.recipe == arm), key=lambda t: t.seed):
            tokens = reached(t, target)
            uniform = base.get(t.seed)
            ledger = t.ledger
            if tokens and uniform:
                ratios.append(tokens / uniform)
            dropped = ", ".join(
                f"{n} {reason}" for reason, n in ledger.get("dropped_tokens", {}).items()
            )
            shown.add_row(
                arm,
                str(t.seed),
                str(tokens or "never"),
                f"{tokens / uniform:.2f}" if tokens and uniform else "–",
                f"{t.held_out[max(t.held_out)]:.3f}",
                str(ledger["generated_tokens"]),
                str(ledger["trained_tokens"]),
                dropped or "0",
            )
        if ratios:
            shown.add_row(arm, "mean", "", f"{statistics.fmean(ratios):.2f}", style="bold")
        shown.add_section()
    return shown


def plot(trials: list[Trial], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for colour, arm in zip(COLOURS, ARMS, strict=False):
        for number, t in enumerate(t for t in trials if t.recipe == arm):
            versions = sorted(t.held_out)
            at = [t.tokens[version - 1] if version else 0 for version in versions]
            label = arm if not number else None
            axes.plot(
                at,
                [t.held_out[v] for v in versions],
                color=colour,
                linewidth=1.4,
                alpha=0.8,
                label=label,
            )
    axes.set_xlabel("generated tokens")
    axes.set_ylabel("held-out score of prompts that can be learned")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.suptitle("half of the prompts teach nothing: held-out score, each seed")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = harness.parser(__doc__, json_file=False)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument(
        "--target", type=float, default=0.95, help="held-out score of what can be learned"
    )
    parser.add_argument("--set", action="append", metavar="KEY=VALUE")
    parser.add_argument(
        "--json", type=Path, required=True, help="written after each run; its runs are not repeated"
    )
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    configure()
    trials = asyncio.run(measure(options))
    Console(width=150).print(table(trials, options.target))
    if options.plot:
        plot(trials, options.plot)


if __name__ == "__main__":
    main()
