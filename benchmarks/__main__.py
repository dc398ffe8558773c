"""List the benchmarks, or measure what has a peer, a floor or a goal.

python -m benchmarks                                # all of them, a line each
python -m benchmarks score [--quick] [--only NAME…] [--json FILE]
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.scoreboard import BENCHMARKS, Score, measured, table

HERE = Path(__file__).parent


def listed() -> Table:
    """The first sentence of each program of this folder."""
    shown = Table(box=None)
    shown.add_column("python -m benchmarks.")
    shown.add_column("")
    for path in sorted(HERE.glob("*.py")):
        source = path.read_text()
        if path.stem.startswith("__") or "__main__" not in source:
            continue
        description = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
        shown.add_row(path.stem, " ".join(description.split()))
    return shown


def score(options: argparse.Namespace) -> None:
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
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command")
    scored = commands.add_parser("score", help="one table of what has a peer, a floor or a goal")
    scored.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    scored.add_argument("--only", nargs="+", choices=[one.name for one in BENCHMARKS])
    scored.add_argument("--json", type=Path, help="write the scores to this file")
    options = parser.parse_args(arguments)
    if options.command == "score":
        score(options)
    else:
        Console().print(listed())
    return 0


if __name__ == "__main__":
    sys.exit(main())
