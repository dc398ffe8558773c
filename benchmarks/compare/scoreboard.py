"""One table of every figure that has a peer, a floor or a goal: ``python -m benchmarks score``.

Each benchmark runs in a process of its own and writes its ``--json``; a function here reads its
scores from that. A benchmark that cannot run here (a library or a right is missing) is left out by
name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import ge, le
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.execution import BenchmarkFailed, result_of
from benchmarks.harness import ResultFile, warn_if_busy


@dataclass(frozen=True)
class Score:
    """One figure: ``beside`` names the peer or the floor that ``ratio`` is to. ``goal`` is of the
    ratio, or of the value where there is none; None: nothing was promised."""

    figure: str
    value: float
    unit: str
    beside: str = ""
    ratio: float | None = None
    goal: float | None = None
    at_most: bool = False  # the goal is an upper bound

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        reached = self.value if self.ratio is None else self.ratio
        return (le if self.at_most else ge)(reached, self.goal)


@dataclass(frozen=True)
class Benchmark:
    """``quick``: the options of a run of seconds, whose figures say little."""

    name: str
    scores: Callable[[Any], Iterable[Score]]
    quick: Sequence[str]
    full: Sequence[str] = ()


def of_sample_flow(result: Any) -> Iterator[Score]:
    figures = {row["name"]: row["figures"] for row in result["rows"]}
    for name, found in figures.items():
        if "p50_ms" in found:
            yield Score(f"{name}, p50", found["p50_ms"], "ms", goal=0.8, at_most=True)
            yield Score(f"{name}, p99", found["p99_ms"], "ms", goal=2.5, at_most=True)
        if "samples_per_s" in found:
            yield Score(name, found["samples_per_s"], "samples/s", goal=40_000)
    for case in result["cases"]:
        for peer, arm in case["arms"].items():
            if peer == "ours":
                continue
            for what in ("put", "get"):
                ours = case["arms"]["ours"][what]["mb_per_s"]
                times = arm[what]["times_ours"]
                yield Score(f"{case['label']}: {what}", ours, "MB/s", peer, times, 1.0)


def of_rollout(result: Any) -> Iterator[Score]:
    for case in result["cases"]:
        name = f"{case['rows']}×{case['tokens']}, groups of {case['group']}"
        ours = case["arms"]["ours"]
        speed = ours["tokens_per_s"]
        yield Score(name, speed, "tokens/s", "floor", ours["share_of_floor"], 0.5)
        for peer, arm in case["arms"].items():
            if peer != "ours":
                goal = 1.3 if case["group"] > 1 else 1.15
                yield Score(name, speed, "tokens/s", peer, arm["ours_is_faster_by"], goal)


def of_drafts(result: Any) -> Iterator[Score]:
    for row in result:
        name = f"{row['rows']} rows, temperature {row['temperature']:g}, {row['prompts']} prompts"
        goal = 1.4 if row["prompts"] == "again" else 0.98
        yield Score(name, row["with"], "tokens/s", "without drafts", row["ratio"], goal)


def of_grpo_step(result: Any) -> Iterator[Score]:
    for run in result["runs"]:
        if "peer" in run:
            peer = run["peer"]["name"]
            yield Score("step", run["tokens_per_s"], "tokens/s", peer, run["ratio"], 7.0)
        for part, goal in (("train", 0.7), ("generate", 0.5)):
            share = run[f"{part}_share_of_floor"]
            yield Score(part, run[f"{part}_s"], "s", "floor", share, goal)


def of_weight_sync(result: Any) -> Iterator[Score]:
    for phase in result["phases"]:
        rate = phase["rate"] / 2**20
        yield Score(phase["phase"], rate, "MiB/s", "floor", phase["ratio"], 0.7)


def of_overlap(result: Any) -> Iterator[Score]:
    for arm in result["arms"]:
        goal = 0.95 if arm["bound"] == 2 else None
        name = arm["name"]
        speed = arm["tokens_per_second"]
        yield Score(name, speed, "tokens/s", "busiest stage", arm["of_bound"], goal)


def of_agents(result: Any) -> Iterator[Score]:
    yield Score("a turn of the flow, p50", 1e3 * result["turn"]["p50"], "ms", "", None, 5.0, True)
    for arm in result["arms"]:
        name = f"tools {arm['tools']:g} ×, η = {arm['bound']}"
        goal = 0.95 if arm["bound"] == 2 else None
        speed = arm["tokens"] / arm["seconds"]
        yield Score(name, speed, "tokens/s", "busiest stage", arm["share"], goal)
        permitted = arm["share_permitted"]
        yield Score(name, speed, "tokens/s", "what η lets", permitted, goal)


def of_wire(result: Any) -> Iterator[Score]:
    for case in result["cases"]:
        rate = case["nbytes"] / case["read_seconds"] / 1e6
        yield Score(f"reads of case {case['case']}", rate, "MB/s", "raw TCP", case["ratio"])


def of_weights_to_nodes(result: Any) -> Iterator[Score]:
    for cell in result["nodes"]:
        name = f"{cell['arm']}, {cell['nodes']} nodes"
        goal = 0.6 if cell["arm"] == "changes" and cell["nodes"] == 8 else None
        yield Score(name, cell["seconds"], "s", "", None, goal, True)


AGENTS = ("--tools", "0", "1", "3", "--bounds", "2", "--groups", "32", "--step-seconds", "4")
BENCHMARKS = (
    Benchmark("flow.samples", of_sample_flow, ["--quick"]),
    Benchmark("engines.rollout", of_rollout, ["--smoke"]),
    Benchmark("engines.drafts", of_drafts, ["--smoke"]),
    Benchmark("training.grpo_step", of_grpo_step, ["--steps", "1", "--peer", "plain"]),
    Benchmark("training.weight_sync", of_weight_sync, ["--smoke"]),
    Benchmark("runs.overlap", of_overlap, ["--smoke"]),
    Benchmark("runs.agents", of_agents, ["--smoke"], AGENTS),
    Benchmark("flow.wire", of_wire, ["--smoke"]),
    Benchmark(
        "training.weights_to_nodes",
        of_weights_to_nodes,
        ["--only", "nodes", "--nodes", "1", "2", "--size", "1MiB"],
        ["--only", "nodes"],
    ),
)


def measured(benchmark: Benchmark, *, quick: bool) -> list[Score] | str:
    """Run ``benchmark`` and return its scores, or why it failed."""
    try:
        result = result_of(benchmark.name, benchmark.quick if quick else benchmark.full)
    except BenchmarkFailed as failed:
        return str(failed)
    return list(benchmark.scores(result))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in BENCHMARKS])
    parser.add_argument(
        "--json", type=ResultFile, metavar="FILE", help="write the scores to this file"
    )


def score(options: argparse.Namespace) -> None:
    warn_if_busy()
    scores: list[tuple[str, Score]] = []
    left_out: dict[str, str] = {}
    for benchmark in BENCHMARKS:
        if options.only and benchmark.name not in options.only:
            continue
        print(f"{benchmark.name} …", file=sys.stderr, flush=True)
        found = measured(benchmark, quick=options.quick)
        if isinstance(found, str):
            left_out[benchmark.name] = found
        else:
            scores += [(benchmark.name, one) for one in found]
    console = Console()
    console.print(table(scores))
    for name, reason in left_out.items():
        console.print(f"{name}: left out, {reason}", markup=False)
    if options.quick:
        console.print(
            "Quick: the sizes are small. "
            "The figures show that the benchmarks run, and say nothing of speed."
        )
    if options.json:
        rows = [{"benchmark": name, **asdict(one), "met": one.met} for name, one in scores]
        result = {"quick": options.quick, "scores": rows, "left_out": left_out}
        options.json.write(result)


def table(scores: Sequence[tuple[str, Score]]) -> Table:
    shown = Table(box=None)
    for column in ("benchmark", "figure", "value", "unit", "beside", "ratio", "goal", "met"):
        is_number = column in ("value", "ratio", "goal")
        shown.add_column(column, justify="right" if is_number else "left")
    for name, score in scores:
        bound = "≤" if score.at_most else "≥"
        shown.add_row(
            *(name, score.figure, f"{score.value:,.4g}", score.unit, score.beside),
            "" if score.ratio is None else f"{score.ratio:.2f}",
            "" if score.goal is None else f"{bound} {score.goal:g}",
            {True: "yes", False: "NO", None: ""}[score.met],
        )
    return shown
