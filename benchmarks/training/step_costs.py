"""What checkpoints and evaluations cost the steps of a real run.

    asyncdock run RECIPE ─▶ metrics.jsonl ─▶ each step: alone, or beside an evaluation, or beside the writing of a checkpoint

    python -m benchmarks.training.step_costs [RECIPE] [--steps 32] [--set section.key=value …] [--json FILE]

A step is beside what takes at least half of its time. The first steps, which include the start, are
left out. ``exposed``: seconds in which training waited for the copy of its state, over those of a
median step alone.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from orchestration.history.events_file import METRICS, read_metrics
from pipeline.data.events import Event

FIRST = 3  # steps that are left out
CADENCE = ("evaluate.every=8", "checkpoint.every=10", "checkpoint.keep=1")


def run(recipe: Path, steps: int, sets: Sequence[str]) -> list[Event]:
    """The events of a run of ``recipe``. Raises CalledProcessError when it fails."""
    # on a disk: that of temporary files may be memory
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        out = Path(folder) / "run"
        options = [f"--set={text}" for text in (*CADENCE, f"train.steps={steps}", *sets)]
        command = [
            sys.executable,
            "-P",
            "-m",
            "api.cli.main",
            "run",
            str(recipe),
            "--plain",
            "--out",
            str(out),
        ]
        subprocess.run([*command, *options], check=True, stdout=sys.stderr)
        return list(read_metrics(out / METRICS))


def costs(events: Sequence[Event]) -> dict[str, Any]:
    """Median seconds of the steps of each kind, their number, and exposed shares."""
    times = {
        kind: [
            (event.time - event.data["seconds"], event.time)
            for event in events
            if event.kind == kind
        ]
        for kind in ("step", "evaluation", "checkpoint")
    }
    found: dict[str, list[float]] = {"alone": [], "evaluation": [], "checkpoint": []}
    for start, end in times["step"][FIRST:]:
        beside = {
            kind: sum(max(0.0, min(end, last) - max(start, first)) for first, last in times[kind])
            for kind in ("evaluation", "checkpoint")
        }
        kind = max(beside, key=lambda name: beside[name])
        if beside[kind] >= (end - start) / 2:
            found[kind].append(end - start)
        elif not sum(beside.values()):
            found["alone"].append(end - start)
    alone = statistics.median(found["alone"])
    exposed = [
        event.data["exposed_seconds"] / alone for event in events if event.kind == "checkpoint"
    ]
    return {
        "steps": {
            kind: {"count": len(each), "seconds": statistics.median(each)}
            for kind, each in found.items()
            if each
        },
        "seconds": {
            kind: [end - start for start, end in times[kind]]
            for kind in ("evaluation", "checkpoint")
        },
        "exposed_shares": exposed,
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("recipes/quickstart.toml"))
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    found = costs(run(options.recipe, options.steps, options.set))
    alone = found["steps"]["alone"]["seconds"]
    print("| steps | number | median, s | beside a step alone |\n|---|---|---|---|")
    for kind, of in found["steps"].items():
        name = (
            kind
            if kind == "alone"
            else (f"beside an {kind}")
            if kind == "evaluation"
            else (f"beside a {kind}")
        )
        print(f"| {name} | {of['count']} | {of['seconds']:.2f} | {of['seconds'] / alone:.2f} × |")
    for kind, each in found["seconds"].items():
        print(
            f"\n{kind}: {', '.join(f'{seconds:.1f}' for seconds in each)} s from its beginning "
            f"to its end"
        )
    print(
        f"\ncheckpoint, exposed share of a step: "
        f"{', '.join(f'{share:.3f}' for share in found['exposed_shares'])}"
    )
    if options.json:
        options.json.write(found)


if __name__ == "__main__":
    main()
