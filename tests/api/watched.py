"""The command ``asyncdock`` with a watchdog: a server that says in its log which handlers held its
event loop."""

from __future__ import annotations

import sys
from typing import Any

from aiohttp import web

from api.cli import main as cli
from api.server import app as server
from orchestration.processes.forkserver import ForkServer
from tests.api.watchdog import Watchdog, marked
from tests.forked import fork_server


def main() -> None:
    build = server.build_app

    def build_marked(*arguments: Any, **options: Any) -> web.Application:
        app = build(*arguments, **options)
        app.middlewares.insert(0, marked)
        return app

    server.build_app = build_marked  # type: ignore[assignment]
    ForkServer.start = fork_server  # type: ignore[method-assign,assignment]
    with Watchdog(report=lambda hold: print(hold, file=sys.stderr, flush=True)).watching():
        cli.main()


if __name__ == "__main__":
    main()
