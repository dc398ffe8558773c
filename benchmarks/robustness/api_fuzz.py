"""The REST API under schemathesis: every check, against a real server, until enough requests were
made.

    asyncdock serve (no runs are executed) ◀── schemathesis run, one seed after the other ──▶ requests, failures by check

What is generated from the document is sent as it is and broken on purpose; an answer that is not
documented, does not fit its schema, lets a wrong request through or is a 5xx is a failure. Run it
from the repository:

    python -m benchmarks.robustness.api_fuzz --requests 20000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from api.server.access.tokens import Tokens
from orchestration.service.index_server import ServiceIndex

ROOT = Path(__file__).resolve().parents[2]
# A recipe may fit its schema and not be sound: a schema cannot say how keys must fit together, and
# 422 does, or 400 where errors are OpenAI's.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "410", "422", "429"]

[[operations]]
include-path-regex = "^/(v1/((chat/)?completions|responses|messages)|(de)?tokenize)"
[operations.checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "401", "403", "404", "429"]
"""
# Of the two operations that take a recipe, one tries each of its keys: some 700 requests, a third
# of all.
QUICK = f"""{CONFIG}
[[operations]]
include-path = "/v1/recipes/check"
phases.coverage.enabled = false
"""
# Streams and long polls last as long as they are read: their own tests read them.
ENDLESS = ("/v1/runs/{run}/metrics/stream",)
FUZZED = ("--rate", "1000000", "--max-waiting", "1000000")


@dataclass
class Found:
    """The sum of one or more rounds. ``reports``: the output of each round that found a failure."""

    requests: int = 0
    operations: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)


class Served:
    """``with Served(…) as (url, token)``: a server of its own that executes nothing, and an admin's
    token. ``module``: what is started. ``log``: what it wrote, once it has ended."""

    def __init__(self, *options: str, module: str = "api.cli.main") -> None:
        self.options = options
        self.module = module
        self.log = ""

    def __enter__(self) -> tuple[str, str]:
        self._home = tempfile.TemporaryDirectory(prefix="adk-")
        data = Path(self._home.name) / "service"
        self._index = ServiceIndex(data)
        index = self._index.start()
        token = ""

        async def make() -> str:
            tokens = Tokens(index)
            _, text = await tokens.create("fuzz", "admin")
            await tokens.close()
            return text

        token = asyncio.run(make())
        self._file = (Path(self._home.name) / "log").open("wb")
        command = [
            sys.executable,
            "-P",
            "-m",
            self.module,
            "serve",
            "--data",
            str(data),
            "--listen",
            "127.0.0.1:0",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._server = subprocess.Popen(
            [*command, "--runs", "0", *self.options],
            stdout=subprocess.PIPE,
            stderr=self._file,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line.startswith("AsyncDock serves "):
            raise RuntimeError(
                f"the server did not start: {(Path(self._home.name) / 'log').read_text()}"
            )
        return line.split()[2], token

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.wait(60)
        self._index.stop()
        self._file.close()
        self.log = (Path(self._home.name) / "log").read_text()
        self._home.cleanup()


def fuzz(
    url: str,
    token: str,
    found: Found,
    *,
    seed: int,
    examples: int,
    seconds: float,
    settings: str = CONFIG,
) -> None:
    """One round of schemathesis against the server; ``examples`` for each operation and phase, at
    most ``seconds``."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        report = Path(folder) / "report.json"
        config.write_text(settings)
        command = [
            Path(sys.executable).parent / "schemathesis",
            "--config-file",
            config,
            "run",
            f"{url}/openapi.json",
        ]
        command += [
            "--header",
            f"Authorization: Bearer {token}",
            "--checks",
            "all",
            "--continue-on-failure",
        ]
        command += [
            "--max-examples",
            str(examples),
            "--seed",
            str(seed),
            "--generation-database",
            "none",
            "--no-color",
        ]
        command += [
            "--request-timeout",
            "60",
            "--no-shrink",
            "--report",
            "json",
            "--report-json-path",
            report,
        ]
        command += [part for path in ENDLESS for part in ("--exclude-path", path)]
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=folder,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"schemathesis made no report: {done.stdout}{done.stderr}")
        outcome = json.loads(report.read_text())
    found.requests += outcome["test_cases"]["generated"]
    found.operations = outcome["operations"]["tested"]
    for failure in outcome["failures"]:
        found.failures[failure["title"]] += failure["count"]
    if done.returncode:
        found.failures[f"schemathesis ended with {done.returncode}"] += 1
        found.reports.append(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument(
        "--examples", type=int, default=50, help="of each operation and phase, in one round"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = Found()
    seed = options.seed
    began = time.monotonic()
    with Served(*FUZZED) as (url, token):
        while found.requests < options.requests:
            fuzz(url, token, found, seed=seed, examples=options.examples, seconds=3600.0)
            passed = time.monotonic() - began
            print(
                f"seed {seed}: {found.requests} requests, {found.failures.total()} failures, "
                f"{passed:.0f} s",
                flush=True,
            )
            seed += 1
    print(
        f"{found.requests} requests to {found.operations} operations in "
        f"{time.monotonic() - began:.0f} s"
    )
    for name, count in found.failures.items():
        print(f"  {count} × {name}")
    for report in found.reports[:3]:
        print(report)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
