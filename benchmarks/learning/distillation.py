"""Distillation against RL: generated tokens until a student from the base model has 95 % of an RL
checkpoint's score.

    python -m benchmarks.learning.distillation tiny --seeds 0 1 2 --json distillation.json --plot distillation.png

For each seed: the RL recipe to its end; its last checkpoint is the teacher of the student recipe,
which begins with the base model, as the RL run did. Scores are those of held-out prompts, answered
greedily. The table has the tokens that the RL run generated in all, and until it had 95 % of its
last score; those that the student generated until it had as much; and the student's as a share of
each. The plot shows scores against generated tokens: every seed thin, the mean thick.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.learning.trials import COLOURS, Trial, trial
from orchestration.checkpoints import checkpoint
from orchestration.logs import configure
from orchestration.recipe.loading.load import load_recipe

SHARE = 0.95  # of the teacher's score
Pair = tuple[Trial, Trial]  # an RL run, and the student of its checkpoint


def scores(of: Trial) -> list[tuple[int, float]]:
    """Generated tokens and held-out score of each evaluation."""
    return [
        (of.tokens[version - 1] if version else 0, score)
        for version, score in sorted(of.held_out.items())
    ]


def tokens_until(of: Trial, score: float) -> int | None:
    """Generated tokens until the first evaluation with at least this score."""
    return next((tokens for tokens, found in scores(of) if found >= score), None)


async def measure(options: argparse.Namespace, folder: Path) -> list[Pair]:
    pairs = []
    for seed in options.seeds:
        sets = [
            f"evaluate.every={options.every}",
            f"pipeline.staleness={options.staleness}",
            f"seed={seed}",
        ]
        out = folder / f"rl-{seed}"
        rl = await trial(load_recipe(recipe(options.rl), [*sets, *(options.set or [])]), out)
        newest = checkpoint.latest(out / "checkpoints")
        assert newest is not None, "a finished run has a checkpoint"
        sets += [f"model.reference={newest.model}", *(options.student_set or [])]
        student = await trial(
            load_recipe(recipe(options.student), sets), folder / f"student-{seed}"
        )
        pairs.append((rl, student))
        options.json.write([[asdict(one) for one in pair] for pair in pairs])
    return pairs


def recipe(name: str) -> Path:
    return Path(name) if Path(name).is_file() else Path("recipes") / f"{name}.toml"


def table(pairs: list[Pair], title: str) -> Table:
    shown = Table(title=title)
    columns = (
        "seed",
        "teacher's score",
        "RL tokens",
        f"… to {SHARE:.0%}",
        "student's best",
        f"student's tokens to {SHARE:.0%}",
    )
    for column in (*columns, "of all RL's", "of RL's to the same"):
        shown.add_column(column, justify="right")
    for rl, student in pairs:
        score = rl.held_out[max(rl.held_out)]
        total = rl.tokens[-1]
        same = tokens_until(rl, SHARE * score)
        own = tokens_until(student, SHARE * score)
        best = max(student.held_out.values())
        shares = (
            ("–", "–") if own is None or not same else (f"{own / total:.0%}", f"{own / same:.0%}")
        )
        shown.add_row(
            str(rl.seed),
            f"{score:.3f}",
            str(total),
            str(same),
            f"{best:.3f}",
            str(own or "never"),
            *shares,
        )
    return shown


def plot(pairs: list[Pair], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for colour, label, runs in zip(
        COLOURS, ("RL", "distillation from its checkpoint"), zip(*pairs, strict=True), strict=False
    ):
        curves = [scores(run) for run in runs]
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.6, alpha=0.45)
        together = [list(zip(*at, strict=True)) for at in zip(*curves, strict=False)]
        tokens, held_out = ([statistics.fmean(at[which]) for at in together] for which in (0, 1))
        axes.plot(
            tokens, held_out, color=colour, linewidth=2.4, label=f"{label}, {len(runs)} seeds"
        )
    axes.set(xlabel="generated tokens", ylabel="held-out score", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("rl", help="recipe of the RL run: a path, or a name in recipes/")
    parser.add_argument("--student", default="distillation", help="recipe of the student")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="of the RL recipe")
    parser.add_argument(
        "--student-set", action="append", metavar="KEY=VALUE", help="of the student's"
    )
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--every", type=int, default=4, help="steps between two evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", type=Path)
    parser.set_defaults(json="distillation.json")
    options = parser.parse_args()
    configure()
    with tempfile.TemporaryDirectory() as folder:
        pairs = asyncio.run(measure(options, Path(folder)))
    title = f"{options.student} from the checkpoint of {options.rl}"
    Console(width=150).print(table(pairs, title))
    if options.plot:
        plot(pairs, title, options.plot)


if __name__ == "__main__":
    main()
