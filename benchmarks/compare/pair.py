"""One benchmark at another commit and here, in turns, and the ratio of each of their numbers.

    python -m benchmarks pair REF NAME [--rounds 4] [--there NAME] [--json FILE] [-- OPTIONS]

    git worktree of REF ──▶ there ─┐  there here, here there, there here, …: each a process of its own
    this tree, as it is ──▶ here  ─┴─▶ of each number in both results: the median of both, and of a round's
                                       ratio here / there the median, the least and the largest

A machine drifts: it becomes slower or faster over minutes. Within a round both run one after the
other, and rounds alternate which is first, so that a drift is in neither's favour.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.execution import BenchmarkFailed, result_of, takes_json
from benchmarks.harness import ROOT, ResultFile, warn_if_busy


class BadRequest(Exception):
    """There is no such commit, or no such benchmark that writes a result."""


@dataclass(frozen=True)
class Ratio:
    """A number of both results: medians over the rounds, and here / there of each round."""

    name: str
    there: float
    here: float
    ratio: float
    least: float
    largest: float
    is_equal: bool  # in all runs


def numbers(result: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of ``result`` with the keys that lead to them.

    >>> dict(numbers({"seconds": 2, "arms": [{"rate": 0.5, "name": "a"}], "met": True}))
    {'seconds': 2.0, 'arms[0].rate': 0.5}
    """
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield from numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(result, list):
        for position, value in enumerate(result):
            yield from numbers(value, f"{name}[{position}]")
    elif isinstance(result, int | float) and not isinstance(result, bool):
        yield name, float(result)


def ratios(there: Sequence[Any], here: Sequence[Any]) -> list[Ratio]:
    """Compare the results of as many rounds, in the numbers that all of them have.

    >>> ratios([{"s": 2.0}, {"s": 4.0}, {"s": 3.0}], [{"s": 1.0}, {"s": 4.0}, {"s": 6.0}])
    [Ratio(name='s', there=3.0, here=4.0, ratio=1.0, least=0.5, largest=2.0, is_equal=False)]
    """
    before = [dict(numbers(result)) for result in there]
    after = [dict(numbers(result)) for result in here]
    compared = []
    for name in before[0]:
        if not all(name in result for result in (*before, *after)):
            continue
        old = [result[name] for result in before]
        new = [result[name] for result in after]
        each = [ratio(a, b) for a, b in zip(old, new, strict=True)]
        medians = statistics.median(old), statistics.median(new), statistics.median(each)
        is_equal = len({*old, *new}) == 1
        compared.append(Ratio(name, *medians, min(each), max(each), is_equal))
    return compared


def ratio(there: float, here: float) -> float:
    if there == here:
        return 1.0
    return here / there if there else math.inf


def commit_of(ref: str, repository: Path) -> str:
    """Raises :class:`BadRequest` where ``ref`` names no commit."""
    done = git(
        repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"
    )
    if done.returncode:
        raise BadRequest(f"{ref} is no commit of {repository.name}/; git log lists them")
    return done.stdout.strip()


def git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@contextmanager
def worktree(commit: str, repository: Path) -> Iterator[Path]:
    """Yield a folder with the files of ``commit``, which is removed in any case."""
    with tempfile.TemporaryDirectory(prefix="pair-") as folder:
        tree = Path(folder) / "tree"
        try:
            added = git(repository, "worktree", "add", "--detach", str(tree), commit)
            if added.returncode:
                raise BadRequest(f"git worktree add: {added.stderr.strip().splitlines()[-1]}")
            yield tree
        finally:
            # a second Ctrl-C would leave the folder, and git's note of it
            usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
            git(repository, "worktree", "remove", "--force", str(tree))
            signal.signal(signal.SIGINT, usual)


def must_write_json(name: str, tree: Path, where: str) -> None:
    if not tree.joinpath("benchmarks", *name.split(".")).with_suffix(".py").is_file():
        raise BadRequest(f"there is no benchmark {name} {where}; python -m benchmarks lists them")
    if not takes_json(name, tree):
        raise BadRequest(f"the benchmark {name} has no --json {where}")


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> list[Ratio]:
    """Run the rounds, and print how far they are on standard error."""
    commit = commit_of(options.ref, ROOT)
    must_write_json(options.name, ROOT, "here")
    results: dict[str, list[Any]] = {"there": [], "here": []}
    with worktree(commit, ROOT) as tree:
        name_there = options.there or options.name
        must_write_json(name_there, tree, f"at {options.ref}")
        sides = {"there": (name_there, tree), "here": (options.name, ROOT)}
        warn_if_busy()
        for number in range(options.rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            for side in order:
                print(f"round {number + 1} of {options.rounds}: {side} …", file=sys.stderr)
                name, root = sides[side]
                results[side].append(result_of(name, arguments, root))
    return ratios(results["there"], results["here"])


def table(compared: Sequence[Ratio], ref: str) -> Table:
    shown = Table(box=None)
    shown.add_column("number")
    for column in (ref, "here", "ratio", "least", "largest"):
        shown.add_column(column, justify="right")
    for one in compared:
        figures = [f"{value:,.4g}" for value in (one.there, one.here)]
        figures += [f"{value:.3f}" for value in (one.ratio, one.least, one.largest)]
        shown.add_row(one.name, *figures)
    return shown


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a commit, as git names it")
    parser.add_argument("name", metavar="NAME", help="of a benchmark: flow.wire")
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    parser.add_argument("--there", metavar="NAME", help="its name at REF, where that was another")
    parser.add_argument(
        "--json", type=ResultFile, metavar="FILE", help="write the ratios to this file"
    )


def pair(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the ratios and return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.rounds < 1:
            raise BadRequest(f"--rounds {options.rounds}: at least one")
        compared = compare(options, arguments)
    except BadRequest as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BenchmarkFailed as error:
        print(f"error: {options.name} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    differing = [one for one in compared if not one.is_equal]
    console = Console()
    console.print(table(differing, options.ref))
    console.print(f"{len(compared) - len(differing)} more numbers are equal in all runs")
    if options.json:
        asked = {"ref": options.ref, "name": options.name, "options": list(arguments)}
        options.json.write({**asked, "numbers": [asdict(one) for one in compared]})
    return 0
