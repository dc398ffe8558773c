"""What no test executes as it stands on a page, by name.

Each says why, and what executes it instead.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages.page import ROOT, Block

DOCKER = (
    "Docker: `make compose-check` executes it where Docker is, tests/compose all but the containers"
)
MEASURED = (
    "a measurement of minutes to hours; tests/benchmarks/test_commands.py reads its arguments"
)
HOST = "a second machine; tests/orchestration/run/test_hosts.py executes it in two networks"
VERIFIERS = (
    "an environment with verifiers, which does not go beside the newest openai; "
    "tests/orchestration/run/test_verifiers.py executes it"
)
HUB = (
    "an account; tests/orchestration/publishing/test_hub.py uploads to a server that speaks the "
    "Hub's API"
)
# By the beginning of a command.
COMMANDS = {
    "asyncdock pairs "
    "runs/tiny/000-staleness-1-seed-0": "a run of the measurement above it; tests/test_plain_install.py executes it",
    "asyncdock run tiny --set launch.remote_rollouts": HOST,
    "asyncdock export runs/letters --to published": HUB,
    "hf auth login": HUB,
    "asyncdock serve --data my-service --index": HOST,
    "timeout 600 client/bin/python -m tinker_cookbook": "another environment, from a package "
    "index; tests/api/tinker/test_cookbook.py executes such recipes",
    "make bounds": "an hour, a package index and 7 GB for each environment",
    "make compose-check": DOCKER,
    "make demo": "ten minutes and a package index; it is `asyncdock run quickstart`",
    "make test": "this suite",
    "python rows.py glossary": VERIFIERS,
    "uv run -m skyrl.tinker.api": "another server, in an environment of its own",
    "asyncdock run glossary.toml": VERIFIERS,
    "python drive.py": "a service with a run that waits for programs, for as long as it trains; "
    "tests/orchestration/run/test_programs.py::test_programs_outside_play_the_trajectories "
    "executes such a program",
}
# Pages of which no command is executed.
WHOLE = {
    "compose/README.md": DOCKER,
    "docs/lm-eval.md": "another environment, from a package index; benchmarks/service/lm_eval.py "
    "executes such commands",
    "docs/measurements/gpu.md": "a CUDA GPU",
    "docs/tinker.md": "another environment, from a package index; tests/api/tinker/test_sdks.py "
    "executes its program there",
}
# On the pages of docs/measurements.
MEASUREMENT = re.compile(r"(sudo )?python -m benchmarks\.")


def why(page: Path, command: str) -> str:
    """Why a command of ``page`` is not executed, or ""."""
    name = str(page.relative_to(ROOT))
    if name in WHOLE:
        return WHOLE[name]
    if name.startswith("docs/measurements/") and MEASUREMENT.match(command):
        return MEASURED
    return next((reason for start, reason in COMMANDS.items() if command.startswith(start)), "")


def is_excepted(page: Path, block: Block) -> bool:
    """Whether ``block`` has a command that is not executed: such a block is left out as a whole."""
    return any(why(page, command) for command in block.commands)
