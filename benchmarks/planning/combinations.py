"""Pairs of settings, each pair a real run of a few steps: what the checks of a recipe accept must
run to its end.

    python -m benchmarks.planning.combinations --json pairs.json --minutes 30 [--only sdpo] [--seed 1]

algorithm × setting, and setting × setting of `tiny` and `maze` ─▶ check ─▶ a run ─▶ --json ─▶ those that failed

Runs that ``--json`` holds are not repeated. Those that the checks refuse are counted only. The
order is random by ``--seed``, so that a part of them is a sample of all.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import harness
from orchestration.logs import configure
from orchestration.recipe.loading.load import SHIPPED, load_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.algorithms.registry import ALGORITHMS

RUN_SECONDS = 120.0
SMALL = (
    *("train.steps=3", "train.groups_per_step=4", "algorithm.group_size=4", "rollout.max_rows=32"),
    *("prompts.max_prompt_tokens=64", "pipeline.arena=128MiB", "pipeline.keep_samples=1MiB"),
    "checkpoint.every=2",
)
BASES = {"tiny": ("evaluate.every=2", "evaluate.prompts=4", "prompts.held_out=0.1"), "maze": ()}
# What an algorithm needs beside its name.
NEEDED = {
    "opsd": ("algorithm.options.template={prompt}",),
    "sdpo": ("algorithm.options.template={prompt}{solution}", "algorithm.options.success_reward=0"),
    "sft": ('prompts.responses=["answer"]', "algorithm.group_size=1"),
}
SETTINGS = {
    "lora": ("model.lora.rank=4",),
    "bfloat16": ("model.dtype=bfloat16", "train.precision=mixed"),
    "experts": ("model.source=tiny-moe",),
    "replayed experts": ("model.source=tiny-moe", "train.router=replay"),
    "moving reference": ("model.reference_every=1", "model.reference_mix=0.5"),
    "synchronous": ("pipeline.staleness=0",),
    "eta 4": ("pipeline.staleness=4",),
    "paced": ("pipeline.staleness=2", "pipeline.admission=paced"),
    "budget": ("rollout.budget=2", "pipeline.staleness=2"),
    "cut": ("rollout.on_update=cut", "pipeline.staleness=2"),
    "parked": ("rollout.straggler=park", "pipeline.staleness=2"),
    "draft model": ("rollout.draft_model=tiny", "rollout.max_rows=8"),
    "stop": ("rollout.stop=['b']",),
    "temperature": ("rollout.temperature=0.7",),
    "workers": ("rollout.workers=2",),
    "reward workers": ("reward.workers=2",),
    "colocated": ("launch.placement=colocated",),
    "data parallel": ("train.dp=2", "launch.launcher=process"),
    "tensor parallel": ("train.tp=2", "launch.launcher=process"),
    "pipeline parallel": ("train.pp=2", "launch.launcher=process"),
    "KL": ("algorithm.options.kl_coef=0.1",),
    "entropy": ("algorithm.options.entropy_coef=0.01",),
    "uncertain tokens": ("algorithm.options.high_entropy_share=0.5",),
    "mini-batches": ("algorithm.options.mini_batches=2",),
    "epochs": ("algorithm.options.epochs=2",),
    "truncated weights": (
        *("algorithm.options.proximal=recomputed", "algorithm.options.correction=truncate"),
        "pipeline.staleness=2",
    ),
    "masked weights": (
        *("algorithm.options.proximal=interpolated", "algorithm.options.correction=mask"),
        "pipeline.staleness=2",
    ),
    "frozen teacher": ("algorithm.options.teacher=frozen",),
    "current teacher": ("algorithm.options.teacher=current",),
    "replay": ("train.replay_groups=2", "pipeline.staleness=2"),
    "checkpointing": ("train.activation_checkpointing=true",),
    "muon": ("train.optimizer=muon",),
    "token budget": ("train.token_budget=64",),
}


@dataclass(frozen=True)
class Pair:
    """A run: ``base`` is its recipe, ``words`` say what is changed by ``overrides``."""

    base: str
    words: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return " + ".join((self.base, *self.words))


@dataclass(frozen=True)
class Outcome:
    """``state``: "refused" by the checks, or that of the run's end. ``reason``: of either."""

    name: str
    state: str
    reason: str
    seconds: float


def pairs() -> Iterator[Pair]:
    for algorithm in ALGORITHMS:
        named = (f"algorithm.name={algorithm}", *NEEDED.get(algorithm, ()))
        yield Pair("tiny", (algorithm,), named)
        for setting, overrides in SETTINGS.items():
            yield Pair("tiny", (algorithm, setting), (*named, *overrides))
    for base in BASES:
        for (one, first), (other, second) in itertools.combinations(SETTINGS.items(), 2):
            yield Pair(base, (one, other), (*first, *second))


def outcome(pair: Pair) -> Outcome:
    began = time.monotonic()
    launcher = "launch.launcher=inline"
    try:
        changes = [launcher, *SMALL, *BASES[pair.base], *pair.overrides]
        recipe = load_recipe(SHIPPED / f"{pair.base}.toml", changes)
    except RecipeError as error:
        return Outcome(pair.name, "refused", str(error.problems[0]), time.monotonic() - began)
    with tempfile.TemporaryDirectory(prefix="pair-") as folder:
        run = Execution(RunFolder.create(recipe, Path(folder) / "run"))
        try:
            result = asyncio.run(asyncio.wait_for(run.execute(), RUN_SECONDS))
            state, reason = result.state, result.reason
        except TimeoutError:
            state, reason = "hangs", f"has not ended after {RUN_SECONDS:g} s"
        except Exception as error:  # a run says in words why it ends
            state, reason = "raises", repr(error)
    return Outcome(pair.name, state, reason, time.monotonic() - began)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="pairs with all these"
    )
    options = parser.parse_args()
    configure()
    logging.disable()  # the end of each run is printed
    print(report(measured(options)))


def measured(options: argparse.Namespace) -> list[Outcome]:
    """Return the outcomes that ``--json`` has, and those of the pairs that are run now."""
    known = (options.json.read() or []) if options.json else []
    outcomes = [Outcome(**row) for row in known]
    done = {each.name for each in outcomes}
    todo = [pair for pair in pairs() if pair.name not in done]
    todo = [pair for pair in todo if {*options.only} <= {pair.base, *pair.words}]
    random.Random(options.seed).shuffle(todo)
    end = time.monotonic() + 60 * options.minutes
    for pair in todo:
        if time.monotonic() > end:
            break
        outcomes.append(outcome(pair))
        if outcomes[-1].state != "refused":
            print(f"{outcomes[-1].state}: {pair.name} {outcomes[-1].reason}", flush=True)
        if options.json:
            options.json.write([asdict(each) for each in outcomes])
    return outcomes


def report(outcomes: list[Outcome]) -> str:
    """Return the counts, and the runs that were accepted and did not finish."""
    states = Counter(each.state for each in outcomes)
    wrong = [each for each in outcomes if each.state not in ("finished", "refused")]
    lines = [", ".join(f"{count} {state}" for state, count in sorted(states.items()))]
    return "\n".join([*lines, *(f"{each.name}: {each.state}, {each.reason}" for each in wrong)])


if __name__ == "__main__":
    main()
