"""The command ``asyncdock``, with fork servers that have made their imports already
(`tests/forked.py`)."""

from __future__ import annotations

from api.cli import main as cli
from orchestration.processes.forkserver import ForkServer
from tests.forked import fork_server


def main() -> None:
    ForkServer.start = fork_server  # type: ignore[method-assign,assignment]
    cli.main()


if __name__ == "__main__":
    main()
